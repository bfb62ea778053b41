use super::*;
use crate::credit::Grants;
use crate::frame::{AckEntry, HEADER_BYTES};
use crate::sink::{Discard, Incoming, Sink};
use crate::transport::Link;
use rustix::event::{poll, PollFd, PollFlags};
use std::net::TcpListener;

fn session() -> Arc<Session> {
    session_of(Arc::new(Discard))
}

fn session_of(sink: Arc<dyn Sink>) -> Arc<Session> {
    let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
    let links = (2, Duration::from_secs(20));
    Session::new("x".into(), grants, 8, links, sink).unwrap()
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

#[test]
fn an_acknowledgement_that_was_collected_for_a_lost_link_is_collected_again() {
    let session = session();
    let (ours, _theirs) = pair();
    let state = session.links.add(0, ours.try_clone().unwrap()).0;
    let (_, writer) = Link::from(ours).split().unwrap();
    session.delivered(3, 1, 0, 0);
    // The reader is faster: everything that the writer does afterwards is too late.
    session.lose(&state, session.link_lost("the test"));
    run(&session, &state, writer);
    let mut acks = Vec::new();
    session.inbound.collect_acks(&mut acks);
    let entries: Vec<_> = AckEntry::read_all(&acks).unwrap().collect();
    assert_eq!(entries.len(), 1, "it went into the lost link and nowhere else");
    assert_eq!((entries[0].stream, entries[0].seq), (3, 1));
}

/// An end in doubt.
struct Asks;

impl Sink for Asks {
    fn frame(&self, _: Incoming) -> Result<(), SessionError> {
        Ok(())
    }

    fn finish(&self, _: &[u8]) {}

    fn closed(&self, _: &Arc<SessionError>) {}

    fn may_ask(&self) -> bool {
        true
    }
}

/// Reads the ABORT of a session over its link.
fn aborted(sink: Arc<dyn Sink>) -> serde_json::Value {
    let session = session_of(sink);
    let (ours, mut theirs) = pair();
    session.add_link(0, Link::from(ours)).unwrap();
    session.fail(SessionError::Local { reason: "the test".into() });
    let mut frame = [0; HEADER_BYTES];
    let header = loop {
        std::io::Read::read_exact(&mut theirs, &mut frame).unwrap();
        let header = Header::from_bytes(&frame, 65536).unwrap();
        if header.kind == FrameType::Abort {
            break header;
        }
    };
    let mut note = vec![0; header.payload_len as usize];
    std::io::Read::read_exact(&mut theirs, &mut note).unwrap();
    session.join();
    assert!(session.is_peer_informed());
    serde_json::from_slice(&note).unwrap()
}

#[test]
fn an_abort_is_acknowledged_and_states_whether_its_sender_asks() {
    let note = |asks| serde_json::json!({ "reason": "the test", "committed": false, "asks": asks });
    assert_eq!(aborted(Arc::new(Discard)), note(false));
    assert_eq!(aborted(Arc::new(Asks)), note(true));
}

/// The peer sends its reason and closes with bytes unread, which resets the connection: the writer
/// then finds the link lost before the reader has read the reason.
#[test]
fn the_reason_of_a_peer_that_has_closed_is_read() {
    let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
    let links = (1, Duration::ZERO);
    let session = Session::new("x".into(), grants, 8, links, Arc::new(Discard)).unwrap();
    let (ours, mut theirs) = pair();
    std::io::Write::write_all(&mut &ours, b"unread").unwrap();
    let note = br#"{"reason":"the test","committed":false}"#;
    let header = Header::free(FrameType::Abort, u32::try_from(note.len()).unwrap());
    std::io::Write::write_all(&mut theirs, &[&header.to_bytes()[..], note].concat()).unwrap();
    drop(theirs);
    let mut fds = [PollFd::new(&ours, PollFlags::empty())];
    while !fds[0].revents().contains(PollFlags::ERR) {
        poll(&mut fds, None).unwrap();
    }
    let state = session.links.add(0, ours.try_clone().unwrap()).0;
    let (reader, writer) = Link::from(ours).split().unwrap();
    session.outbound.set_finish(b"{}".to_vec());
    std::thread::scope(|scope| {
        scope.spawn(|| run(&session, &state, writer));
        std::thread::sleep(Duration::from_millis(100));
        crate::reader::run(&session, &state, reader);
    });
    let failure = session.failure().expect("the session has ended").to_string();
    assert!(failure.contains("the test"), "{failure}");
}

#[test]
fn a_still_open_waits_for_no_turn_of_a_limited_session() {
    let session = session();
    session.limit_rate(1000);
    let cap = session.cap.get().unwrap();
    let (ours, mut theirs) = pair();
    let state = session.links.add(0, ours.try_clone().unwrap()).0;
    let (_, mut writer) = Link::from(ours).split().unwrap();
    // An hour's bytes have been written.
    cap.count(3_600_000);
    let header = Header { kind: FrameType::StillOpen, ..Header::free(FrameType::Ack, 0) };
    write_frame(&session, &state, &mut writer, &header, [&[]; 2]).unwrap();
    assert!(cap.holds_back());
    std::io::Read::read_exact(&mut theirs, &mut [0; HEADER_BYTES]).unwrap();
}

#[test]
fn a_link_without_frames_to_send_sends_heartbeats() {
    let session = session();
    // Another link has the role of the first link.
    assert_eq!(session.links.role(u64::MAX - 1), Role::First);
    let (ours, mut theirs) = pair();
    session.add_link(0, Link::from(ours)).unwrap();
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let feeding = {
        let (session, over) = (session.clone(), over.clone());
        std::thread::spawn(move || {
            while !over.load(Ordering::Acquire) {
                let _ = session.outbound.overflow.push(Outgoing::Acks);
                std::thread::sleep(HEARTBEAT / 5);
            }
        })
    };
    // Many times the usual time: on a busy machine a heartbeat may be late, but a bug that
    // delays one delays it for ever.
    theirs.set_read_timeout(Some(10 * crate::session::SILENCE)).unwrap();
    let mut frame = [0; HEADER_BYTES];
    for _ in 0..2 {
        // The link of a peer that is silent is lost after 3 s.
        let beat = Header::free(FrameType::Heartbeat, 0).to_bytes();
        std::io::Write::write_all(&mut theirs, &beat).unwrap();
        std::io::Read::read_exact(&mut theirs, &mut frame).expect("nothing came in 30 s");
        assert_eq!(Header::from_bytes(&frame, 65536).unwrap().kind, FrameType::Heartbeat);
    }
    over.store(true, Ordering::Release);
    feeding.join().unwrap();
    session.fail(SessionError::Local { reason: "the test is over".into() });
    session.join();
}
