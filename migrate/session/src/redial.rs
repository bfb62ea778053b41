//! Reopening a client's links to its server, and the question of W28.

use crate::dial::{dial_as, Attempt};
use crate::error::SessionError;
use crate::hello::{Hello, HELLO_TIMEOUT};
use crate::transport::Link;
use crate::verdict::Verdict;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tls::Connector;

/// How long an attempt may take to connect: the time since the loss, within these bounds. The
/// kernel repeats a lost SYN only after a second, so short attempts find a link sooner once it is
/// back; long ones suffice for slow links.
const CONNECT: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// The data that a client needs to reopen a link.
#[derive(Debug, Clone)]
pub struct Redial {
    peer: String,
    address: Option<SocketAddr>,
    connector: Option<Connector>,
    hello: Hello,
}

impl Redial {
    /// Takes `peer` as it was dialled for `first`, and `hello` with the session's token.
    pub fn new(peer: String, first: &Link, connector: Option<Connector>, hello: Hello) -> Self {
        // The address is used, not the name: while the network is down, the resolver may fail too.
        Self { peer, address: first.socket().peer_addr().ok(), connector, hello }
    }

    /// Opens link `number` again, `passed` after its loss. The attempt ends by `until`.
    pub(crate) fn link(
        &self,
        number: u16,
        passed: Duration,
        until: Instant,
    ) -> Result<Link, SessionError> {
        self.attempt(&Hello { link: number, ..self.hello.clone() }, passed, Some(until))
    }

    fn attempt(
        &self,
        hello: &Hello,
        passed: Duration,
        until: Option<Instant>,
    ) -> Result<Link, SessionError> {
        let connect = passed.clamp(CONNECT.0, CONNECT.1);
        let rest = (4 * connect).min(HELLO_TIMEOUT);
        let (handshake, welcome) = (rest, rest);
        let attempt = Attempt { address: self.address, connect, handshake, welcome, until };
        dial_as(&self.peer, self.connector.as_ref(), hello, attempt).map(|(link, _)| link)
    }

    /// Asks a peer how far its session got, which had not answered. The question ends that session
    /// (W28).
    ///
    /// # Errors
    /// The peer cannot be reached, or does not know this session.
    pub fn ask(&self) -> Result<Verdict, SessionError> {
        self.ask_after(Duration::ZERO)
    }

    /// As [`Redial::ask`], `passed` after the first question. Its connection may take longer then,
    /// as that of a lost link may: the path may have become a slow one.
    ///
    /// # Errors
    /// As for [`Redial::ask`].
    pub fn ask_after(&self, passed: Duration) -> Result<Verdict, SessionError> {
        let hello = Hello { ask: true, link: 0, ..self.hello.clone() };
        match self.attempt(&hello, passed, None) {
            Err(SessionError::Over { answer, .. }) => Ok(answer),
            Err(error) => Err(error),
            Ok(_) => {
                let detail = "it answers a question with a link".into();
                Err(SessionError::Hello { peer: self.peer.clone(), detail })
            }
        }
    }
}
