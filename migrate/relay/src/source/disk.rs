//! Carries the connection of an NBD client. QEMU makes one for each disk that it copies to another
//! host (W35 to W37).
//!
//! ```text
//!  NBD client ─► read_out ─► codec threads ─► session
//!             ◄─ write_back ◄────────────────
//! ```
//!
//! The bytes keep their order, each chunk is checked, and a lost link costs none of them. Only QEMU
//! and the NBD server interpret the bytes, and only the server's answer is a success.

use super::chunk::{self, ReadChunk};
use super::intake::read_chunk;
use super::run::{Source, SourceEnd};
use super::shared::{Event, Shared, SourceStream};
use crate::error::RelayError;
use crate::inbox::{self, Arrived, Inbox};
use crate::qemu_socket::QemuSocket;
use crate::sockets::wait_readable;
use crate::stream_kind;
use session::{FrameType, SessionError};
use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, PoisonError};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};
use stream::Token;

/// How long the last acknowledgements may take, beyond the wait for lost links.
const LAST_ACKS: Duration = Duration::from_secs(10);
/// How often the client is checked until the NBD server has sent its first bytes.
const LOOK: Duration = Duration::from_millis(50);
/// A chunk of fewer bytes does not wait for more: an answer may depend on them.
const BULK: usize = 16 << 10;

/// Why an NBD connection was not carried to its end.
#[derive(Debug)]
pub struct DiskError {
    /// The reason.
    pub error: RelayError,
    /// The client's connection, if nothing was read from it and nothing written to it: it may go
    /// another way.
    pub untouched: Option<QemuSocket>,
}

impl Source {
    /// Carries an NBD connection until both directions have ended. The client has sent nothing yet,
    /// since the server speaks first. `notice` gets messages for the user; `report` makes the JSON
    /// for the peer.
    ///
    /// # Errors
    /// No NBD server answers at the other end; a link was lost for too long; the connection broke.
    /// The client sees its connection end, unless it is returned.
    pub fn carry_disk(
        &self,
        socket: QemuSocket,
        mut notice: impl FnMut(&str),
        report: impl FnOnce() -> Vec<u8>,
    ) -> Result<SourceEnd, DiskError> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_run.store(true, Ordering::Release);
        let shared = &self.shared;
        let stream = shared.admit_disk(socket);
        let queue = inbox::queue();
        let _ = stream.results.set(queue.clone());
        let mut inbox = Inbox::new(stream.id, &queue);
        if let Err(error) = open(shared, &stream, &mut inbox) {
            shared.forget_streams();
            queue.close();
            let error = self.end(Err(error)).err().unwrap_or(RelayError::SourceEnded);
            // The links' threads, which may have had it, have ended.
            let connection = Arc::into_inner(stream).map(|stream| stream.connection);
            let untouched = connection.and_then(Arc::into_inner).map(|one| one.socket);
            return Err(DiskError { error, untouched });
        }
        std::thread::scope(|scope| {
            start(scope, shared, "intake", || read_out(shared, &stream));
            start(scope, shared, "return-path", || {
                write_back(shared, &stream, inbox)
                    .unwrap_or_else(|error| shared.session.fail(error));
            });
            let result = decide(shared, &events, &mut notice);
            // Ends the threads, too.
            self.end(result.and_then(|()| self.finish(&events, report)))
        })
        .map_err(|error| DiskError { error, untouched: None })
    }
}

/// Starts a thread. The session fails if the system refuses the thread.
fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    shared: &Shared,
    name: &str,
    body: impl FnOnce() + Send + 'scope,
) {
    if let Err(error) = Builder::new().name(name.into()).spawn_scoped(scope, body) {
        let reason = format!("cannot start thread {name}: {error}");
        shared.session.fail(SessionError::Local { reason });
    }
}

/// Opens the connection at the peer, and waits until the NBD server there has spoken (W36).
fn open(shared: &Shared, stream: &SourceStream, inbox: &mut Inbox<'_>) -> Result<(), RelayError> {
    let session = &shared.session;
    session.send_bare(stream.id, FrameType::Open, stream_kind::NBD);
    loop {
        if let Some(Arrived { header, .. }) = inbox.next_by(Some(Instant::now() + LOOK))? {
            if header.kind != FrameType::Open {
                let (stream, seq) = (header.stream, header.seq);
                let detail = "the first frame of a stream is OPEN".into();
                return Err(SessionError::Sequence { stream, seq, detail }.into());
            }
            let receipt = inbox.receipt(&header);
            inbox.acknowledge(session, receipt);
            return Ok(());
        }
        if let Some(error) = session.failure() {
            return Err(ended(error));
        }
        if wait_readable(stream.socket(), Some(Duration::ZERO)) {
            let what = "it is no NBD client: it has written or ended before a server spoke".into();
            return Err(RelayError::Unsupported { what });
        }
    }
}

/// Sends what the client writes, until it ends.
fn read_out(shared: &Shared, stream: &SourceStream) {
    let session = &shared.session;
    loop {
        wait_readable(stream.socket(), None);
        let Some(permit) = session.credits().permit(stream.id) else { return };
        let stop = || session.failure().is_some();
        let Some(mut chunk) = session.plain().take_until(None, stop) else { return };
        let most = permit.bytes.min(session.grants().chunk_bytes);
        let len = read_chunk(stream.socket(), &mut chunk[..most], |done| done >= BULK);
        if len == 0 {
            session.credits().give_back(permit);
            break;
        }
        let checksum = codec::checksum(&chunk[..len]);
        shared.counters.plain.fetch_add(len as u64, Ordering::Relaxed);
        let header = session.credits().issue_data(permit, len, checksum, 0);
        let mut tokens = shared.spare.pop().unwrap_or_default();
        tokens.clear();
        tokens.push(Token::Raw { len: header.plain_len });
        let page_size = shared.page_size;
        let (is_seeded, as_it_is, urgent) = (false, false, false);
        chunk::send(
            shared,
            ReadChunk {
                header,
                chunk,
                len,
                checksum,
                tokens,
                page_size,
                is_seeded,
                as_it_is,
                urgent,
            },
        );
    }
    session.send_bare(stream.id, FrameType::Eof, 0);
    let _ = shared.events.send(Event::SourceEof { is_main: true });
}

/// Writes what the NBD server has written, until it ends.
fn write_back(
    shared: &Shared,
    stream: &SourceStream,
    mut inbox: Inbox<'_>,
) -> Result<(), SessionError> {
    // A client that has gone takes nothing any more; its end goes to the server.
    let mut has_gone = false;
    while let Some(Arrived { header, chunk, checksum, .. }) = inbox.next()? {
        let receipt = match (header.kind, chunk) {
            (FrameType::Data, Some(chunk)) => {
                let chunk = chunk?;
                let bytes = &chunk[..header.plain_len as usize];
                let receipt = inbox.check(&header, bytes, checksum)?;
                has_gone = has_gone || { stream.socket() }.write_all(bytes).is_err();
                receipt
            }
            (FrameType::Eof, None) => {
                let _ = stream.socket().shutdown(Shutdown::Write);
                inbox.receipt(&header)
            }
            _ => {
                let detail = "a frame that no NBD connection has".into();
                let (stream, seq) = (header.stream, header.seq);
                return Err(SessionError::Sequence { stream, seq, detail });
            }
        };
        inbox.acknowledge(&shared.session, receipt);
        if header.kind == FrameType::Eof {
            let _ = shared.events.send(Event::DestinationEof);
            return Ok(());
        }
    }
    Ok(())
}

/// Waits until both directions have ended, and the peer has written everything.
fn decide(
    shared: &Shared,
    events: &Receiver<Event>,
    notice: &mut impl FnMut(&str),
) -> Result<(), RelayError> {
    let (mut out, mut back) = (false, false);
    while !(out && back) {
        match events.recv() {
            Ok(Event::SourceEof { .. }) => out = true,
            Ok(Event::DestinationEof) => back = true,
            Ok(Event::Closed(error)) => return Err(ended(&error)),
            Ok(Event::Notice(text)) => notice(&text),
            Ok(Event::Stop(reason)) => {
                let reason = reason.unwrap_or_else(|| "it was told to end".into());
                return Err(SessionError::Local { reason }.into());
            }
            Ok(Event::Fatal(error)) => return Err(error),
            // The others are a migration's.
            Ok(_) => {}
            Err(_) => return Err(RelayError::SourceEnded),
        }
    }
    let session = &shared.session;
    if session.credits().drained(Instant::now() + LAST_ACKS + session.resume_timeout()) {
        return Ok(());
    }
    Err(match session.failure() {
        Some(error) => ended(error),
        None => {
            let reason = "the other host has not acknowledged every byte".into();
            SessionError::Local { reason }.into()
        }
    })
}

/// The session has ended, which was no migration's.
fn ended(error: &Arc<SessionError>) -> RelayError {
    match &**error {
        SessionError::Aborted { peer, reason, .. } => RelayError::Unsupported {
            what: format!("{peer} ended the disk's connection: {reason}"),
        },
        _ => RelayError::Ended(error.clone()),
    }
}
