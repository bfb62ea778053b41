//! The front of a service whose sessions are held by other processes (W4a).
//!
//! ```text
//!  new connection ─► begins with a pass? ─► Switchboard::hand_on: the session's process takes it
//!                          │ no
//!                          ▼
//!                    TLS, hello ─► Switchboard::open: a process for the session
//!                          ▼
//!                    welcome: `again`, the token ─► the source opens link 0 again, with a pass
//! ```
//!
//! A TLS connection cannot move to another process without its keys, so the connection whose hello
//! opens a session ends there, and the source opens link 0 again.

use super::allowance::Strangers;
use super::greeting::{
    answer_unreadable, check_opening, limit, may_have_pass, read_pass, refuse, secure, welcome,
};
use super::measure;
use super::run::BACKLOG;
use super::shortage::{is_shortage, Shortage};
use super::state::Promise;
use super::waiting::WaitingRoom;
use crate::error::RelayError;
use crate::threads::spawn;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use session::{
    random_id, read_preamble, write_preamble, Grants, Hello, Link, Pass, SessionError, Welcome,
    HELLO_TIMEOUT, PASS_BYTES,
};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tls::Acceptor;

/// Pause before looking again for the rest of a pass, or after a failed `accept`.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Settings of a front.
#[derive(Debug, Clone)]
pub struct FrontConfig {
    /// Secures the links and decides which certificates are accepted.
    pub acceptor: Acceptor,
    /// Page size of the guests, bytes.
    pub page_size: u32,
    /// The grants to a peer.
    pub grants: Grants,
    /// The most bytes of delta cache for a session; 0 for none.
    pub delta_cache: u64,
    /// The most bytes of a session's histories (W29a); 0 for none.
    pub history: u64,
}

/// The processes that hold the sessions. Each connection's own thread calls it.
pub trait Switchboard: Send + Sync + 'static {
    /// Whether a process holds this session.
    fn holds(&self, session: &str) -> bool;
    /// Gives a connection that begins with a pass to the process that holds the session.
    ///
    /// # Errors
    /// The connection, when no process holds the session, or the process takes no link now.
    fn hand_on(&self, session: &str, socket: TcpStream, peer: &str) -> Result<(), TcpStream>;
    /// Starts a process for the session.
    ///
    /// # Errors
    /// A message for the peer's user.
    fn open(&self, promise: Promise) -> Result<(), String>;
    /// The answer to a hello whose target only asks a question and opens no session; `None` for any
    /// other target.
    fn answer(&self, target: &str) -> Option<String> {
        let _ = target;
        None
    }
    /// Reports a message for the user.
    fn notice(&self, text: &str);
}

/// Accepts links for sessions that other processes hold.
pub struct Front {
    config: FrontConfig,
    switchboard: Arc<dyn Switchboard>,
    waiting: Mutex<WaitingRoom>,
    admitted: AtomicU64,
    strangers: Strangers,
    shortage: Shortage,
}

impl std::fmt::Debug for Front {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Front").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Front {
    /// Creates a front without connections.
    pub fn new(config: FrontConfig, switchboard: Arc<dyn Switchboard>) -> Arc<Self> {
        Arc::new(Self {
            config,
            switchboard,
            waiting: Mutex::default(),
            admitted: AtomicU64::new(0),
            strangers: Strangers::new(),
            shortage: Shortage::default(),
        })
    }

    /// Accepts links while `go_on` returns true. `go_on` is called several times a second.
    ///
    /// # Errors
    /// The listening socket fails.
    pub fn run(
        self: &Arc<Self>,
        listener: &TcpListener,
        go_on: impl Fn() -> bool,
    ) -> Result<(), RelayError> {
        let failed =
            |source| RelayError::Resource { what: "the listening socket failed".into(), source };
        listener.set_nonblocking(true).map_err(failed)?;
        // The backlog is as long as that of `Server::run`.
        rustix::net::listen(listener, BACKLOG).map_err(|error| failed(error.into()))?;
        while go_on() {
            let mut fds = [PollFd::new(listener, PollFlags::IN)];
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 200_000_000 }));
            if fds[0].revents().is_empty() {
                continue;
            }
            match listener.accept() {
                Ok((socket, peer)) => self.admit(socket, peer.to_string()),
                Err(error) => {
                    if is_shortage(&error) {
                        self.shortage.report(&error, |text| self.switchboard.notice(text));
                    }
                    std::thread::sleep(LOOK_AGAIN);
                }
            }
        }
        Ok(())
    }

    /// Connections that were turned away.
    pub fn strangers(&self) -> u64 {
        self.strangers.count()
    }

    fn lock_waiting(&self) -> MutexGuard<'_, WaitingRoom> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(self: &Arc<Self>, socket: TcpStream, peer: String) {
        let socket = Arc::new(socket);
        let number = self.admitted.fetch_add(1, Ordering::Relaxed);
        let known = |pass: &Pass| self.switchboard.holds(&pass.session);
        self.lock_waiting().add(number, socket.clone(), known);
        let front = self.clone();
        let started = spawn("hello", move || {
            if let Err(error) = front.hello(&socket, &peer, number) {
                if let Some(text) = front.strangers.add(&error) {
                    front.switchboard.notice(&text);
                }
            }
            front.lock_waiting().remove(number);
        });
        if let Err(error) = started {
            self.lock_waiting().remove(number);
            self.shortage.report(&error, |text| self.switchboard.notice(text));
        }
    }

    /// Handles one connection up to its hello.
    fn hello(&self, socket: &TcpStream, peer: &str, number: u64) -> Result<(), SessionError> {
        let failed = |source| SessionError::Resource {
            what: "cannot set up a link's socket".into(),
            source,
        };
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let mut own = socket
            .set_nonblocking(false)
            .and_then(|()| socket.set_write_timeout(Some(HELLO_TIMEOUT)))
            .and_then(|()| socket.try_clone())
            .map_err(failed)?;
        if let Some(pass) = look_at_pass(&own, deadline) {
            match self.switchboard.hand_on(&pass.session, own, peer) {
                Ok(()) => return Ok(()),
                // The source tries again. An answer would end its migration.
                Err(_) if self.switchboard.holds(&pass.session) => {
                    let detail = "the process of its session takes no link now".into();
                    return Err(SessionError::Hello { peer: peer.into(), detail });
                }
                Err(socket) => own = socket,
            }
            // No process has the session: the answer to the hello says so.
            read_pass(&own, peer, deadline)?;
        }
        let mut link = secure(Some(&self.config.acceptor), own, peer, deadline)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let hello = match read_preamble::<Hello>(&mut link, peer, left) {
            Ok(hello) => hello,
            Err(error) => return Err(answer_unreadable(&mut link, peer, error)),
        };
        self.lock_waiting().remove(number);
        if let Some(wanted) = measure::wanted(&hello) {
            let grants = welcome(self.config.grants, "", true);
            return measure::answer(link, peer, wanted, &grants);
        }
        let target = hello.name.as_deref().unwrap_or_default();
        if let Some(answer) = self.switchboard.answer(target) {
            refuse(&mut link, peer, &answer);
            return Ok(());
        }
        match self.open(&hello, peer, &link) {
            Ok(welcome) => write_preamble(&mut link, peer, &welcome),
            Err(reason) => {
                refuse(&mut link, peer, &reason);
                Err(SessionError::Hello { peer: peer.into(), detail: reason })
            }
        }
    }

    /// Opens the session that a hello requests; the error is a message for the peer.
    fn open(&self, hello: &Hello, peer: &str, link: &Link) -> Result<Welcome, String> {
        if hello.token.is_some() {
            return Err("no such session, or not yours".into());
        }
        check_opening(hello, self.config.page_size)?;
        if !hello.again {
            return Err(
                "the source's platen cannot open a link again, as this service needs it: use the \
                 same platen on both hosts"
                    .into(),
            );
        }
        // A second session of this identifier would get links of the first one.
        if self.switchboard.holds(&hello.session) {
            return Err("the session exists already".into());
        }
        let Some(owner) = link.peer().cloned() else {
            return Err("the source shows no certificate".into());
        };
        let token = random_id().map_err(|error| error.to_string())?;
        let delta_cache = hello.delta_cache.min(self.config.delta_cache);
        let histories = hello.histories.and_then(|asked| asked.granted(self.config.history));
        let hello = Hello { delta_cache, histories, ..hello.clone() };
        let (promised, peer) = (token.clone(), peer.to_string());
        self.switchboard.open(Promise { hello, token: promised, owner, peer })?;
        let welcome = welcome(self.config.grants, &token, true);
        Ok(Welcome { delta_cache, histories, again: true, ..welcome })
    }
}

/// The pass with which a connection begins, if it is one. Its bytes stay unread.
fn look_at_pass(socket: &TcpStream, deadline: Instant) -> Option<Pass> {
    if !may_have_pass(socket, deadline) {
        return None;
    }
    let mut bytes = [0; PASS_BYTES];
    loop {
        match limit(socket, deadline).and_then(|()| socket.peek(&mut bytes)) {
            Ok(PASS_BYTES) => return Pass::from_bytes(&bytes),
            // The rest comes in another segment.
            Ok(1..) if Instant::now() < deadline && !ends_within(socket, LOOK_AGAIN) => {}
            _ => return None,
        }
    }
}

/// Waits for `time`, or until nothing more can come: the peer has closed the connection, or the
/// waiting room has. A look at bytes that have come does not show this.
fn ends_within(socket: &TcpStream, time: Duration) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    poll(&mut fds, Some(&time)).is_ok_and(|ended| ended > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::Shutdown;
    use std::sync::mpsc;

    /// As of a host that opens any number of connections, and sends the first byte of a pass.
    #[test]
    fn a_connection_that_the_waiting_room_closes_in_its_pass_ends_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = Arc::new(listener.accept().unwrap().0);
        client.write_all(b"R").unwrap();
        let (looking, (ended, end)) = (socket.clone(), mpsc::channel());
        std::thread::spawn(move || {
            let pass = look_at_pass(&looking, Instant::now() + Duration::from_secs(3600));
            let _ = ended.send(pass);
        });
        let a_while = Duration::from_millis(50);
        assert!(end.recv_timeout(a_while).is_err(), "the rest of the pass may come");
        socket.shutdown(Shutdown::Both).unwrap();
        let pass = end.recv_timeout(Duration::from_secs(60)).expect("its thread is still there");
        assert_eq!(pass, None);
    }
}
