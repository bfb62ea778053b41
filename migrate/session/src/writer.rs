//! The writing thread of a link.
//!
//! The first link carries everything as long as it does not have to wait and its thread keeps up;
//! the other links carry the overflow. DATA with priority has a link of its own, or is sent before
//! the rest on a single link. With frames dealt round robin, four connections each send
//! intermittently, and congestion control takes each for a slow one: 37 s instead of 14 for 310 MB
//! at 200 Mbit/s under BBR.

use crate::error::SessionError;
use crate::frame::Header;
use crate::frame_type::FrameType;
use crate::links::{LinkState, Role};
use crate::outgoing::Outgoing;
use crate::overhead::take_slice;
use crate::preamble::would_block;
use crate::session::Session;
use crate::tcp_info;
use crate::transport::LinkWriter;
use pipeline::Popped;
use socket2::SockRef;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use turns::Cap;

mod passing;
use passing::Passing;

/// A link idle for this long sends a HEARTBEAT (W24).
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long sending the ABORT of a session may take, and how long its acknowledgement.
const ABORT_TIME: Duration = Duration::from_secs(1);
/// How often the acknowledgement, or the reader's end, is looked for.
const ACK_LOOK: Duration = Duration::from_millis(1);
/// So many looks, in 3 s or more, are for the reader of a link that takes no more bytes. They are
/// counted because the reader does not run either while this host stands still.
const LAST_READ: u32 = 3000;

/// Writes the queued frames until the link or the session ends.
pub(crate) fn run(session: &Session, state: &Arc<LinkState>, mut link: LinkWriter) {
    let written = write_frames(session, state, &mut link);
    let is_at_frame = written.is_ok();
    if let Err(error) = written {
        // Where lost links are replaced, the frames of this one must not wait.
        if !session.links.resumes_lost() {
            await_reader(session, state);
        }
        session.lose(state, error);
    }
    // Another link takes over this one's role.
    session.links.release_roles(state.id);
    session.outbound.wake_successors();
    // This link may have collected an ACK after `lose` had everything acknowledged again.
    session.acknowledge_again();
    // Behind a part of a frame the peer would take an ABORT for the rest of that frame.
    if session.has_failed() && is_at_frame {
        if let Some(note) = session.abort_note() {
            abort(session, &mut link, &note);
        }
    }
    link.close();
    let _ =
        link.socket.shutdown(if session.has_failed() { Shutdown::Both } else { Shutdown::Write });
}

/// Waits for the reader of a link that takes no more bytes. A peer that closed may have sent its
/// reason before: then an ABORT is still to be read.
fn await_reader(session: &Session, state: &LinkState) {
    for _ in 0..LAST_READ {
        if state.is_dead() || session.has_failed() {
            return;
        }
        std::thread::sleep(ACK_LOOK);
    }
}

/// Sends an ABORT, and records whether it has reached the peer's host.
fn abort(session: &Session, link: &mut LinkWriter, note: &[u8]) {
    let length = u32::try_from(note.len()).unwrap_or(0);
    let _ = link.socket.set_write_timeout(Some(ABORT_TIME));
    let header = Header::free(FrameType::Abort, length).to_bytes();
    // The peer may be gone; then it needs no ABORT.
    if link.write_all([&header, note, &[]], |_| false).is_err() {
        return;
    }
    // A link whose path is down still takes bytes until its silence is noticed.
    let deadline = Instant::now() + ABORT_TIME;
    loop {
        // The last look is behind the deadline: this thread may have stood still before it.
        let is_last = Instant::now() >= deadline;
        if tcp_info::is_acknowledged(&link.socket) {
            return session.note_informed();
        }
        if is_last {
            return;
        }
        std::thread::sleep(ACK_LOOK);
    }
}

fn write_frames(
    session: &Session,
    state: &LinkState,
    link: &mut LinkWriter,
) -> Result<(), SessionError> {
    let mut acks = Vec::new();
    // This end's ACK and FINISH, which an earlier link may have lost (W26, W27).
    session.acknowledge_again();
    send(session, state, link, &Outgoing::Acks, &mut acks)?;
    if let Some(report) = session.outbound.finish() {
        send(session, state, link, &Outgoing::Free(FrameType::Finish, report.clone()), &mut acks)?;
    }
    let (mut had_priority, mut passing) = (false, Passing::default());
    // A popped frame may need no writing: a link is idle when it has written nothing.
    let mut wrote = Instant::now();
    while !state.is_dead() {
        if wrote.elapsed() >= HEARTBEAT {
            let header = Header::free(FrameType::Heartbeat, 0);
            write_frame(session, state, link, &header, [&[]; 2])?;
            wrote = Instant::now();
        }
        let role = session.links.role(state.id);
        let (first, priority) = (role == Role::First, role == Role::Priority);
        let turned = priority != had_priority;
        if turned {
            had_priority = priority;
            prefer(&link.socket, priority);
        }
        if (first || (turned && priority)) && session.links.spare_links() == 0 {
            // These frames were meant for a link that is lost, or that is the priority link now.
            session.outbound.reclaim_overflow();
        }
        // Without a priority link, frames with priority go first here.
        let ahead =
            (first && !session.links.has_priority_link()).then(|| session.outbound.priority.pop());
        let ahead = ahead.flatten();
        let may_pass_on = first && ahead.is_none();
        let queue = match role {
            Role::First => &session.outbound.outbox,
            Role::Priority => &session.outbound.priority,
            Role::Other => &session.outbound.overflow,
        };
        let popped = ahead.map_or_else(|| queue.pop_until(Some(wrote + HEARTBEAT)), Popped::Item);
        let frame = match popped {
            // A failed session drops its queued frames (W21).
            Popped::Item(_) if session.has_failed() => continue,
            Popped::Item(frame) => frame,
            Popped::Timeout => continue,
            Popped::Closed => break,
        };
        if state.is_dead() {
            session.outbound.requeue(frame);
            break;
        }
        let kept = if may_pass_on { passing.pass_on(session, link, frame) } else { Some(frame) };
        let Some(frame) = kept else { continue };
        if is_stale(session, &frame) {
            continue;
        }
        match send(session, state, link, &frame, &mut acks) {
            Ok(true) => wrote = Instant::now(),
            Ok(false) => {}
            Err(error) => {
                // The list of unacknowledged frames does not hold it yet.
                session.outbound.requeue(frame);
                return Err(error);
            }
        }
        if let Some(frame) = session.outbound.unacked.hold(state.id, frame, || state.is_dead()) {
            session.outbound.requeue(frame);
        }
    }
    Ok(())
}

/// Whether a frame need not be sent, since the peer has it, or must not be sent, since its
/// statement is no longer true.
fn is_stale(session: &Session, frame: &Outgoing) -> bool {
    match frame.header() {
        Some(_) if session.outbound.unacked.is_acked(frame) => true,
        Some(header) if header.kind == FrameType::StillOpen => !session.sink.still_open(header),
        _ => false,
    }
}

/// Requests preference for a link from the kernel and the network, or withdraws it.
fn prefer(socket: &TcpStream, preferred: bool) {
    /// Interactive, the highest priority without privilege (socket(7)); and low delay, by RFC 1349.
    const PRIORITY: u32 = 6;
    const LOW_DELAY: u32 = 0x10;
    let options = SockRef::from(socket);
    // Best effort: TOS does not apply to IPv6. In this order, since setting TOS changes the
    // priority.
    let _ = options.set_tos_v4(if preferred { LOW_DELAY } else { 0 });
    let _ = options.set_priority(if preferred { PRIORITY } else { 0 });
}

/// Writes a frame; false if an ACK would be empty.
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
            session.inbound.collect_acks(acks);
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
    // Back-pressure. The reader's silence limit, not this, detects a peer that reads nothing.
    let go_on =
        |error: &std::io::Error| would_block(error) && !session.has_failed() && !state.is_dead();
    let is_urgent = header.kind == FrameType::StillOpen;
    let header = header.to_bytes();
    let parts: [&[u8]; 3] = [&header, first, second];
    // STILL_OPEN states that QEMU's socket was open a moment ago (W20), so it waits for no turn.
    let (cap, turns) = (session.cap.get(), session.turns.get());
    let is_limited = cap.is_some() || turns.is_some();
    if is_limited && is_urgent {
        let bytes = link.overhead().with(header.len());
        cap.inspect(|cap| cap.count(bytes));
        turns.inspect(|turns| turns.count(bytes));
    }
    let written = if is_limited && !is_urgent {
        write_in_turn(session, link, parts, go_on)
    } else {
        link.write_all(parts, go_on).map(|sent| {
            session.bytes_out.fetch_add(sent, Ordering::Relaxed);
        })
    };
    written.map_err(|error| session.link_lost(&error.to_string()))
}

/// Writes a frame slice by slice, each slice in its turn. If the session fails meanwhile, the frame
/// is still written whole: the ABORT behind it has to begin where a frame does.
fn write_in_turn(
    session: &Session,
    link: &mut LinkWriter,
    mut parts: [&[u8]; 3],
    go_on: impl Fn(&std::io::Error) -> bool,
) -> std::io::Result<()> {
    let (cap, turns) = (session.cap.get(), session.turns.get());
    let overhead = link.overhead();
    let most = |of: Option<usize>| of.unwrap_or(usize::MAX);
    let most = most(cap.map(Cap::slice)).min(most(turns.map(|turns| turns.slice())));
    loop {
        let slice = take_slice(&mut parts, most);
        let bytes = slice.iter().map(|part| part.len()).sum();
        if bytes == 0 {
            return Ok(());
        }
        let counted = overhead.with(bytes);
        cap.inspect(|cap| cap.wait(counted));
        turns.inspect(|turns| turns.wait(counted));
        let sent = link.write_all(slice, &go_on)?;
        session.bytes_out.fetch_add(sent, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
