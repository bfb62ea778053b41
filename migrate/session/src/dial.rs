//! The client's side of opening a link: connect, TLS, hello and welcome (W1 to W6).

use crate::error::SessionError;
use crate::frame::MAX_CHUNK_BYTES;
use crate::hello::{Hello, Welcome, HELLO_TIMEOUT};
use crate::history::Histories;
use crate::pass;
use crate::preamble::{lost, read_preamble, write_preamble, A_MOMENT};
use crate::transport::Link;
use crate::verdict::Verdict;
use std::io::Write;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use tls::{Connector, TlsError};

/// How long the client waits for the welcome of link 0: the server meanwhile prepares its QEMU.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(20);

/// Parameters of one attempt to connect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    /// The peer's address, if it need not be resolved: during an outage the resolver may fail too.
    pub(crate) address: Option<SocketAddr>,
    /// How long each step may take.
    pub(crate) connect: Duration,
    pub(crate) handshake: Duration,
    pub(crate) welcome: Duration,
    /// When the attempt has to end, whichever step it is at.
    pub(crate) until: Option<Instant>,
}

impl Attempt {
    /// How long a step of the attempt may take that begins now.
    fn time_for(&self, step: Duration) -> Duration {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        // Zero is no time-out for `connect_timeout`.
        left.map_or(step, |left| step.min(left.max(A_MOMENT)))
    }
}

/// Connects one link, secures it unless `connector` is `None`, and exchanges hello and welcome.
///
/// # Errors
/// The peer cannot be reached, speaks another protocol, has the wrong identity, or refuses. The
/// message states which of these happened.
pub fn dial(
    peer: &str,
    connector: Option<&Connector>,
    hello: &Hello,
) -> Result<(Link, Welcome), SessionError> {
    let attempt = Attempt {
        address: None,
        connect: HELLO_TIMEOUT,
        handshake: HELLO_TIMEOUT,
        welcome: WELCOME_TIMEOUT,
        until: None,
    };
    dial_as(peer, connector, hello, attempt)
}

/// Whether this host has no descriptors or memory for a socket.
fn is_local(error: &std::io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    errno.is_some_and(|errno| {
        use rustix::io::Errno;
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&errno)
    })
}

pub(crate) fn dial_as(
    peer: &str,
    connector: Option<&Connector>,
    hello: &Hello,
    attempt: Attempt,
) -> Result<(Link, Welcome), SessionError> {
    let connect = |source| SessionError::Connect { peer: peer.into(), source };
    let addresses: Vec<SocketAddr> = match attempt.address {
        Some(address) => vec![address],
        None => peer.to_socket_addrs().map_err(connect)?.collect(),
    };
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    let mut link = None;
    for address in addresses {
        let begun = Instant::now();
        match TcpStream::connect_timeout(&address, attempt.time_for(attempt.connect)) {
            Ok(stream) => {
                link = Some((stream, begun));
                break;
            }
            // The fault is this host's, not the peer's.
            Err(source) if is_local(&source) => {
                let what = format!("cannot make a socket for a link to {peer}");
                return Err(SessionError::Resource { what, source });
            }
            Err(error) => last = error,
        }
    }
    let Some((socket, begun)) = link else { return Err(connect(last)) };
    socket.set_nodelay(true).map_err(|error| lost(peer, &error))?;
    let mut link = match connector {
        None => Link::from(socket),
        Some(connector) => {
            if let (true, Some(token)) = (hello.pass, &hello.token) {
                let pass = pass::new(&hello.session, token);
                // The send buffer of a new socket has room for the pass.
                { &socket }
                    .write_all(pass.as_ref().map_or(&[], |pass| &pass[..]))
                    .map_err(|error| lost(peer, &error))?;
            }
            let channel = connector
                .connect(&socket, peer, Instant::now() + attempt.time_for(attempt.handshake))
                .map_err(|error| late_here(error, begun))?;
            Link::secured(socket, channel)
        }
    };
    let written = write_preamble(&mut link, peer, hello);
    let patience = attempt.time_for(attempt.welcome);
    let welcome: Welcome = match (read_preamble(&mut link, peer, patience), written) {
        (Ok(welcome), _) => welcome,
        // The peer's answer may say why the hello could not be written.
        (Err(error @ SessionError::Tls(_)), _) | (Err(error), Ok(())) | (Err(_), Err(error)) => {
            return Err(hello_late_here(error, begun))
        }
    };
    check(peer, hello, &welcome)?;
    Ok((link, welcome))
}

/// The error of a handshake that began with a connection at `begun`. A peer waits as long as W5
/// says, and closes the connection: then this host was too busy for its half.
fn late_here(error: TlsError, begun: Instant) -> TlsError {
    match error {
        TlsError::Cut { peer } if begun.elapsed() >= HELLO_TIMEOUT => TlsError::Late { peer },
        error => error,
    }
}

/// The error of a welcome that did not come, on a connection that began at `begun`. A peer waits as
/// long as W5 says, and closes the connection without an answer: then this host was too busy for
/// its hello.
fn hello_late_here(error: SessionError, begun: Instant) -> SessionError {
    match error {
        SessionError::LinkLost { peer, .. } if begun.elapsed() >= HELLO_TIMEOUT => {
            SessionError::HelloLate { peer, seconds: HELLO_TIMEOUT.as_secs() }
        }
        error => error,
    }
}

/// The error of a welcome that refuses, or grants what this end has not asked for.
fn check(peer: &str, hello: &Hello, welcome: &Welcome) -> Result<(), SessionError> {
    if let Some(reason) = welcome.error.clone() {
        if let Some(committed) = welcome.committed {
            let Welcome { confirmed, loaded, pending, .. } = *welcome;
            let answer = Verdict { committed, confirmed, loaded, pending };
            return Err(SessionError::Over { peer: peer.into(), reason, answer });
        }
        return Err(SessionError::Refused { peer: peer.into(), reason });
    }
    let chunk = welcome.chunk_bytes as usize;
    if !(1 << 16..=MAX_CHUNK_BYTES).contains(&chunk)
        || !(2..=16).contains(&welcome.stream_frames)
        || welcome.shared_frames > 1024
    {
        let detail = format!(
            "chunk-bytes {chunk}, stream-frames {}, shared-frames {} are out of bounds",
            welcome.stream_frames, welcome.shared_frames
        );
        return Err(SessionError::Hello { peer: peer.into(), detail });
    }
    if welcome.delta_cache > hello.delta_cache {
        let detail = format!(
            "it grants a delta cache of {} bytes where {} were asked for",
            welcome.delta_cache, hello.delta_cache
        );
        return Err(SessionError::Hello { peer: peer.into(), detail });
    }
    if !Histories::is_within(welcome.histories, hello.histories) {
        let detail =
            format!("it grants {:?} where {:?} was asked for", welcome.histories, hello.histories);
        return Err(SessionError::Hello { peer: peer.into(), detail });
    }
    Ok(())
}
