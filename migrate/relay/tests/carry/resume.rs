//! W25 to W28: links are cut, the session goes on, and every byte is delivered unchanged.

mod doubt;

use crate::cutter::{Cutter, Plan, Way};
use crate::harness::{
    assert_same, bounded, bounded_by, destination_qemu, read_exactly, read_rest, readable,
    source_qemu, tag_at, until_in_doubt, Options, Reader, Receiving, Sending, Streams, A_WHILE,
    SHUT_OK, SILENCE, WATCHDOG,
};
use crate::identity::{multifd, single};
use relay::{Destination, Host, RelayError, Server, ServerConfig, UnixAddress};
use session::{dial, Grants, Hello, Session, SessionError, Verdict};
use std::io::Write;
use std::net::TcpListener;
use std::sync::{mpsc, Arc, Mutex};
use std::time::{Duration, Instant};
use stream::synth::Style;

/// How long the relays of these tests wait for a link.
pub(crate) const RESUME: Duration = Duration::from_secs(120);
/// The most time for a test with a migration for each message.
pub(crate) const MANY: Duration = Duration::from_secs(1200);
/// Small chunks, so that there are many messages.
const GRANTS: Grants = Grants { chunk_bytes: 65536, stream_frames: 4, shared_frames: 8 };

fn receiving(resume: Duration) -> Receiving {
    Receiving::resuming(&[None], GRANTS, None, resume)
}

fn options(links: u16, resume: Duration) -> Options {
    Options { links, resume, ..Options::default() }
}

/// A whole migration over a network that is cut; returns how often.
fn survives(streams: &Streams, links: u16, plan: Plan) -> usize {
    survives_with(streams, options(links, RESUME), plan).0
}

/// The same; also returns how many pages went as differences.
pub(crate) fn survives_with(streams: &Streams, options: Options, plan: Plan) -> (usize, u64) {
    let receiving = receiving(RESUME);
    let cutter = Cutter::new(receiving.address, Some(plan));
    let destination = destination_qemu(receiving.qemu(None), streams, Reader::Prompt);
    let sending = Sending::new(&receiving, cutter.address, options);
    let source = source_qemu(sending.path.clone(), streams.clone(), 0);
    let received = destination.join().unwrap();
    assert_same(&received.main, &streams.main, &format!("main, {plan:?}"));
    for (id, (got, sent)) in received.channels.iter().zip(&streams.channels).enumerate() {
        assert_same(got, sent, &format!("channel {id}, {plan:?}"));
    }
    let back = [&[0, 2, 0, 4, 0, 0, 0, 1][..], &SHUT_OK].concat();
    assert_same(&source.join().unwrap(), &back, &format!("return path, {plan:?}"));
    let (_, deltas) = sending.deltas();
    sending.result().unwrap_or_else(|error| panic!("source, {plan:?}: {error}"));
    let end = receiving.result();
    let end = end.unwrap_or_else(|error| panic!("destination, {plan:?}: {error}"));
    // Repeated until the peer has it (W27).
    assert_eq!(end.peer_report, b"{\"end\":\"source\"}", "{plan:?}");
    (cutter.cuts(), deltas)
}

/// Cuts once at each message, one migration after the other, until there are no more messages.
fn at_every_message(streams: &Streams, links: u16, way: Way, inside: usize, all: bool) {
    let mut after = 0;
    while survives(streams, links, Plan { way, after, inside, all, times: 1 }) > 0 {
        after += 1;
    }
    // How many acknowledgements go back depends on how fast they are read. The answer to hello, the
    // return path's bytes and the end always do.
    let least = if way == Way::Back { 3 } else { 6 };
    assert!(after >= least, "only {after} messages went {way:?}");
}

#[test]
fn the_only_link_is_cut_before_every_message_to_the_destination() {
    bounded_by(MANY, || at_every_message(&single(220), 1, Way::Forth, 0, true));
}

#[test]
fn the_only_link_is_cut_before_every_message_to_the_source() {
    bounded_by(MANY, || at_every_message(&single(220), 1, Way::Back, 0, true));
}

#[test]
fn the_only_link_is_cut_inside_every_message() {
    bounded_by(MANY, || {
        at_every_message(&single(120), 1, Way::Forth, 100, true);
        at_every_message(&single(120), 1, Way::Back, 20, true);
    });
}

#[test]
fn all_of_three_links_are_cut_at_every_message_of_main_and_channels() {
    bounded_by(MANY, || at_every_message(&multifd(Style::Qemu92, 2, 160), 3, Way::Forth, 0, true));
}

#[test]
fn one_of_three_links_is_cut_at_every_message_of_main_and_channels() {
    bounded_by(MANY, || {
        at_every_message(&multifd(Style::Qemu72, 2, 160), 3, Way::Forth, 60, false);
        at_every_message(&multifd(Style::Qemu72, 2, 160), 3, Way::Back, 0, false);
    });
}

#[test]
fn links_that_are_cut_repeatedly_deliver_every_byte() {
    bounded_by(MANY, || {
        for (links, all) in [(1, true), (4, false), (4, true)] {
            let plan = Plan { way: Way::Forth, after: 7, inside: 1000, all, times: 12 };
            let cuts = survives(&single(1500), links, plan);
            assert!(cuts > 5, "{cuts}");
        }
    });
}

#[test]
fn a_frame_that_arrives_twice_is_delivered_once() {
    bounded(|| {
        let (streams, receiving) = (single(600), receiving(RESUME));
        let cutter = Cutter::doubling(receiving.address);
        let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
        let sending = Sending::new(&receiving, cutter.address, options(2, RESUME));
        let source = source_qemu(sending.path.clone(), streams.clone(), 0);
        assert_same(&destination.join().unwrap().main, &streams.main, "main");
        source.join().unwrap();
        sending.result().unwrap();
        receiving.result().unwrap();
        assert!(cutter.has_doubled());
    });
}

/// Both relays with a network in between that can be cut, and a main stream of which the
/// destination has read `len` bytes.
struct Rig {
    cutter: Cutter,
    sending: Sending,
    receiving: Receiving,
    source: std::os::unix::net::UnixStream,
    destination: std::os::unix::net::UnixStream,
    sent: Vec<u8>,
}

/// With credit for everything, acknowledged or not.
fn rig(len: impl FnOnce(&[u8]) -> usize, resume: [Duration; 2]) -> Rig {
    rig_with(Grants::default(), len, resume)
}

fn rig_with(grants: Grants, len: impl FnOnce(&[u8]) -> usize, resume: [Duration; 2]) -> Rig {
    rig_to(Receiving::resuming(&[None], grants, None, resume[1]), len, resume[0])
}

fn rig_to(receiving: Receiving, len: impl FnOnce(&[u8]) -> usize, resume: Duration) -> Rig {
    let sent = single(300).main;
    let listener = receiving.qemu(None);
    let cutter = Cutter::new(receiving.address, None);
    let sending = Sending::new(&receiving, cutter.address, options(2, resume));
    let source = sending.connect();
    let len = len(&sent);
    let (now, to) = (sent[..len].to_vec(), source.try_clone().unwrap());
    let writer = std::thread::spawn(move || (&to).write_all(&now).unwrap());
    let (destination, _) = listener.accept().unwrap();
    assert_same(&read_exactly(&destination, len), &sent[..len], "main");
    writer.join().unwrap();
    Rig { cutter, sending, receiving, source, destination, sent }
}

/// Waits for a notice that holds `words`.
fn noticed(sending: &Sending, words: &str) {
    loop {
        let text = sending.notices.recv_timeout(WATCHDOG).expect("it is said");
        if text.contains(words) {
            return;
        }
    }
}

#[test]
fn return_path_bytes_of_an_outage_arrive_after_it() {
    bounded(|| {
        let rig = rig(<[u8]>::len, [RESUME; 2]);
        rig.cutter.hold();
        noticed(&rig.sending, "waiting up to 120 s");
        (&rig.destination).write_all(&SHUT_OK).unwrap();
        assert!(!readable(&rig.source, A_WHILE), "QEMU heard of success over a link that is cut");
        rig.cutter.release();
        assert_eq!(read_exactly(&rig.source, 8), SHUT_OK);
        noticed(&rig.sending, "is back after");
        drop((rig.source, rig.destination));
        rig.sending.result().unwrap();
        rig.receiving.result().unwrap();
    });
}

#[test]
fn a_source_that_is_cancelled_during_an_outage_never_has_its_tag_delivered() {
    bounded(|| {
        let rig = rig(|sent| sent.len() / 2, [RESUME, AMPLE]);
        rig.cutter.hold();
        noticed(&rig.sending, "waiting up to");
        let half = rig.sent.len() / 2;
        let (to, rest) = (rig.source.try_clone().unwrap(), rig.sent[half..].to_vec());
        // On a machine that is slow now, the relay may not read everything while nothing is
        // acknowledged (W16).
        let writer = std::thread::spawn(move || (&to).write_all(&rest));
        // STILL_OPEN is queued, and waits for a link.
        std::thread::sleep(A_WHILE);
        rig.source.shutdown(std::net::Shutdown::Both).unwrap();
        let _ = writer.join().unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::SourceEnded), "{error}");
        rig.cutter.release();
        let rest = read_rest(&rig.destination);
        assert_same(&rest, &rig.sent[half..half + rest.len()], "what was delivered");
        assert!(half + rest.len() < tag_at(&rig.sent), "the tag was delivered");
        rig.receiving.result().unwrap_err();
    });
}

#[test]
fn a_source_without_credit_can_be_cancelled_during_an_outage() {
    bounded(|| {
        let rig = rig_with(GRANTS, |_| 4096, [RESUME; 2]);
        rig.cutter.hold();
        noticed(&rig.sending, "waiting up to");
        // More than the credit, so that the relay does not read to its end.
        let (bytes, to) = (rig.sent.repeat(4), rig.source.try_clone().unwrap());
        let writer = std::thread::spawn(move || {
            let _ = (&to).write_all(&bytes[4096..]);
        });
        std::thread::sleep(2 * A_WHILE);
        assert!(!writer.is_finished());
        rig.source.shutdown(std::net::Shutdown::Both).unwrap();
        writer.join().unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::SourceEnded), "{error}");
    });
}

/// An outage longer than both ends wait.
pub(crate) const SHORT: Duration = Duration::from_secs(2);
/// The same for an end that must have read something meanwhile, even on a busy machine.
pub(crate) const AMPLE: Duration = Duration::from_secs(8);

#[test]
fn a_still_open_that_no_link_was_given_causes_no_doubt() {
    bounded(|| {
        let rig = rig(|sent| sent.len() / 2, [AMPLE; 2]);
        rig.cutter.hold();
        noticed(&rig.sending, "waiting up to");
        let half = rig.sent.len() / 2;
        (&rig.source).write_all(&rig.sent[half..]).unwrap();
        assert_eq!(read_rest(&rig.source), b"", "the source VM goes on");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Ended(_)), "{error}");
        rig.cutter.release();
        let rest = read_rest(&rig.destination);
        assert!(half + rest.len() < tag_at(&rig.sent), "the tag was delivered");
    });
}

#[test]
fn an_outage_that_lasts_too_long_before_still_open_frees_both_ends() {
    bounded(|| {
        let rig = rig(|sent| sent.len() / 2, [SHORT; 2]);
        rig.cutter.hold();
        assert_eq!(read_rest(&rig.source), b"");
        assert_eq!(read_rest(&rig.destination), b"");
        for error in [rig.sending.result().unwrap_err(), rig.receiving.result().unwrap_err()] {
            let text = error.to_string();
            assert!(text.contains("did not come back within 2 s"), "{text}");
        }
    });
}

#[test]
fn a_peer_whose_session_has_ended_meanwhile_reports_its_end() {
    bounded(|| {
        let rig = rig(|sent| sent.len() / 2, [RESUME; 2]);
        rig.cutter.hold();
        noticed(&rig.sending, "waiting up to");
        drop(rig.destination);
        rig.receiving.result().unwrap_err();
        rig.cutter.release();
        let error = rig.sending.result().unwrap_err().to_string();
        assert!(error.contains("has ended"), "{error}");
        assert_eq!(read_rest(&rig.source), b"");
    });
}

#[test]
fn a_stopped_receiver_ends_a_migration_whose_vm_has_not_begun_to_start() {
    bounded(|| {
        let rig = rig(|sent| sent.len() / 2, [RESUME; 2]);
        rig.receiving.server.stop();
        let error = rig.receiving.result().unwrap_err().to_string();
        assert!(error.contains("the receiver was stopped"), "{error}");
        assert_eq!(read_rest(&rig.destination), b"");
        assert_eq!(read_rest(&rig.source), b"", "the source VM goes on");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Ended(_)), "{error}");
    });
}

#[test]
fn a_receiver_stopped_while_the_vm_starts_waits_until_the_source_is_informed() {
    bounded(|| {
        let rig = rig(<[u8]>::len, [RESUME; 2]);
        rig.receiving.server.stop();
        assert!(!readable(&rig.destination, A_WHILE), "it ended at once");
        let until = Instant::now() + WATCHDOG;
        loop {
            let notices = rig.receiving.host.notices.lock().unwrap().join("\n");
            let count = notices.matches("interrupt again").count();
            if count == 1 {
                break;
            }
            assert!(count == 0 && Instant::now() < until, "{notices}");
            std::thread::sleep(Duration::from_millis(10));
        }
        // It accepts its own links again, but no new migration.
        rig.cutter.hold();
        noticed(&rig.sending, "waiting up to");
        rig.cutter.release();
        let other = Hello { session: "b".repeat(32), ..hello() };
        let error = dial(&rig.receiving.address.to_string(), None, &other).unwrap_err();
        assert!(error.to_string().contains("is ending"), "{error}");
        (&rig.destination).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&rig.source, 8), SHUT_OK);
        drop((rig.source, rig.destination));
        rig.sending.result().unwrap();
        rig.receiving.result().unwrap();
    });
}

#[test]
fn a_receiver_that_is_stopped_twice_ends_every_session() {
    bounded(|| {
        let rig = rig(<[u8]>::len, [RESUME; 2]);
        rig.receiving.server.stop();
        assert!(!readable(&rig.destination, A_WHILE), "it ended at once");
        rig.receiving.server.stop();
        assert_eq!(read_rest(&rig.destination), b"");
        rig.receiving.result().unwrap_err();
        noticed(&rig.sending, "Look at the destination");
        drop(rig.source);
        rig.sending.result().unwrap_err();
    });
}

/// The hello of a first and only link.
pub(crate) fn hello() -> Hello {
    Hello { session: "a".repeat(32), ..Hello::of_one_link(4096).unwrap() }
}

/// An application that stores a session and its notices, and does nothing else.
struct Leaves(Mutex<Option<Arc<Session>>>, Mutex<mpsc::Sender<String>>);

impl Host for Leaves {
    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &Destination) {
        *self.0.lock().unwrap() = Some(destination.session().clone());
    }

    fn notice(&self, text: &str) {
        let _ = self.1.lock().unwrap().send(text.into());
    }
}

#[test]
fn the_record_of_an_ended_session_does_not_change() {
    bounded(|| {
        let folder = tempfile::tempdir().unwrap();
        let (sender, notices) = mpsc::channel();
        let host = Arc::new(Leaves(Mutex::new(None), Mutex::new(sender)));
        let config = ServerConfig {
            qat: None,
            targets: vec![(None, UnixAddress::from(folder.path().join("dst")).into())],
            acceptor: None,
            decompress_threads: 1,
            page_size: 4096,
            grants: GRANTS,
            resume: RESUME,
            silence: SILENCE,
            delta_cache: 0,
            seed: None,
            history: 0,
        };
        let server = Server::new(config, host.clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let runs = server.clone();
        let running = std::thread::spawn(move || runs.run(&listener, true).unwrap());
        let _link = dial(&address, None, &hello()).unwrap();
        // Until the server has recorded the session, which was not committed.
        while !notices.recv_timeout(WATCHDOG).unwrap().contains("free again") {}
        let session = host.0.lock().unwrap().take().unwrap();
        assert!(!session.commit(), "a writer that is still there may start the VM");
        session.join();
        server.stop();
        running.join().unwrap();
    });
}

#[test]
fn a_restarted_peer_ends_the_wait() {
    bounded(|| {
        let (rig, other) = (rig(|sent| sent.len() / 2, [RESUME; 2]), receiving(RESUME));
        rig.cutter.hold();
        noticed(&rig.sending, "waiting up to");
        rig.cutter.lead_to(other.address);
        rig.cutter.release();
        let error = rig.sending.result().unwrap_err().to_string();
        assert!(error.contains("no such session"), "{error}");
        assert_eq!(read_rest(&rig.source), b"");
    });
}

#[test]
fn a_question_needs_the_token_of_the_session() {
    bounded(|| {
        let receiving = receiving(RESUME);
        let to = receiving.address.to_string();
        let (_link, welcome) = dial(&to, None, &hello()).unwrap();
        let ask = |token: &str| {
            let asking = Hello { token: Some(token.into()), ask: true, ..hello() };
            dial(&to, None, &asking).unwrap_err()
        };
        for token in ["", &"0".repeat(32), &welcome.token[..31]] {
            let error = ask(token);
            assert!(matches!(error, SessionError::Refused { .. }), "{error}");
            assert!(error.to_string().contains("not yours"), "{error}");
        }
        // It went on until its own client asked.
        let error = ask(&welcome.token);
        assert!(
            matches!(error, SessionError::Over { answer: Verdict { committed: false, .. }, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("ends with this question"), "{error}");
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains("given up"), "{error}");
        // The record of the ended session is not disclosed to other peers either.
        let error = ask(&"0".repeat(32));
        assert!(matches!(error, SessionError::Refused { .. }), "{error}");
    });
}

#[test]
fn a_session_cannot_be_taken_over_by_another_peer() {
    bounded(|| {
        let rig = rig(|sent| sent.len() / 2, [RESUME; 2]);
        let to = rig.receiving.address.to_string();
        for ask in [false, true] {
            let token = Some("0".repeat(32));
            let stranger = Hello { session: "0".repeat(32), token, ask, ..hello() };
            let error = dial(&to, None, &stranger).unwrap_err().to_string();
            assert!(error.contains("no such session, or not yours"), "{error}");
        }
        let half = rig.sent.len() / 2;
        let (bytes, to) = (rig.sent.clone(), rig.source.try_clone().unwrap());
        let writer = std::thread::spawn(move || (&to).write_all(&bytes[half..]).unwrap());
        assert_same(&read_exactly(&rig.destination, rig.sent.len() - half), &rig.sent[half..], "");
        writer.join().unwrap();
        (&rig.destination).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&rig.source, 8), SHUT_OK);
        drop((rig.source, rig.destination));
        rig.sending.result().unwrap();
        rig.receiving.result().unwrap();
    });
}
