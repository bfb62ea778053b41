//! The two threads of a link: one writes what the outbox holds, one reads frames and gives them to
//! the sink.
//!
//! The first link carries everything as long as it takes it; what it would have to wait for spills
//! over to the others. What is urgent goes by a link of its own, the lane, or on the first one
//! ahead of the rest where there is no other. Frames dealt round instead make four connections that
//! each send now and then, and congestion control takes each for a slow one: 37 s instead of 14 for
//! 310 MB at 200 Mbit/s under BBR.

use crate::error::SessionError;
use crate::frame::{AckEntry, FrameType, Header, HEADER_BYTES};
use crate::hello::would_block;
use crate::resume::{LinkState, Role};
use crate::session::{AbortNote, Incoming, Outgoing, Session};
use crate::transport::{Link, LinkReader, LinkWriter};
use codec::{Codec, UnitHeader};
use pipeline::Popped;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use socket2::SockRef;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A link idle for this long shows life (W24).
const HEARTBEAT: Duration = Duration::from_secs(1);
/// A link that brought nothing for this long is lost (W24): three heartbeats. With what it takes to
/// notice that a dead peer is found within 4 s.
pub const SILENCE: Duration = Duration::from_secs(3);
/// How often a thread that waits for its socket looks at the rest of the world.
const LOOK: Duration = Duration::from_millis(500);
/// Bytes of a frame that is not wanted, read at once.
const SCRATCH: usize = 16 << 10;
/// How long the last words of a session may take.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Unsent bytes the kernel may hold per link; a link counts as writable below half of it. Room for
/// a whole frame, so that writing one to a writable link does not wait. The credits, not this,
/// bound what is in flight.
const NOTSENT_LOWAT: u32 = 1 << 20;

/// Sets a link's socket options and gives a second handle to shut it with.
pub(crate) fn prepare(socket: &TcpStream) -> Result<TcpStream, SessionError> {
    let failed =
        |source| SessionError::Resource { what: "cannot set up a link's socket".into(), source };
    socket.set_nodelay(true).map_err(failed)?;
    // Both threads wake up now and then: to look whether the session ended, and to notice silence.
    socket.set_read_timeout(Some(LOOK)).map_err(failed)?;
    socket.set_write_timeout(Some(LOOK)).map_err(failed)?;
    let options = SockRef::from(socket);
    options.set_tcp_user_timeout(Some(SILENCE)).map_err(failed)?;
    options.set_tcp_notsent_lowat(NOTSENT_LOWAT).map_err(failed)?;
    socket.try_clone().map_err(failed)
}

/// Starts the writer and the reader of a link.
pub(crate) fn start(
    session: &Arc<Session>,
    state: &Arc<LinkState>,
    link: Link,
) -> Result<[JoinHandle<()>; 2], SessionError> {
    let failed =
        |source| SessionError::Resource { what: "cannot start a link's threads".into(), source };
    let (reading, writing) = link.split().map_err(failed)?;
    let reader = {
        let (session, state) = (session.clone(), state.clone());
        std::thread::Builder::new()
            .name("link-rx".into())
            .spawn(move || read_link(&session, &state, reading))
            .map_err(failed)?
    };
    let (session, state) = (session.clone(), state.clone());
    let writer = std::thread::Builder::new()
        .name("link-tx".into())
        .spawn(move || write_link(&session, &state, writing))
        .map_err(failed)?;
    Ok([writer, reader])
}

fn write_link(session: &Session, state: &Arc<LinkState>, mut link: LinkWriter) {
    if let Err(error) = write_frames(session, state, &mut link) {
        session.lose(state, error);
    }
    // Another link takes this one's work, if it was the first or the lane.
    session.lifeline.release(state.id);
    let _ = session.spill().push(Outgoing::Acks);
    session.wake_for_urgent();
    // An ACK may have been collected for it after `lose` had everything acknowledged again.
    session.acknowledge_again();
    if let (true, Some(note)) = (session.has_failed(), session.abort_note()) {
        let length = u32::try_from(note.len()).unwrap_or(0);
        let _ = link.socket.set_write_timeout(Some(LAST_WORDS));
        let header = Header::free(FrameType::Abort, length).to_bytes();
        // The peer may be gone; it will notice by itself.
        let _ = link.write_all([&header, &note, &[]], |_| false);
    }
    link.close();
    let _ =
        link.socket.shutdown(if session.has_failed() { Shutdown::Both } else { Shutdown::Write });
}

fn write_frames(
    session: &Session,
    state: &LinkState,
    link: &mut LinkWriter,
) -> Result<(), SessionError> {
    let mut acks = Vec::new();
    // What this end has and says, which a link before this one may have taken with it (W26, W27).
    session.acknowledge_again();
    send(session, state, link, &Outgoing::Acks, &mut acks)?;
    if let Some(report) = session.farewell() {
        send(session, state, link, &Outgoing::Free(FrameType::Finish, report.clone()), &mut acks)?;
    }
    let mut was_lane = false;
    // What is popped need not come to anything: a link is idle when it has written nothing.
    let mut wrote = Instant::now();
    while !state.is_dead() {
        if wrote.elapsed() >= HEARTBEAT {
            let header = Header::free(FrameType::Heartbeat, 0);
            write_frame(session, state, link, &header, [&[]; 2])?;
            wrote = Instant::now();
        }
        let role = session.lifeline.role(state.id);
        let (first, lane) = (role == Role::First, role == Role::Lane);
        let turned = lane != was_lane;
        if turned {
            was_lane = lane;
            prefer(&link.socket, lane);
        }
        if (first || (turned && lane)) && session.spare_links() == 0 {
            // Spilled for a link that is no more, or is the lane now.
            session.unspill();
        }
        // Without a lane what is urgent goes ahead here.
        let urgent = (first && !session.lifeline.has_lane()).then(|| session.urgent().pop());
        let urgent = urgent.flatten();
        let may_spill = first && urgent.is_none();
        let queue = match role {
            Role::First => session.outbox(),
            Role::Lane => session.urgent(),
            Role::Other => session.spill(),
        };
        let popped = urgent.map_or_else(|| queue.pop_until(Some(wrote + HEARTBEAT)), Popped::Item);
        let frame = match popped {
            // A session that failed drops what it holds (W21).
            Popped::Item(_) if session.has_failed() => continue,
            Popped::Item(frame) => frame,
            Popped::Timeout => continue,
            Popped::Closed => break,
        };
        if state.is_dead() {
            session.put_back(frame);
            break;
        }
        let Some(frame) = (if may_spill { spill(session, link, frame) } else { Some(frame) })
        else {
            continue;
        };
        if is_stale(session, &frame) {
            continue;
        }
        match send(session, state, link, &frame, &mut acks) {
            Ok(true) => wrote = Instant::now(),
            Ok(false) => {}
            Err(error) => {
                // Not kept yet, and nobody else's: it goes first.
                session.put_back(frame);
                return Err(error);
            }
        }
        if let Some(frame) = session.kept().keep(state.id, frame, || state.is_dead()) {
            session.put_back(frame);
        }
    }
    Ok(())
}

/// Whether a frame need not go, as the peer has had it, or must not, as it is no longer true.
fn is_stale(session: &Session, frame: &Outgoing) -> bool {
    match frame.header() {
        Some(_) if session.kept().is_acked(frame) => true,
        Some(header) if header.kind == FrameType::StillOpen => {
            !session.sink().still_open(header.stream)
        }
        _ => false,
    }
}

/// Has the kernel and the network prefer a link, where they care, or no longer.
fn prefer(socket: &TcpStream, preferred: bool) {
    /// Interactive, the most that needs no privilege (socket(7)); and low delay, by RFC 1349.
    const PRIORITY: u32 = 6;
    const LOW_DELAY: u32 = 0x10;
    let options = SockRef::from(socket);
    // A wish: over IPv6 the first does not apply. In this order, as it sets a priority of its own.
    let _ = options.set_tos_v4(if preferred { LOW_DELAY } else { 0 });
    let _ = options.set_priority(if preferred { PRIORITY } else { 0 });
}

/// Passes a frame with a payload on to the other links when the first one would have to wait; gives
/// it back if they have as much as they can do.
fn spill(session: &Session, link: &LinkWriter, frame: Outgoing) -> Option<Outgoing> {
    let others = session.spare_links();
    if others == 0 || !matches!(frame, Outgoing::Unit { .. }) || session.spill().len() >= others {
        return Some(frame);
    }
    let mut fds = [PollFd::new(link, PollFlags::OUT)];
    match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(0) => session.spill().push(frame).err(),
        _ => Some(frame),
    }
}

/// Writes a frame; false for ACKs that have nothing to say.
fn send(
    session: &Session,
    state: &LinkState,
    link: &mut LinkWriter,
    frame: &Outgoing,
    acks: &mut Vec<u8>,
) -> Result<bool, SessionError> {
    match frame {
        Outgoing::Bare(header) => write_frame(session, state, link, header, [&[]; 2])?,
        Outgoing::Unit { header, unit, body } => {
            let unit_bytes = unit.to_bytes();
            let payload = &body[..unit.payload_len as usize + header.table_len as usize];
            let length = u32::try_from(unit_bytes.len() + payload.len()).unwrap_or(u32::MAX);
            let header = Header { payload_len: length, ..*header };
            write_frame(session, state, link, &header, [&unit_bytes, payload])?
        }
        Outgoing::Free(kind, payload) => {
            let header = Header::free(*kind, u32::try_from(payload.len()).unwrap_or(u32::MAX));
            write_frame(session, state, link, &header, [payload, &[]])?
        }
        Outgoing::Acks => {
            acks.clear();
            session.collect_acks(acks);
            if acks.is_empty() {
                return Ok(false);
            }
            let header =
                Header::free(FrameType::Ack, u32::try_from(acks.len()).unwrap_or(u32::MAX));
            write_frame(session, state, link, &header, [acks, &[]])?
        }
    }
    Ok(true)
}

fn write_frame(
    session: &Session,
    state: &LinkState,
    link: &mut LinkWriter,
    header: &Header,
    [first, second]: [&[u8]; 2],
) -> Result<(), SessionError> {
    // Back-pressure. A peer that never takes anything is found by its silence, not here.
    let go_on =
        |error: &std::io::Error| would_block(error) && !session.has_failed() && !state.is_dead();
    let sent = link
        .write_all([&header.to_bytes(), first, second], go_on)
        .map_err(|error| lost(session, &error.to_string()))?;
    session.bytes_out.fetch_add(sent, Ordering::Relaxed);
    Ok(())
}

fn read_link(session: &Session, state: &Arc<LinkState>, mut link: LinkReader) {
    let result = read_frames(session, state, &mut link);
    match result {
        // Fine when both are leaving.
        Ok(()) | Err(SessionError::LinkLost { .. })
            if session.may_end() && !session.has_failed() =>
        {
            // The writer may still have something to say.
            if session.lifeline.ended(state) {
                session.close_queues();
            }
        }
        Ok(()) => session.lose(state, lost(session, "closed by the other end")),
        Err(error) if error.is_of_link() => session.lose(state, error),
        Err(error) => session.fail(error),
    }
    let _ = link.socket.shutdown(Shutdown::Read);
}

fn read_frames(
    session: &Session,
    state: &LinkState,
    link: &mut LinkReader,
) -> Result<(), SessionError> {
    let chunk_bytes = session.grants().chunk_bytes;
    let mut raw = [0; HEADER_BYTES];
    let mut free = Vec::new();
    // What a new link brings in any case shows nothing: a hello, and an ACK of what is known.
    let (mut moves, mut said) = (false, false);
    loop {
        if moves && !said {
            said = true;
            session.moves(state);
        }
        if !fill(session, link, &mut raw, true)? {
            return Ok(());
        }
        let header = Header::from_bytes(&raw, chunk_bytes)?;
        let length = header.payload_len as usize;
        if header.kind.is_sequenced() {
            if !session.expects(&header)? {
                skip(session, link, length)?;
                continue;
            }
            let unit = match header.kind {
                FrameType::Data => Some(read_unit(session, link, &header)?),
                _ => None,
            };
            // Only now: a link that is lost in the middle of a frame must not keep another from
            // bringing it.
            if session.arrived(&header) {
                moves = true;
                session.sink().frame(Incoming { header, unit })?;
            }
            continue;
        }
        free.resize(length, 0);
        fill(session, link, &mut free, false)?;
        match header.kind {
            FrameType::Ack => {
                let now = Instant::now();
                for entry in AckEntry::read_all(&free)? {
                    session.credits().acknowledge(&entry, now)?;
                    moves |= session.kept().release(entry.stream, entry.seq);
                }
            }
            FrameType::Abort => {
                let note = serde_json::from_slice(&free).unwrap_or(AbortNote {
                    reason: "it gave no reason that can be read".into(),
                    committed: true,
                });
                let peer = session.peer.clone();
                return Err(SessionError::Aborted {
                    peer,
                    reason: note.reason,
                    committed: note.committed,
                });
            }
            FrameType::Finish => {
                if session.farewell().is_none() && !session.sink().answers_finish() {
                    return Err(SessionError::EarlyFinish { peer: session.peer.clone() });
                }
                session.peer_leaves();
                session.sink().finish(&free);
            }
            FrameType::Heartbeat => moves = true,
            _ => {}
        }
    }
}

/// Reads and drops the payload of a frame that another link has brought.
fn skip(session: &Session, link: &mut LinkReader, mut length: usize) -> Result<(), SessionError> {
    let mut scratch = [0; SCRATCH];
    while length > 0 {
        let now = length.min(SCRATCH);
        fill(session, link, &mut scratch[..now], false)?;
        length -= now;
    }
    Ok(())
}

/// Reads the unit of a DATA frame into a buffer: a plain one when the payload is the chunk itself.
fn read_unit(
    session: &Session,
    link: &mut LinkReader,
    header: &Header,
) -> Result<(UnitHeader, pages::Slot), SessionError> {
    let mut raw = [0; UnitHeader::LEN];
    fill(session, link, &mut raw, false)?;
    let bad =
        |detail: String| SessionError::Unit { stream: header.stream, seq: header.seq, detail };
    let unit = UnitHeader::from_bytes(&raw).map_err(|error| bad(error.to_string()))?;
    let length = unit.payload_len as usize + header.table_len as usize;
    if length + UnitHeader::LEN != header.payload_len as usize
        || length > session.grants().chunk_bytes
    {
        return Err(bad(format!(
            "its unit states {} bytes, the frame {} and a table of {}",
            unit.payload_len, header.payload_len, header.table_len
        )));
    }
    let is_chunk = header.flags & crate::frame::FLAG_PACKED == 0;
    if is_chunk && unit.plain_len != header.plain_len {
        return Err(bad(format!(
            "its unit states {} plain bytes, the frame {}",
            unit.plain_len, header.plain_len
        )));
    }
    let mut slot = if is_chunk && unit.codec == Codec::Raw {
        // An honest peer stays within its credit, and then there is always one free (W13).
        session.plain().take().ok_or(SessionError::Credit { stream: header.stream })?
    } else {
        let closed = || lost(session, "the session has ended");
        session.payload().take_until(None, || session.has_failed()).ok_or_else(closed)?
    };
    fill(session, link, &mut slot[..length], false)?;
    Ok((unit, slot))
}

/// Fills `out`. False when the peer closed before the first byte and `may_end` allows it.
fn fill(
    session: &Session,
    link: &mut LinkReader,
    out: &mut [u8],
    may_end: bool,
) -> Result<bool, SessionError> {
    let before = link.wire();
    let mut done = 0;
    let mut heard = Instant::now();
    while done < out.len() {
        match link.read(&mut out[done..]) {
            Ok(0) if done == 0 && may_end => return Ok(false),
            Ok(0) => return Err(lost(session, "cut inside a frame")),
            Ok(n) => {
                done += n;
                heard = Instant::now();
                session.lifeline.hear(heard);
            }
            Err(error) if would_block(&error) => {
                if session.has_failed() {
                    return Err(lost(session, "the session has ended"));
                }
                if error.kind() == ErrorKind::Interrupted {
                    heard = Instant::now();
                }
                if heard.elapsed() >= SILENCE {
                    return Err(SessionError::Silent {
                        peer: session.peer.clone(),
                        seconds: SILENCE.as_secs(),
                    });
                }
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Err(lost(session, "cut off without a word"));
            }
            Err(error) => return Err(lost(session, &error.to_string())),
        }
    }
    session.bytes_in.fetch_add(link.wire() - before, Ordering::Relaxed);
    Ok(true)
}

fn lost(session: &Session, detail: &str) -> SessionError {
    SessionError::LinkLost { peer: session.peer.clone(), detail: detail.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credit::Grants;
    use crate::session::Sink;
    use std::net::TcpListener;

    struct Nobody;

    impl Sink for Nobody {
        fn frame(&self, _: Incoming) -> Result<(), SessionError> {
            Ok(())
        }

        fn finish(&self, _: &[u8]) {}

        fn closed(&self, _: &Arc<SessionError>) {}
    }

    fn session() -> Arc<Session> {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let lifeline = (2, Duration::from_secs(20));
        Session::new("x".into(), grants, 8, lifeline, Arc::new(Nobody)).unwrap()
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
        let socket = prepare(&ours).unwrap();
        let state = session.lifeline.up(0, socket).0;
        let (_, writer) = Link::from(ours).split().unwrap();
        session.delivered(3, 1, 0, 0);
        // The reader is faster: all that follows of the writer comes too late.
        session.lose(&state, lost(&session, "the test"));
        write_link(&session, &state, writer);
        let mut acks = Vec::new();
        session.collect_acks(&mut acks);
        let entries: Vec<_> = AckEntry::read_all(&acks).unwrap().collect();
        assert_eq!(entries.len(), 1, "it went into the lost link and nowhere else");
        assert_eq!((entries[0].stream, entries[0].seq), (3, 1));
    }

    #[test]
    fn a_link_that_is_given_nothing_but_empty_words_shows_life() {
        let session = session();
        // The work of the first link is somebody else's.
        assert_eq!(session.lifeline.role(u64::MAX - 1), Role::First);
        let (ours, mut theirs) = pair();
        session.add_link(0, Link::from(ours)).unwrap();
        let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let feeding = {
            let (session, over) = (session.clone(), over.clone());
            std::thread::spawn(move || {
                while !over.load(Ordering::Acquire) {
                    let _ = session.spill().push(Outgoing::Acks);
                    std::thread::sleep(HEARTBEAT / 5);
                }
            })
        };
        // Many times what it may take: a busy machine is late, but words that put it off do so for
        // ever.
        theirs.set_read_timeout(Some(10 * SILENCE)).unwrap();
        let mut frame = [0; HEADER_BYTES];
        for _ in 0..2 {
            std::io::Read::read_exact(&mut theirs, &mut frame).expect("not a word in 30 s");
            assert_eq!(Header::from_bytes(&frame, 65536).unwrap().kind, FrameType::Heartbeat);
        }
        over.store(true, Ordering::Release);
        feeding.join().unwrap();
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }
}
