//! Connections to the relay's socket: accepts them, and by their first bytes makes each a stream of
//! the migration or refuses it.

use super::hand_back;
use super::intake;
use super::shared::{Connection, Event, Refused, Shared, SourceStream, UNACCEPTED};
use crate::entrance::Entrance;
use crate::error::{error_chain, RelayError};
use crate::inbox;
use crate::sockets::wait_readable;
use crate::stream_kind;
use crate::threads::spawn;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{recv, RecvFlags};
use session::{FrameType, SessionError, MAX_STREAMS};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{fence, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::{Kind, Tokeniser};

/// Pause before accepting a connection is tried again.
const BACK_OFF: Duration = Duration::from_millis(200);
/// The shortest and the longest interval at which a connection that has sent one to three bytes is
/// checked.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(200));
/// A connection without a byte for this long, once every other one of QEMU has written, is the
/// preempt channel. The time is for a process that only tests whether the socket is alive, and for
/// bytes that the kernel has not delivered yet.
const SILENT: Duration = Duration::from_millis(100);

/// Accepts QEMU's connections until the migration is over, or the entrance is another process's.
pub(super) fn accept(shared: &Arc<Shared>, entrance: &dyn Entrance) {
    let mut refused_since = None;
    while shared.accepts() {
        match shared.accept_waiting() {
            Ok(()) => {
                refused_since = None;
                let ready = entrance.readiness();
                let mut fds = [PollFd::new(&ready, PollFlags::IN)];
                let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 200_000_000 }));
            }
            Err(source) => {
                let first = refused_since.is_none();
                let since = *refused_since.get_or_insert_with(Instant::now);
                let address = entrance.address();
                if first {
                    let _ = shared.events.send(Event::Notice(format!(
                        "cannot accept a connection on {address} ({source}); trying again for {} s",
                        UNACCEPTED.as_secs()
                    )));
                } else if since.elapsed() >= UNACCEPTED {
                    let what = format!("cannot accept a connection on {address}");
                    let fatal = RelayError::Resource { what, source };
                    let _ = shared.events.send(Event::Fatal(fatal));
                    return;
                }
                // The connection goes on waiting.
                std::thread::sleep(BACK_OFF);
            }
        }
        if !shared.has_main() && !entrance.is_ours() {
            let address = entrance.address();
            let _ = shared.events.send(Event::Fatal(RelayError::Displaced { address }));
            return;
        }
    }
}

/// Starts the thread that reads `connection`.
///
/// # Errors
/// The system refuses the thread. The connection may be read later.
pub(super) fn start(shared: &Arc<Shared>, connection: &Arc<Connection>) -> io::Result<()> {
    let (shared, connection) = (shared.clone(), connection.clone());
    spawn("intake", move || run(&shared, &connection)).map_err(|error| no_thread(&error))
}

/// The error of a thread that the system refuses, with the limits that may be the cause.
fn no_thread(error: &RelayError) -> io::Error {
    let chain = error_chain(error);
    io::Error::other(format!("{chain}; its limits are ulimit -u and the cgroup's pids.max"))
}

/// Reads `connection` to its end.
fn run(shared: &Arc<Shared>, connection: &Arc<Connection>) {
    let Some(kind) = first_bytes(shared, connection) else {
        // The connection ended without a byte: a migration was cancelled before it began, or a
        // process tested whether the socket is alive. The relay still waits for its migration.
        return shared.remove_waiting(connection);
    };
    let stream = match shared.admit(connection, kind) {
        Ok(stream) => stream,
        Err(refused) => return refuse(shared, connection, refused),
    };
    let is_main = kind.is_main();
    if kind == Kind::Recovery {
        shared.postcopy.store(true, Ordering::Release);
        // QEMU opens its multifd channels no second time.
        shared.only_preempt_is_silent.store(true, Ordering::Release);
        shared.set_switched();
    }
    if kind == Kind::Preempt {
        shared.session.prioritise(stream.id);
        shared.guard_preempt(&stream);
    }
    if open(shared, &stream, kind) {
        if let Err(error) = intake::run(shared, &stream) {
            shared.session.fail(error);
        }
    } else {
        // Nothing was read.
        let _ = stream.read_by.set(Tokeniser::new(kind, shared.page_size));
    }
    if shared.session.failure().is_some() {
        // The session ended, not QEMU. The session has the reason.
        return;
    }
    let _ = shared.events.send(Event::SourceEof { is_main });
}

/// Closes a connection that does not belong to this migration, and reports it.
fn refuse(shared: &Shared, connection: &Connection, refused: Refused) {
    let mut first = [0; 8];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let got = recv(&connection.socket, &mut first[..], flags).map_or(0, |(_, got)| got);
    connection.socket.abort();
    let text = match refused {
        Refused::Second => {
            "refused a second migration on this relay's socket while one runs: each VM needs a \
             relay of its own; the first one goes on"
                .to_string()
        }
        Refused::SecondPreempt => {
            "refused a second preempt channel on this relay's socket: a migration has one, and the \
             first one goes on"
                .to_string()
        }
        Refused::Stranger if first.starts_with(&[0x16, 0x03]) => {
            "refused a connection that begins with TLS: clear tls-creds in QEMU (platen secures the \
             links between the hosts itself); this relay still waits for a migration"
                .to_string()
        }
        Refused::Stranger => format!(
            "refused a connection that is no migration: it begins with {:02x?}, QEMU's with 'QEVM'",
            &first[..got]
        ),
        Refused::TooMany => format!("refused a connection: {MAX_STREAMS} streams are the limit"),
    };
    shared.report_refused(&text);
}

/// Opens the stream at the peer; for a main channel, also starts the thread that writes the return
/// path.
fn open(shared: &Arc<Shared>, stream: &Arc<SourceStream>, kind: Kind) -> bool {
    if kind.is_main() {
        let queue = inbox::queue();
        let _ = stream.results.set(queue.clone());
        // `Source::end` sets `over` first and then closes the queues, with a fence in between. So
        // either it finds this queue, or `over` shows here.
        fence(Ordering::SeqCst);
        if shared.over.load(Ordering::Relaxed) {
            queue.close();
        }
        let (theirs, stream) = (shared.clone(), stream.clone());
        shared.return_paths.fetch_add(1, Ordering::Relaxed);
        let body = move || {
            hand_back::run(&theirs, &stream, &queue);
            theirs.return_paths.fetch_sub(1, Ordering::Release);
            let _ = theirs.events.send(Event::BackDone);
        };
        if let Err(error) = spawn("return-path", body) {
            shared.return_paths.fetch_sub(1, Ordering::Release);
            let reason = no_thread(&error).to_string();
            shared.session.fail(SessionError::Local { reason });
            return false;
        }
    }
    shared.session.send_bare(stream.id, FrameType::Open, stream_kind::to_flags(kind))
}

/// Waits for the bytes that show the kind of the connection. Without a return path QEMU writes none
/// before it has prepared its RAM.
fn first_bytes(shared: &Shared, connection: &Connection) -> Option<Kind> {
    let began = Instant::now();
    loop {
        // Before the wait: a channel that wrote first has its bytes here by the end of it.
        let only_preempt_is_silent = shared.only_preempt_is_silent.load(Ordering::Acquire);
        let readable = wait_readable(&connection.socket, Some(SILENT));
        if let Some(kind) = shared.classify(connection) {
            return Some(kind);
        }
        if shared.over.load(Ordering::Acquire) {
            return None;
        }
        let late = began.elapsed() >= shared.setup_timeout;
        if !readable {
            if only_preempt_is_silent {
                return Some(connection.set_preempt());
            }
            if late && !shared.has_main() {
                return close_late(
                    shared,
                    connection,
                    "nothing",
                    "An NBD client (libvirt's --copy-storage) waits for its server to write first; \
                     `platen host` carries that, and a relay does not",
                );
            }
            continue;
        }
        let mut byte = [0; 1];
        match recv(&connection.socket, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return None,
            Err(errno) if errno != Errno::AGAIN && errno != Errno::INTR => return None,
            // One to three bytes have come: the socket is readable, but its kind is unknown.
            _ if writes_no_more(&connection.socket) => return shared.classify(connection),
            _ if late => {
                let what = "fewer than four bytes";
                return close_late(shared, connection, what, "QEMU writes more");
            }
            // This is rare enough for simply checking again.
            _ => std::thread::sleep((began.elapsed() / 8).clamp(LOOK_AGAIN.0, LOOK_AGAIN.1)),
        }
    }
}

/// Whether nothing comes behind the bytes that have come.
fn writes_no_more(socket: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Closes a connection whose kind did not show in time, and reports it.
fn close_late(shared: &Shared, connection: &Connection, wrote: &str, hint: &str) -> Option<Kind> {
    connection.socket.abort();
    shared.report_refused(&format!(
        "closed a connection that wrote {wrote} for {:?}: it is no migration. {hint}",
        shared.setup_timeout
    ));
    None
}

#[cfg(test)]
mod tests;
