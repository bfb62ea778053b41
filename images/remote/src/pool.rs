//! A client's connections.

use std::io::{self, Write};
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
        match read_reply(&mut link, &mut [])? {
            Ok(()) => Ok(link),
            // The server may have room later.
            Err((Status::Refused, text)) => Err(DialError::Refused(text)),
            Err((_, text)) => Err(io::Error::other(text).into()),
        }
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
