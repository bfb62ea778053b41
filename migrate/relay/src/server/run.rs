//! Accepts links until the receiver is ordered to end.

use super::allowance::Strangers;
use super::config::{Host, ServerConfig};
use super::shortage::{is_shortage, Shortage};
use super::state::{Active, Promise, Server};
use crate::destination::DecodeContext;
use crate::error::RelayError;
use crate::threads::{check_engines, open_devices, spawn, CODEC_END};
use pipeline::{Pool, PoolConfig};
use qat::Watchdog;
use session::SessionError;
use std::collections::{HashMap, VecDeque};
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Connections that the kernel holds until they are accepted.
pub(super) const BACKLOG: i32 = 1024;
/// The most time that a source may take to open link 0 again after it was asked to. It covers the
/// source's attempt to open its first link and its wait for the answer.
const FIRST_LINK: Duration = Duration::from_secs(30);

/// The advice to the user of a receiver whose accelerator hangs.
const AGAIN: &str = "start the receiver again";

impl Server {
    /// Starts the codec threads.
    ///
    /// # Errors
    /// A target is not a socket; the system refuses threads; a call that opens the accelerator does
    /// not return; a required device has no instance for them.
    pub fn new(config: ServerConfig, host: Arc<dyn Host>) -> Result<Arc<Self>, RelayError> {
        for (_, target) in &config.targets {
            target.check_target()?;
        }
        let threads = config.decompress_threads.max(1);
        let device = config.qat.clone();
        let make = move || {
            let context = |_| DecodeContext::new(device.as_ref());
            (0..threads).map(context).collect::<Vec<_>>()
        };
        let mut contexts = open_devices(config.qat.as_ref(), AGAIN, make)?;
        let on_device = contexts.iter().filter_map(DecodeContext::on_device);
        check_engines(config.qat.as_ref(), on_device)?;
        let accelerators: Vec<_> = contexts.iter().filter_map(DecodeContext::accelerator).collect();
        let settings = PoolConfig { threads, name: "decompress", ..PoolConfig::default() };
        let next = |_| contexts.pop().expect("one context was made for each thread");
        let pool = Pool::new(settings, next).map_err(|source| RelayError::Resource {
            what: "cannot start the codec threads".into(),
            source,
        })?;
        if !accelerators.is_empty() {
            pool.leave_behind_after(CODEC_END);
        }
        Ok(Arc::new(Self {
            config,
            host,
            pool,
            accelerators,
            sessions: Mutex::new(HashMap::new()),
            ended: Mutex::new(VecDeque::new()),
            taken: Mutex::default(),
            freed: Condvar::new(),
            waiting: Mutex::default(),
            admitted: AtomicU64::new(0),
            strangers: Strangers::new(),
            shortage: Shortage::default(),
            served: AtomicU64::new(0),
            stops: AtomicU64::new(0),
            closing: AtomicBool::new(false),
        }))
    }

    /// Counters of the codec threads' accelerators since the server was created; empty without any.
    pub fn accelerators(&self) -> Vec<qat::Snapshot> {
        self.accelerators.iter().map(|counters| counters.snapshot()).collect()
    }

    /// Accepts links until [`Server::stop`], or with `once` until the first migration has ended. A
    /// session that ends before its source opens a main stream does not count. If its links were
    /// lost, its source has time to ask how far it got (W28).
    ///
    /// # Errors
    /// The listening socket fails; a call of the accelerator's library does not return.
    pub fn run(self: &Arc<Self>, listener: &TcpListener, once: bool) -> Result<(), RelayError> {
        let failed =
            |source| RelayError::Resource { what: "the listening socket failed".into(), source };
        listener.set_nonblocking(true).map_err(failed)?;
        // The standard library's 128 are soon full while strangers flood the port.
        rustix::net::listen(listener, BACKLOG).map_err(|error| failed(error.into()))?;
        let next = || match listener.accept() {
            Ok((socket, peer)) => Some((socket, peer.to_string())),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                // A plain wait: links are opened once a migration, so 20 ms more do not matter.
                std::thread::sleep(Duration::from_millis(20));
                None
            }
            Err(error) => {
                if is_shortage(&error) {
                    self.shortage.report(&error, |text| self.host.notice(text));
                    std::thread::sleep(Duration::from_millis(100));
                }
                None
            }
        };
        self.serve_links(next, || once && self.served.load(Ordering::Acquire) > 0)
    }

    /// Carries the session that a [`Front`](super::Front) has promised to a source: takes its links
    /// from `links` until the session has ended, its source has had time to ask about it (W28), or
    /// [`Server::stop`] was called.
    ///
    /// # Errors
    /// The target cannot be used, or the system refuses memory or threads.
    pub fn carry(
        self: &Arc<Self>,
        promise: &Promise,
        links: &Receiver<(TcpStream, String)>,
    ) -> Result<(), RelayError> {
        let active = self.keep_promise(promise)?;
        let opened = Instant::now();
        let next = || {
            if !active.has_joined() && opened.elapsed() >= FIRST_LINK {
                let reason = "the source has not opened its first link again".into();
                active.destination.session().fail(SessionError::Local { reason });
            }
            match links.recv_timeout(Duration::from_millis(20)) {
                Ok(link) => Some(link),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => {
                    std::thread::sleep(Duration::from_millis(20));
                    None
                }
            }
        };
        self.serve_links(next, || self.lock_sessions().is_empty())
    }

    /// Opens the promised session, and runs it on a thread of its own.
    fn keep_promise(self: &Arc<Self>, promise: &Promise) -> Result<Arc<Active>, RelayError> {
        let unsupported = |what: String| RelayError::Unsupported { what };
        let [(target, address)] = &self.config.targets[..] else {
            return Err(unsupported("a promised session needs exactly one target".into()));
        };
        // There is no other session here.
        self.closing.store(true, Ordering::Release);
        let owner = Some(&promise.owner);
        let peer = (&promise.peer[..], owner);
        let active = self
            .open_target(&promise.hello, peer, target, address, &promise.token)
            .map_err(unsupported)?;
        let (server, serving) = (self.clone(), active.clone());
        let (target, session) = (target.clone(), promise.hello.session.clone());
        spawn("session", move || server.serve(&target, &session, &serving))?;
        Ok(active)
    }

    /// Admits the links that `next` returns until `is_over`, until [`Server::stop`], or until a
    /// call of the accelerator's library does not return. `next` waits a little for a link.
    fn serve_links(
        self: &Arc<Self>,
        mut next: impl FnMut() -> Option<(TcpStream, String)>,
        is_over: impl Fn() -> bool,
    ) -> Result<(), RelayError> {
        let mut told = false;
        let mut watchdog = self.config.qat.is_some().then(Watchdog::default);
        let mut hung = None;
        loop {
            let stopped = self.stops.load(Ordering::Acquire) > 0;
            if let Some(hang) = watchdog.as_mut().and_then(|dog| dog.look(Instant::now())) {
                watchdog = None;
                hung = Some(RelayError::Accelerator { hang, remedy: AGAIN });
            }
            if stopped || hung.is_some() || is_over() {
                self.closing.store(true, Ordering::Release);
                // The sessions' own threads close QEMU's sockets and inform the peer. The call is
                // repeated, since a last hello may still open a session.
                if self.lock_sessions().is_empty() && (stopped || !self.may_be_asked()) {
                    return hung.map_or(Ok(()), Err);
                }
                self.end_sessions(&mut told);
                if let Some(error) = &hung {
                    self.end_without_codecs(error);
                }
            }
            // Lost links are reopened, and questions asked, until the last session has ended.
            if let Some((socket, peer)) = next() {
                self.admit(socket, peer);
            }
        }
    }

    /// Whether the source of a lost session may still ask about it.
    fn may_be_asked(&self) -> bool {
        let ended = self.lock_ended();
        ended.iter().any(|ended| ended.unasked_until.is_some_and(|until| Instant::now() < until))
    }

    /// Ends the sessions of a receiver that was ordered to stop. A session whose QEMU may be
    /// starting the VM ends only at the second stop. Otherwise its source would be in doubt for
    /// good, with no relay left to ask (W28).
    fn end_sessions(&self, told: &mut bool) {
        let stops = self.stops.load(Ordering::Acquire);
        if stops == 0 {
            return;
        }
        let sessions: Vec<_> = self.lock_sessions().values().cloned().collect();
        for active in sessions {
            let session = active.destination.session();
            active.destination.stop_waiting();
            if stops == 1 && session.failure().is_none() && session.close_commit() {
                if !std::mem::replace(told, true) {
                    self.host.notice(
                        "the destination QEMU may be starting the VM just now; waiting until the source knows \
                         (interrupt again to end this receiver all the same)",
                    );
                }
                continue;
            }
            let reason = "the receiver was stopped".into();
            session.fail(SessionError::Local { reason });
        }
    }

    /// Ends the sessions for which a codec thread may have chunks that it never delivers. The
    /// others only wait for their QEMU, which may be starting the VM.
    fn end_without_codecs(&self, error: &RelayError) {
        let sessions: Vec<_> = self.lock_sessions().values().cloned().collect();
        for active in sessions.iter().filter(|active| !active.destination.needs_no_codecs()) {
            let reason = error.to_string();
            active.destination.session().fail(SessionError::Local { reason });
        }
        // Links may wait for a codec thread that never takes their units.
        self.pool.close();
    }

    /// Ends [`Server::run`] and every session. A session whose VM may be starting ends only at the
    /// second call.
    pub fn stop(&self) {
        self.stops.fetch_add(1, Ordering::AcqRel);
    }

    /// Connections refused because they did not speak the protocol.
    pub fn strangers(&self) -> u64 {
        self.strangers.count()
    }
}
