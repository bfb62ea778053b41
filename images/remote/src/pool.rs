//! A client's connections.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
    set_tcp_user_timeout,
};
use session::Link;
use tls::{Connector, TlsError};

use crate::wire::{hello, read_reply, Status, Token};

/// Time limit for a connection, and for each step of its beginning.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest silence of a server in the middle of a reply. After it another connection is tried.
const SILENCE: Duration = Duration::from_secs(20);
/// The least bytes of a reply that have to come in a second, on average.
const SLOWEST: u64 = 4096;
/// The longest time for which sent bytes may stay unacknowledged.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);

/// Why there is no connection.
pub(crate) enum DialError {
    /// The connection may succeed later.
    Io(io::Error),
    Tls(TlsError),
    Refused(String),
}

impl From<io::Error> for DialError {
    /// The server's refusal of a certificate arrives with the first read.
    fn from(error: io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>()) {
            Some(tls) => Self::Tls(tls.clone()),
            None => Self::Io(error),
        }
    }
}

/// Idle connections to one server.
pub(crate) struct Pool {
    pub(crate) host: String,
    connector: Option<Connector>,
    session: Token,
    /// The number of this process in the session.
    client: u32,
    idle: Mutex<Vec<Link>>,
}

impl Pool {
    pub(crate) fn new(host: String, connector: Option<Connector>, session: Token) -> Self {
        Self { host, connector, session, client: std::process::id(), idle: Mutex::default() }
    }

    /// A connection that has been used before.
    pub(crate) fn idle(&self) -> Option<Link> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Takes back a connection whose last reply has been read.
    pub(crate) fn put(&self, link: Link) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(link);
    }

    /// Makes a new connection that joins the session.
    pub(crate) fn dial(&self) -> Result<Link, DialError> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        let mut socket = None;
        for address in self.host.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT) {
                Ok(connected) => {
                    socket = Some(connected);
                    break;
                }
                Err(error) => last = error,
            }
        }
        let socket = socket.ok_or(last)?;
        set_options(&socket)?;
        socket.set_read_timeout(Some(SILENCE))?;
        let mut link = match &self.connector {
            None => Link::from(socket),
            Some(connector) => {
                let channel = connector
                    .connect(&socket, &self.host, Instant::now() + CONNECT)
                    .map_err(DialError::Tls)?;
                Link::secured(socket, channel)
            }
        };
        let mut hello = hello(&self.session);
        hello[12..16].copy_from_slice(&self.client.to_be_bytes());
        link.write_all(&hello)?;
        match read_reply(&mut Bounded::new(&mut link, 0), &mut [])? {
            Ok(()) => Ok(link),
            // The server may have room later.
            Err((Status::Refused, text)) => Err(DialError::Refused(text)),
            Err((_, text)) => Err(io::Error::other(text).into()),
        }
    }
}

/// A connection on which a reply is awaited, for a bounded time: a server that sends a byte now and
/// then is never silent, and a VM would wait for its pages for ever.
pub(crate) struct Bounded<'a> {
    link: &'a mut Link,
    until: Instant,
}

impl<'a> Bounded<'a> {
    /// Awaits a reply with `len` bytes, or a refusal.
    pub(crate) fn new(link: &'a mut Link, len: usize) -> Self {
        Self::within(link, SILENCE + Duration::from_secs(len as u64 / SLOWEST))
    }

    fn within(link: &'a mut Link, limit: Duration) -> Self {
        Self { link, until: Instant::now() + limit }
    }
}

impl Read for Bounded<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let text = "its reply comes too slowly";
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        self.link.socket().set_read_timeout(Some(left.min(SILENCE)))?;
        self.link.read(out)
    }
}

impl Write for Bounded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.link.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.link.flush()
    }
}

/// Sets options of a connection at either end: a peer that has vanished is noticed within a minute.
pub(crate) fn set_options(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    set_socket_keepalive(socket, true)?;
    set_tcp_keepidle(socket, Duration::from_secs(30))?;
    set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    set_tcp_keepcnt(socket, 3)?;
    let millis = u32::try_from(UNACKNOWLEDGED.as_millis()).expect("30000");
    set_tcp_user_timeout(socket, millis)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    /// It is never silent for long.
    #[test]
    fn a_reply_that_comes_byte_by_byte_is_late() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let serving = thread::spawn(move || {
            while server.write_all(&[0]).is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut link = Link::from(socket);
        let mut reply = Bounded::within(&mut link, Duration::from_millis(200));
        // Each byte takes the server a millisecond: as many take it 1000 s.
        let error = reply.read_exact(&mut vec![0; 1_000_000]).unwrap_err();
        let kinds = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
        assert!(kinds.contains(&error.kind()), "{error}");
        drop(link);
        serving.join().unwrap();
    }

    #[test]
    fn a_reply_has_time_for_its_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _server = listener.accept().unwrap();
        let mut link = Link::from(socket);
        let time = |reply: Bounded<'_>| reply.until.duration_since(Instant::now());
        assert!(time(Bounded::new(&mut link, 0)) <= SILENCE);
        // As on a link of 1 Mbit/s that 16 readers share.
        let longest = time(Bounded::new(&mut link, crate::MAX_READ));
        assert!(longest > Duration::from_secs(150) && longest < Duration::from_secs(600));
    }
}
