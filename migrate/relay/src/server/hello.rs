//! The connections to the port: strangers, links of sessions, questions, and hellos that open a
//! session.

use super::state::{Active, Server, Waiting};
use crate::destination::Destination;
use crate::threads::spawn;
use crate::unix::UnixAddress;
use codec::Codec;
use session::{
    random_id, read_preamble, write_preamble, Hello, Link, SessionError, Welcome, HELLO_TIMEOUT,
    MAX_LINKS, SILENCE,
};
use std::collections::VecDeque;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tls::{Peer, TlsError};

/// Connections that may be in their hello at once. At one more, one is closed ([`surplus`]): a peer
/// finishes its hello long before, so idle connections lock no peer out.
const MAX_HELLOS: usize = 64;

/// The connection to close when too many wait: the oldest of the host that has the most. So a host
/// that floods the port does not lock out the links of others.
fn surplus(waiting: &VecDeque<Waiting>) -> Option<usize> {
    let of = |host: Option<IpAddr>| waiting.iter().filter(|one| one.from == host).count();
    let most = waiting.iter().map(|one| of(one.from)).max()?;
    waiting.iter().position(|one| of(one.from) == most)
}

impl Server {
    fn said_hello(&self, number: u64) {
        self.lock_hellos().retain(|waiting| waiting.number != number);
    }

    pub(super) fn admit(self: &Arc<Self>, socket: TcpStream, peer: String) {
        let Ok(kept) = socket.try_clone() else { return };
        let number = self.admitted.fetch_add(1, Ordering::Relaxed);
        {
            let mut hellos = self.lock_hellos();
            if hellos.len() >= MAX_HELLOS {
                if let Some(surplus) = surplus(&hellos).and_then(|at| hellos.remove(at)) {
                    // Its thread sees the end of the connection and ends.
                    let _ = surplus.socket.shutdown(Shutdown::Both);
                }
            }
            let from = kept.peer_addr().ok().map(|address| address.ip());
            hellos.push_back(Waiting { number, from, socket: kept });
        }
        let server = self.clone();
        let started = spawn("hello", move || {
            let result = server.hello(socket, &peer, number);
            match result {
                Ok(Some((target, session, active))) => server.serve(&target, &session, &active),
                Ok(None) => {}
                Err(error) => {
                    // A scanner can cause any number of these: only the first ten are reported.
                    let count = server.strangers.fetch_add(1, Ordering::Relaxed);
                    if count < 10 {
                        server.host.notice(&format!("turned a connection away: {error}"));
                    }
                }
            }
        });
        if started.is_err() {
            self.said_hello(number);
        }
    }

    /// Handles one link's hello. Returns the session if this link opens one.
    #[allow(clippy::type_complexity, reason = "passed only from here to `serve`")]
    fn hello(
        self: &Arc<Self>,
        socket: TcpStream,
        peer: &str,
        number: u64,
    ) -> Result<Option<(Option<String>, String, Arc<Active>)>, SessionError> {
        let failed = |source| SessionError::Resource {
            what: "cannot set up a link's socket".into(),
            source,
        };
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let secured = socket
            .set_nonblocking(false)
            .and_then(|()| socket.set_write_timeout(Some(HELLO_TIMEOUT)))
            .map_err(failed)
            .and_then(|()| self.secure(socket, peer, deadline));
        let (mut link, hello) = match secured {
            Ok(mut link) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let hello = read_preamble::<Hello>(&mut link, peer, left);
                self.said_hello(number);
                (link, hello)
            }
            Err(error) => {
                self.said_hello(number);
                return Err(error);
            }
        };
        let hello = match hello {
            Ok(hello) => hello,
            Err(error) => {
                // Two kinds of peer understand an answer: one of another version, and one that
                // starts with TLS although this end has none.
                if matches!(
                    &error,
                    SessionError::Version { .. } | SessionError::Magic { first: [22, 3, ..], .. }
                ) {
                    refuse(&mut link, peer, &error.to_string());
                }
                return Err(error);
            }
        };
        if let Some((reason, committed, confirmed)) = self.verdict(&hello, link.peer()) {
            let reason = Some(reason);
            let (committed, welcome) = (Some(committed), Welcome::default());
            let welcome = Welcome { error: reason, committed, confirmed, ..welcome };
            return write_preamble(&mut link, peer, &welcome).map(|()| None);
        }
        if let Some(token) = &hello.token {
            let joined = self.join(link, &hello, token, peer);
            return joined.map(|()| None);
        }
        match self.open(&hello, peer, link.peer()) {
            Ok((target, active, welcome)) => {
                let welcomed = write_preamble(&mut link, peer, &welcome)
                    .and_then(|()| active.destination.session().add_link(0, link));
                if let Err(error) = welcomed {
                    let reason = "its first link could not be set up".into();
                    active.destination.session().fail(SessionError::Local { reason });
                    self.remove_session(&target, &hello.session);
                    return Err(error);
                }
                Ok(Some((target, hello.session, active)))
            }
            Err(reason) => {
                refuse(&mut link, peer, &reason);
                Err(SessionError::Hello { peer: peer.into(), detail: reason })
            }
        }
    }

    /// Runs the TLS handshake, unless this end was told to do without.
    fn secure(
        &self,
        socket: TcpStream,
        peer: &str,
        deadline: Instant,
    ) -> Result<Link, SessionError> {
        let Some(acceptor) = &self.config.acceptor else { return Ok(socket.into()) };
        match acceptor.accept(&socket, peer, deadline) {
            Ok(channel) => Ok(Link::secured(socket, channel)),
            Err(error) => {
                if matches!(error, TlsError::Plain { .. }) {
                    let reason = "this end takes TLS only: start the other without --insecure, with certificates \
                                  of this end's CA (`platen cert`)";
                    refuse(&mut socket.into(), peer, reason);
                }
                Err(error.into())
            }
        }
    }

    /// A further link of a session (W4).
    fn join(
        &self,
        mut link: Link,
        hello: &Hello,
        token: &str,
        peer: &str,
    ) -> Result<(), SessionError> {
        let active = self.lock_sessions().get(&hello.session).cloned();
        let refused = |link: &mut Link, reason: &str| {
            refuse(link, peer, reason);
            Err(SessionError::Hello { peer: peer.into(), detail: reason.into() })
        };
        let Some(active) = active.filter(|active| active.belongs_to(token, link.peer())) else {
            return refused(&mut link, "no such session, or not yours");
        };
        let mut joined = active.joined.lock().unwrap_or_else(PoisonError::into_inner);
        let again = joined.contains(&hello.link);
        // The owner has lost the link, whether this end has noticed or not (W26).
        if hello.link >= active.links || (again && self.config.resume.is_zero()) {
            let reason = format!(
                "link {} of {} is there already or does not exist",
                hello.link, active.links
            );
            drop(joined);
            return refused(&mut link, &reason);
        }
        if !again {
            joined.push(hello.link);
        }
        drop(joined);
        let welcome = self.welcome(&active.token);
        write_preamble(&mut link, peer, &welcome)?;
        active.destination.session().add_link(hello.link, link)
    }

    fn welcome(&self, token: &str) -> Welcome {
        let grants = self.config.grants;
        Welcome {
            token: token.to_string(),
            chunk_bytes: u32::try_from(grants.chunk_bytes).unwrap_or(u32::MAX),
            stream_frames: grants.stream_frames,
            shared_frames: grants.shared_frames,
            codecs: DECODED.iter().map(|codec| codec.name().to_string()).collect(),
            ..Welcome::default()
        }
    }

    /// Opens the session that link 0 requests; the error is a message for the peer.
    fn open(
        self: &Arc<Self>,
        hello: &Hello,
        peer: &str,
        owner: Option<&Peer>,
    ) -> Result<(Option<String>, Arc<Active>, Welcome), String> {
        let ours = self.config.page_size;
        if hello.page_size != ours {
            return Err(format!(
                "the source has page size {}, this end {ours}: give both the same --page-size, that of the guest",
                hello.page_size
            ));
        }
        if hello.ask || hello.link != 0 || hello.links == 0 || hello.links > MAX_LINKS {
            return Err(format!("link {} of {} cannot open a session", hello.link, hello.links));
        }
        if hello.session.len() != 32
            || !hello.session.bytes().all(|digit| digit.is_ascii_hexdigit())
        {
            return Err("the session identifier is not made of 32 hex digits".into());
        }
        if let Some(name) =
            hello.codecs.iter().find(|name| !DECODED.iter().any(|codec| codec.name() == **name))
        {
            return Err(format!("this end does not know the codec '{name}'"));
        }
        if self.closing.load(Ordering::Acquire) {
            return Err("this receiver is ending".into());
        }
        if self.lock_sessions().contains_key(&hello.session) {
            return Err("the session exists already".into());
        }
        let Some((target, address)) =
            self.config.targets.iter().find(|(name, _)| *name == hello.name)
        else {
            let names: Vec<_> =
                self.config.targets.iter().filter_map(|(name, _)| name.as_deref()).collect();
            return Err(match &hello.name {
                Some(name) => format!("no target named '{name}' is allowed here (--allow)"),
                None => format!("say which target by --name; there are: {}", names.join(", ")),
            });
        };
        {
            let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
            if busy.contains(target) {
                // Its links must first fall silent, and then the session waits for them.
                let most = (SILENCE + self.config.resume + SILENCE).as_secs();
                return Err(format!(
                    "a migration to this target is in progress; if its source has died, the target is free within {most} s"
                ));
            }
            busy.push(target.clone());
        }
        let peer = match owner {
            Some(owner) => format!("{peer} ({owner})"),
            None => peer.to_string(),
        };
        let opened = self.open_target(hello, (&peer, owner), target, address);
        if opened.is_err() {
            self.remove_session(target, &hello.session);
        }
        opened.map(|(active, welcome)| (target.clone(), active, welcome))
    }

    fn open_target(
        &self,
        hello: &Hello,
        (peer, owner): (&str, Option<&Peer>),
        target: &Option<String>,
        address: &UnixAddress,
    ) -> Result<(Arc<Active>, Welcome), String> {
        address.check_target().map_err(|error| error.to_string())?;
        self.host.prepare(target, hello)?;
        let (host, listener) = (self.host.clone(), self.host.clone());
        let named = target.clone();
        let listen = move || listener.listen(&named);
        let delta_cache = hello.delta_cache.min(self.config.delta_cache);
        let destination = Destination::new(
            peer.to_string(),
            (self.config.grants, (hello.links, self.config.resume)),
            (self.config.page_size as usize, delta_cache),
            (address.clone(), Box::new(listen)),
            self.lanes.clone(),
            Box::new(move |text| host.notice(text)),
        );
        let destination = Arc::new(destination.map_err(|error| error.to_string())?);
        let token = random_id().map_err(|error| error.to_string())?;
        let welcome = Welcome { delta_cache, ..self.welcome(&token) };
        let joined = Mutex::new(vec![0]);
        let active =
            Active { token, owner: owner.cloned(), links: hello.links, joined, destination };
        let active = Arc::new(active);
        self.lock_sessions().insert(hello.session.clone(), active.clone());
        Ok((active, welcome))
    }
}

const DECODED: [Codec; 5] = [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz];

fn refuse(link: &mut Link, peer: &str, reason: &str) {
    let welcome = Welcome { error: Some(reason.to_string()), ..Welcome::default() };
    // The peer may have closed the connection.
    let _ = write_preamble(link, peer, &welcome);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A host that opens connections faster than peers finish their handshakes loses its own.
    #[test]
    fn the_host_that_floods_the_port_gives_way() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut waiting = VecDeque::new();
        let hosts = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 1], [10, 0, 0, 1], [10, 0, 0, 3]];
        for (number, host) in (0..).zip(hosts) {
            let socket = TcpStream::connect(address).unwrap();
            waiting.push_back(Waiting { number, from: Some(IpAddr::from(host)), socket });
        }
        for left in [0, 2] {
            let at = surplus(&waiting).unwrap();
            assert_eq!(waiting.remove(at).unwrap().number, left);
        }
        // Each host has one: the oldest is closed.
        assert_eq!(waiting[surplus(&waiting).unwrap()].number, 1);
        assert!(surplus(&VecDeque::new()).is_none());
    }
}
