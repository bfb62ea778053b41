//! The connections to the port: strangers, links of sessions, questions, and hellos that open a
//! session.

use super::answer::has_arrived;
use super::greeting::{answer_unreadable, check_opening, read_pass, refuse, secure, welcome};
use super::measure;
use super::state::{Active, Server};
use super::waiting::LastPass;
use crate::destination::Destination;
use crate::qemu_socket::{QemuAddress, QemuSocket};
use crate::threads::spawn;
use session::{
    random_id, read_preamble, write_preamble, Hello, Link, SessionError, Verdict, Welcome,
    HELLO_TIMEOUT,
};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tls::Peer;

impl Server {
    fn remove_waiting(&self, number: u64) {
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
                    if let Some(text) = server.strangers.add(&error) {
                        server.host.notice(&text);
                    }
                }
            }
        });
        if let Err(error) = started {
            self.remove_waiting(number);
            self.shortage.report(&error, |text| self.host.notice(text));
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
            .and_then(|own| secure(self.config.acceptor.as_ref(), own, peer, deadline));
        drop(socket);
        let (mut link, hello) = match secured {
            Ok(mut link) => {
                let left = deadline.saturating_duration_since(Instant::now());
                let hello = read_preamble::<Hello>(&mut link, peer, left);
                self.remove_waiting(number);
                (link, hello)
            }
            Err(error) => {
                self.remove_waiting(number);
                return Err(error);
            }
        };
        let hello = match hello {
            Ok(hello) => hello,
            Err(error) => return Err(answer_unreadable(&mut link, peer, error)),
        };
        if let Some((reason, answer)) = self.verdict(&hello, link.peer()) {
            let Verdict { committed, confirmed, loaded, pending } = answer;
            let (error, committed) = (Some(reason), Some(committed));
            let welcome =
                Welcome { error, committed, confirmed, loaded, pending, ..Welcome::default() };
            write_preamble(&mut link, peer, &welcome)?;
            if !pending && has_arrived(&link) {
                self.note_answered(&hello.session);
            }
            return Ok(None);
        }
        if let Some(wanted) = measure::wanted(&hello) {
            return measure::answer(link, peer, wanted, &self.welcome("")).map(|()| None);
        }
        if let Some(token) = &hello.token {
            let joined = self.join(link, &hello, token, peer);
            return joined.map(|()| None);
        }
        match self.open(&hello, peer, link.peer()) {
            Ok((target, active, welcome)) => {
                let welcomed = write_preamble(&mut link, peer, &welcome)
                    .and_then(|()| active.add_link(0, link));
                if let Err(error) = welcomed {
                    let reason = "its first link could not be set up".into();
                    active.destination.session().fail(SessionError::Local { reason });
                    // Nothing was sent over it, so its source has nothing to ask.
                    active.destination.note_asked();
                    active.note_answered();
                    // The host has prepared its QEMU, and undoes that.
                    self.serve(&target, &hello.session, &active);
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

    /// Reads the pass in front of a TLS handshake, if there is one (W5a). With an invalid pass the
    /// connection counts as a stranger's, and its hello gets the answer.
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
        if let Some(pass) = read_pass(socket, peer, deadline)? {
            self.lock_waiting().show(number, pass, |pass| self.is_valid(pass));
        }
        Ok(())
    }

    /// Adds a further link to a session (W4).
    pub(super) fn join(
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
        // A link of the same number may have joined before: the owner has lost it, whether this end
        // has noticed or not (W26).
        let exists = hello.link < active.links;
        if !exists || (!active.join(hello.link) && self.config.resume.is_zero()) {
            let reason = format!(
                "link {} of {} is there already or does not exist",
                hello.link, active.links
            );
            return refused(&mut link, &reason);
        }
        let welcome = self.welcome(&active.token);
        write_preamble(&mut link, peer, &welcome)?;
        active.add_link(hello.link, link)
    }

    fn welcome(&self, token: &str) -> Welcome {
        welcome(self.config.grants, token, self.config.acceptor.is_some())
    }

    /// Opens the session that link 0 requests; the error is a message for the peer.
    fn open(
        self: &Arc<Self>,
        hello: &Hello,
        peer: &str,
        owner: Option<&Peer>,
    ) -> Result<(Option<String>, Arc<Active>, Welcome), String> {
        check_opening(hello, self.config.page_size)?;
        self.may_open(hello)?;
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
        self.take_target(target, &hello.session)?;
        // This may have changed while another session ended.
        if let Err(reason) = self.may_open(hello) {
            self.free_target(target, &hello.session);
            return Err(reason);
        }
        let opened = random_id().map_err(|error| error.to_string()).and_then(|token| {
            let active = self.open_target(hello, (peer, owner), target, address, &token)?;
            active.join(0);
            let (delta_cache, histories) = (active.delta_cache, active.histories);
            let seed = self.config.seed.is_some() && hello.seed > 0;
            Ok((active, Welcome { delta_cache, histories, seed, ..self.welcome(&token) }))
        });
        if opened.is_err() {
            self.remove_session(target, &hello.session);
        }
        opened.map(|(active, welcome)| (target.clone(), active, welcome))
    }

    /// Whether a session with this identifier can be opened now.
    fn may_open(&self, hello: &Hello) -> Result<(), String> {
        if self.closing.load(Ordering::Acquire) {
            return Err("this receiver is ending".into());
        }
        if self.lock_sessions().contains_key(&hello.session) {
            return Err("the session exists already".into());
        }
        Ok(())
    }

    /// Makes a session without links.
    pub(super) fn open_target(
        &self,
        hello: &Hello,
        (peer, owner): (&str, Option<&Peer>),
        target: &Option<String>,
        address: &QemuAddress,
        token: &str,
    ) -> Result<Arc<Active>, String> {
        let peer = match owner {
            Some(owner) => format!("{peer} ({owner})"),
            None => peer.to_string(),
        };
        address.check_target().map_err(|error| error.to_string())?;
        let (host, listener, judge) = (self.host.clone(), self.host.clone(), self.host.clone());
        let named = target.clone();
        let listen = move || listener.listen(&named);
        let vet = move |socket: &QemuSocket| judge.connected(socket);
        let delta_cache = hello.delta_cache.min(self.config.delta_cache);
        let histories = hello.histories.and_then(|asked| asked.granted(self.config.history));
        let destination = Destination::new(
            peer,
            (self.config.grants, (hello.links, self.config.resume)),
            (self.config.page_size as usize, delta_cache, histories),
            (address.clone(), Box::new(listen), Box::new(vet)),
            self.pool.clone(),
            Box::new(move |text| host.notice(text)),
            (self.host.is_for_disks(), self.config.seed.clone().map(|seed| (seed, hello.seed))),
        );
        let destination = Arc::new(destination.map_err(|error| error.to_string())?);
        destination.session().tolerate_silence(self.config.silence);
        // The last step that may fail: `serve` undoes it.
        if let Err(reason) = self.host.prepare(target, hello) {
            destination.session().fail(SessionError::Local { reason: reason.clone() });
            return Err(reason);
        }
        let active = Arc::new(Active {
            token: token.to_string(),
            owner: owner.cloned(),
            links: hello.links,
            joined: Mutex::default(),
            answered: AtomicBool::new(false),
            linked: AtomicBool::new(false),
            last_pass: LastPass::default(),
            delta_cache,
            histories,
            destination,
        });
        self.lock_sessions().insert(hello.session.clone(), active.clone());
        Ok(active)
    }
}
