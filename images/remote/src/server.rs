//! The server: a thread for each connection.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use session::Link;
use tls::Acceptor;

use crate::pool::set_options;
use crate::sessions::{Ended, Joined, Sessions};
use crate::wire::{begin_reply, put_refusal, read_hello, Request, Status, HELLO, MAX_READ, OPENED};

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 256;
/// Time limit for TLS handshake and hello, each.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of the search for sessions without connections.
const TICK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Pause after an `accept` that failed, for example because no descriptor is left.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_millis(100);

/// Serves images.
pub struct Server {
    sessions: Sessions,
    acceptor: Option<Acceptor>,
    /// Gets a line about a connection that fails.
    tell: Box<dyn Fn(&str) + Send + Sync>,
    connections: AtomicUsize,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("sessions", &self.sessions).finish_non_exhaustive()
    }
}

impl Server {
    /// Creates a server; without TLS if `acceptor` is `None`. `tell` gets a line about each
    /// connection that fails.
    pub fn new(
        sessions: Sessions,
        acceptor: Option<Acceptor>,
        tell: Box<dyn Fn(&str) + Send + Sync>,
    ) -> Self {
        Self { sessions, acceptor, tell, connections: AtomicUsize::new(0) }
    }

    /// Serves connections until the listener fails.
    ///
    /// # Errors
    ///
    /// The listener's error.
    pub fn run(&self, listener: &TcpListener) -> io::Result<()> {
        // A connection may vanish between poll and accept.
        listener.set_nonblocking(true)?;
        thread::scope(|scope| loop {
            match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&TICK)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            self.sessions.expire();
            let (socket, from) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => {
                    (self.tell)(&format!("cannot accept a connection: {error}"));
                    thread::sleep(WITHOUT_DESCRIPTORS);
                    continue;
                }
            };
            // Relaxed: only the number counts.
            if self.connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
                self.connections.fetch_sub(1, Ordering::Relaxed);
                (self.tell)(&format!("{from}: refused, there are {MAX_CONNECTIONS} connections"));
                continue;
            }
            let serve = move || {
                if let Err(error) = self.connection(socket, from) {
                    (self.tell)(&format!("{from}: {error}"));
                }
                self.connections.fetch_sub(1, Ordering::Relaxed);
            };
            if let Err(error) =
                thread::Builder::new().name("images".into()).spawn_scoped(scope, serve)
            {
                self.connections.fetch_sub(1, Ordering::Relaxed);
                (self.tell)(&format!("{from}: cannot start a thread: {error}"));
            }
        })
    }

    /// Serves one connection to its end.
    fn connection(&self, socket: TcpStream, from: SocketAddr) -> io::Result<()> {
        socket.set_nonblocking(false)?;
        set_options(&socket)?;
        socket.set_read_timeout(Some(HELLO_TIMEOUT))?;
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let mut link = match &self.acceptor {
            None => Link::from(socket),
            Some(acceptor) => {
                let channel = acceptor
                    .accept(&socket, &from.to_string(), deadline)
                    .map_err(io::Error::other)?;
                Link::secured(socket, channel)
            }
        };
        let mut hello = [0; HELLO];
        link.read_exact(&mut hello)?;
        let peer = link.peer().map(|peer| peer.names.clone()).unwrap_or_default();
        let client = u32::from_be_bytes(hello[12..16].try_into().expect("4 bytes"));
        let joined = read_hello(&hello).and_then(|token| self.sessions.join(token, client, &peer));
        let mut reply = Vec::new();
        let mut joined = match joined {
            Ok(joined) => joined,
            Err(text) => {
                put_refusal(&mut reply, Status::Refused, &text);
                link.write_all(&reply)?;
                return Err(io::Error::other(text));
            }
        };
        begin_reply(&mut reply, Status::Ok, 0);
        link.write_all(&reply)?;
        link.socket().set_read_timeout(None)?;
        loop {
            match answer(&mut link, &mut joined, &mut reply) {
                Ok(None) => {}
                Ok(Some(end)) => {
                    joined.ends(end);
                    return Ok(());
                }
                Err(error) => {
                    joined.ends(how(&error));
                    // A killed client is not reported.
                    let is_ended =
                        how(&error) == Ended::Closed && error.kind() != io::ErrorKind::InvalidData;
                    return if is_ended { Ok(()) } else { Err(error) };
                }
            }
        }
    }
}

/// How a connection whose socket returned this error has ended.
fn how(error: &io::Error) -> Ended {
    match error.kind() {
        io::ErrorKind::TimedOut
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable => Ended::Lost,
        _ => Ended::Closed,
    }
}

/// A connection's part in its session.
pub type Connected<'a> = Joined<'a>;

/// Answers one request. Returns `Some` if the connection has to end, with the way in which it ends.
/// `reply` is a buffer.
///
/// # Errors
///
/// The connection's error, or the peer violates the protocol.
pub fn answer(
    peer: &mut (impl Read + Write),
    joined: &mut Connected<'_>,
    reply: &mut Vec<u8>,
) -> io::Result<Option<Ended>> {
    match Request::read(peer) {
        Ok(None) => return Ok(Some(Ended::Closed)),
        Ok(Some(Request::End)) => {
            begin_reply(reply, Status::Ok, 0);
            peer.write_all(reply)?;
            return Ok(Some(Ended::Done));
        }
        Ok(Some(Request::Open { name, lock })) => match joined.open(&name, lock) {
            Ok(file) => {
                let out = begin_reply(reply, Status::Ok, OPENED);
                out[..16].copy_from_slice(&file.stamp.to_be_bytes());
                out[16..].copy_from_slice(&file.len.to_be_bytes());
            }
            Err((status, text)) => put_refusal(reply, status, &text),
        },
        Ok(Some(Request::Read { stamp, offset, len })) => {
            read(joined, stamp, offset, len as usize, reply);
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            put_refusal(reply, Status::Refused, &error.to_string());
            peer.write_all(reply)?;
            return Err(error);
        }
        Err(error) => return Err(error),
    }
    peer.write_all(reply)?;
    Ok(None)
}

/// Reads a range of a file into `reply`.
fn read(joined: &mut Joined<'_>, stamp: u128, offset: u64, len: usize, reply: &mut Vec<u8>) {
    debug_assert!(len <= MAX_READ);
    let Some(file) = joined.file(stamp) else {
        return put_refusal(reply, Status::NotOpen, "the file is not open");
    };
    if offset.checked_add(len as u64).is_none_or(|end| end > file.len) {
        let text = format!("{len} bytes from {offset} on exceed a file of {} bytes", file.len);
        return put_refusal(reply, Status::Refused, &text);
    }
    let out = begin_reply(reply, Status::Ok, len);
    if let Err(error) = file.file.read_exact_at(out, offset) {
        put_refusal(reply, Status::Io, &error.to_string());
    }
}
