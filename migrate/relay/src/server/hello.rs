//! The connections to the port: strangers, links of sessions, questions, and hellos that open a
//! session.

use super::state::{Active, Server};
use super::waiting::LastPass;
use crate::destination::Destination;
use crate::threads::spawn;
use crate::unix::UnixAddress;
use codec::Codec;
use session::{
    random_id, read_preamble, write_preamble, Hello, Link, Pass, SessionError, Welcome,
    HELLO_TIMEOUT, MAX_LINKS, PASS_BYTES, SILENCE,
};
use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tls::{Peer, TlsError};

/// The shortest time-out of a socket: zero would be none.
const A_MOMENT: Duration = Duration::from_millis(1);

impl Server {
    fn said_hello(&self, number: u64) {
        self.lock_waiting().remove(number);
    }

    pub(super) fn admit(self: &Arc<Self>, socket: TcpStream, peer: String) {
        let socket = Arc::new(socket);
        let number = self.admitted.fetch_add(1, Ordering::Relaxed);
        self.lock_waiting().add(number, socket.clone(), |pass| self.is_valid(pass));
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
        socket: Arc<TcpStream>,
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
            .and_then(|()| socket.try_clone())
            .map_err(failed)
            .and_then(|own| self.take_pass(&own, peer, number, deadline).map(|()| own))
            .and_then(|own| self.secure(own, peer, deadline));
        drop(socket);
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

    /// Reads the pass in front of a TLS handshake, if there is one (W5a). One that does not count
    /// makes the connection a stranger's: its hello gets the answer.
    fn take_pass(
        &self,
        socket: &TcpStream,
        peer: &str,
        number: u64,
        deadline: Instant,
    ) -> Result<(), SessionError> {
        if self.config.acceptor.is_none() {
            return Ok(());
        }
        let bad = |detail: String| SessionError::Hello { peer: peer.into(), detail };
        let limit = || {
            let left = deadline.saturating_duration_since(Instant::now());
            socket.set_read_timeout(Some(left.max(A_MOMENT)))
        };
        let mut bytes = [0; PASS_BYTES];
        // Nothing, or another byte: the handshake finds out.
        match limit().and_then(|()| socket.peek(&mut bytes[..1])) {
            Ok(1) if Pass::may_begin_with(bytes[0]) => {}
            _ => return Ok(()),
        }
        let mut done = 0;
        while done < PASS_BYTES {
            let got = limit().and_then(|()| { socket }.read(&mut bytes[done..]));
            done += match got {
                Ok(got @ 1..) if Instant::now() < deadline => got,
                _ => {
                    return Err(bad(format!(
                        "only {done} of the {PASS_BYTES} bytes of its pass came in time"
                    )))
                }
            };
        }
        match Pass::from_bytes(&bytes) {
            None => Err(bad("it begins with neither a pass nor a handshake".into())),
            Some(pass) => {
                self.lock_waiting().show(number, pass, |pass| self.is_valid(pass));
                Ok(())
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
            pass: self.config.acceptor.is_some(),
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
        let active = Active {
            token,
            owner: owner.cloned(),
            links: hello.links,
            joined,
            last_pass: LastPass::default(),
            destination,
        };
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
