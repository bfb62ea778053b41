//! An NBD connection at the destination (W35 to W37). It connects to the NBD server, returns the
//! server's bytes to the source, and writes the client's bytes to the server.

use super::shared::{Event, Shared};
use crate::error::{error_chain, RelayError};
use crate::inbox::{Arrived, Inbox};
use crate::qemu_socket::QemuSocket;
use crate::sockets::{is_open, wait_readable};
use crate::stream_kind;
use crate::threads::spawn;
use crate::units::raw;
use pipeline::Results;
use rustix::io::Errno;
use rustix::net::{recv, RecvFlags};
use session::{FrameType, SessionError};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the client may take to open its connection, beyond the wait for lost links. It does so
/// at once.
const OPENS: Duration = Duration::from_secs(60);
/// How long the server may take to write its first bytes.
const GREETING: Duration = Duration::from_secs(10);
/// The first bytes of an NBD server.
const MAGIC: &[u8; 8] = b"NBDMAGIC";
/// How often the server's first bytes are looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Writes the frames of the connection until the session ends.
pub(super) fn run(shared: &Arc<Shared>, stream: u16, queue: &Results<Arrived>) {
    if let Err(error) = deliver(shared, stream, queue) {
        shared.session.fail(error);
    }
}

fn deliver(
    shared: &Arc<Shared>,
    stream: u16,
    queue: &Results<Arrived>,
) -> Result<(), SessionError> {
    let mut inbox = Inbox::new(stream, queue);
    let mut server: Option<Arc<QemuSocket>> = None;
    while let Some(Arrived { header, chunk, checksum, .. }) = inbox.next()? {
        // Frames still queued at the end are dropped.
        if shared.has_ended() {
            return Ok(());
        }
        let receipt = match (header.kind, chunk, &server) {
            (FrameType::Open, None, None) if (stream, header.flags) == (0, stream_kind::NBD) => {
                server = open(shared, stream)?;
                if server.is_none() {
                    return Ok(());
                }
                inbox.receipt(&header)
            }
            (FrameType::Data, Some(chunk), Some(server)) if header.table_len == 0 => {
                let chunk = chunk?;
                let bytes = &chunk[..header.plain_len as usize];
                let receipt = inbox.check(&header, bytes, checksum)?;
                { &**server }.write_all(bytes).map_err(|error| {
                    let server = &shared.target;
                    local(format!("the NBD server at {server} takes no more bytes: {error}"))
                })?;
                shared.counters.plain.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                receipt
            }
            (FrameType::Eof, None, Some(server)) => {
                // The server may have closed first.
                let _ = server.shutdown(Shutdown::Write);
                inbox.receipt(&header)
            }
            _ => {
                let detail = "a frame that no NBD connection has".into();
                return Err(SessionError::Sequence { stream, seq: header.seq, detail });
            }
        };
        if header.kind == FrameType::Eof {
            // Sent before the ACK, from which the source learns of this: the source's FINISH
            // follows the ACK.
            let _ = shared.events.send(Event::SourceEof);
        }
        inbox.acknowledge(&shared.session, receipt);
    }
    Ok(())
}

/// Connects to the NBD server, and starts to return the server's bytes to the source; `None` when
/// the session has ended.
fn open(shared: &Arc<Shared>, stream: u16) -> Result<Option<Arc<QemuSocket>>, SessionError> {
    if !shared.beginning.begin() {
        return Ok(None);
    }
    if !shared.host_listens().map_err(local)? {
        return Ok(None);
    }
    // An NBD server speaks first, and listens already: libvirt has started it before the client
    // connects. One attempt: a socket that listens later is not the one that was looked at, and may
    // be that of a QEMU that awaits a VM (W38).
    let server =
        shared.connect(Duration::ZERO, true, &[]).map_err(|error| local(error_chain(&error)))?;
    let Some(server) = server else { return Ok(None) };
    if !has_greeted(shared, &server)? {
        return Ok(None);
    }
    let (reading, socket) = (shared.clone(), server.clone());
    spawn("read-back", move || {
        if let Err(error) = read_back(&reading, stream, &socket) {
            reading.session.fail(error);
        }
    })
    .map_err(|error| local(error.to_string()))?;
    Ok(Some(server))
}

/// Waits for the server's first bytes, and leaves them in the socket; false when the session has
/// ended. A server of another protocol begins differently, or waits for its client. No peer may
/// reach such a server through this host (W36).
fn has_greeted(shared: &Shared, server: &QemuSocket) -> Result<bool, SessionError> {
    let until = Instant::now() + GREETING;
    let stranger =
        |what: &str| local(format!("at {} listens no NBD server: {what}", shared.target));
    let mut first = [0; MAGIC.len()];
    while !shared.has_ended() {
        if Instant::now() >= until {
            let seconds = GREETING.as_secs();
            return Err(stranger(&format!("it has not greeted the client in {seconds} s")));
        }
        if !wait_readable(server, Some(LOOK)) {
            continue;
        }
        let got = match recv(server, &mut first[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(stranger("it has closed the connection")),
            Ok((_, got)) => got,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(stranger(&error.to_string())),
        };
        if first[..got] != MAGIC[..got] {
            return Err(stranger(&format!("it begins with {:02x?}", &first[..got])));
        }
        if got == MAGIC.len() {
            return Ok(true);
        }
        if !is_open(server) {
            return Err(stranger("it has closed the connection"));
        }
        std::thread::sleep(LOOK);
    }
    Ok(false)
}

/// Returns the server's bytes to the source, uncompressed and at once: they are answers.
fn read_back(shared: &Shared, stream: u16, mut server: &QemuSocket) -> Result<(), SessionError> {
    let session = &shared.session;
    if !session.send_bare(stream, FrameType::Open, 0) {
        return Ok(());
    }
    loop {
        wait_readable(server, None);
        let Some(permit) = session.credits().permit(stream) else { return Ok(()) };
        let stop = || session.failure().is_some();
        let Some(mut chunk) = session.plain().take_until(None, stop) else { return Ok(()) };
        let most = permit.bytes.min(session.grants().chunk_bytes);
        let len = match server.read(&mut chunk[..most]) {
            Ok(len) => len,
            Err(error) => {
                session.credits().give_back(permit);
                if error.kind() == ErrorKind::Interrupted {
                    continue;
                }
                let server = &shared.target;
                return Err(local(format!("the NBD server at {server} broke off: {error}")));
            }
        };
        if len == 0 {
            session.credits().give_back(permit);
            break;
        }
        let checksum = codec::checksum(&chunk[..len]);
        let header = session.credits().issue_data(permit, len, checksum, 0);
        session.send(raw(header, chunk, len, checksum));
    }
    // The event comes before EOF, as at the end of the client's bytes.
    let _ = shared.events.send(Event::QemuEof { unread: false });
    session.send_bare(stream, FrameType::Eof, 0);
    Ok(())
}

fn local(reason: String) -> SessionError {
    SessionError::Local { reason }
}

/// Waits until both directions have ended and the source has reported that; returns the source's
/// report.
pub(super) fn decide(shared: &Shared, events: &Receiver<Event>) -> Result<Vec<u8>, RelayError> {
    decide_within(shared, events, OPENS + shared.session.resume_timeout())
}

/// As [`decide`], if the client opens its connection within `opens`. A session that nobody uses
/// would keep its process for as long as a link lives.
pub(super) fn decide_within(
    shared: &Shared,
    events: &Receiver<Event>,
    opens: Duration,
) -> Result<Vec<u8>, RelayError> {
    let until = Instant::now() + opens;
    let (mut client, mut server) = (false, false);
    loop {
        let event = if shared.beginning.has_begun() {
            events.recv().ok()
        } else {
            match events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(event) => Some(event),
                Err(RecvTimeoutError::Disconnected) => None,
                Err(RecvTimeoutError::Timeout) if shared.beginning.give_up() => {
                    let reason = format!("the client has opened no connection in {opens:?}");
                    return Err(SessionError::Local { reason }.into());
                }
                // It has begun since.
                Err(RecvTimeoutError::Timeout) => continue,
            }
        };
        match event {
            Some(Event::SourceEof) => client = true,
            Some(Event::QemuEof { .. }) => server = true,
            Some(Event::Finished(peer_report)) if client && server => return Ok(peer_report),
            Some(Event::Finished(_)) => {
                return Err(SessionError::EarlyFinish { peer: shared.session.peer.clone() }.into());
            }
            Some(Event::Closed(error)) => return Err(RelayError::Ended(error)),
            // The other events occur only in a migration.
            Some(_) => {}
            None => return Err(RelayError::DestinationEnded),
        }
    }
}
