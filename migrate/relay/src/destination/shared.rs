//! The state that the threads of a destination relay share.

use super::barrier::Barriers;
use super::begin::{Beginning, GAVE_WAY};
use super::decode::{DecodeJob, Parts};
use super::seed::SessionSeed;
use crate::counters::Counters;
use crate::error::RelayError;
use crate::inbox::Arrived;
use crate::qemu_socket::{QemuAddress, QemuSocket};
use crate::threads::run_aside;
use delta::ChannelCache;
use pipeline::{Pool, Results};
use ring::EventCount;
use session::{Session, SessionError};
use std::io::{self, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Makes QEMU listen for its migration; the error is a message for the peer's user.
pub(crate) type Listen = Box<dyn Fn() -> Result<(), String> + Send + Sync>;
/// Looks at a connection to QEMU before its first byte.
pub(crate) type Vet = Box<dyn Fn(&QemuSocket) -> Result<(), String> + Send + Sync>;

/// How often a connect is retried while QEMU does not listen yet.
const RETRY: Duration = Duration::from_millis(50);

/// How long QEMU may take to load the packaged state of postcopy.
const LOADS: Duration = Duration::from_secs(30);
/// How long after its PONG QEMU certainly runs the VM, so that the end of its connection pauses the
/// migration: the next command that it reads starts the VM.
const STARTS: Duration = Duration::from_secs(1);

/// Events for the deciding thread.
pub(super) enum Event {
    /// QEMU has sent SHUT.
    Shut(u32),
    /// QEMU has closed its main connection; `unread`: without having read all bytes written to it.
    QemuEof { unread: bool },
    /// QEMU refuses a stream's bytes.
    WriterGone { stream: u16, is_channel: bool, error: String },
    /// The source's main connection ended in order (no return path).
    SourceEof,
    /// The session ended early.
    Closed(Arc<SessionError>),
    /// The client's report: the migration is over.
    Finished(Vec<u8>),
    /// The source has asked about its lost session.
    Asked,
    /// The wait for that question is over.
    StopWaiting,
}

pub(super) struct Shared {
    pub(super) session: Arc<Session>,
    pub(super) pool: Arc<Pool<DecodeJob>>,
    pub(super) target: QemuAddress,
    /// Makes QEMU listen on `target`.
    pub(super) listen: Listen,
    pub(super) vet: Vet,
    pub(super) page_size: usize,
    /// The session is an NBD connection's (W35).
    pub(super) is_disk: bool,
    /// Bytes granted for a delta cache; 0 once a stream has taken them.
    pub(super) delta_cache: AtomicU64,
    /// The cache of the multifd channels, once one of them has used it (W29c).
    pub(super) channel_deltas: OnceLock<Option<Arc<ChannelCache>>>,
    pub(super) channel_deltas_ended: AtomicBool,
    /// The pages that this host has already (W29b).
    pub(super) seed: Arc<SessionSeed>,
    /// The source's histories (W29a).
    pub(super) histories: Arc<Parts>,
    pub(super) barriers: Barriers,
    pub(super) counters: Counters,
    pub(super) events: Sender<Event>,
    /// The stream requested a return path.
    pub(super) return_path: AtomicBool,
    /// The stream has brought the bytes that start the VM in postcopy: QEMU may close its socket
    /// and still run the VM.
    pub(super) postcopy: AtomicBool,
    /// The last of these bytes may have been written to QEMU.
    pub(super) state_given: AtomicBool,
    /// These bytes end with a PING for whose PONG the source waits (W20c).
    pub(super) awaits_pong: AtomicBool,
    /// When QEMU sent that PONG, which shows that it has loaded the VM and runs it.
    pub(super) loaded: OnceLock<Instant>,
    /// QEMU has closed its main connection, and all that it wrote has been read.
    pub(super) qemu_gone: AtomicBool,
    pub(super) over: AtomicBool,
    /// QEMU has sent SHUT(0): it has all that it needs, whatever its channels still accept.
    pub(super) confirmed: AtomicBool,
    /// Whether the source has opened its main stream, or never will (W4d).
    pub(super) beginning: Beginning,
    /// The migration has failed while no link was up.
    pub(super) untold: AtomicBool,
    /// The source has asked about its lost session, and gets the answer.
    pub(super) asked: AtomicBool,
    pub(super) main_up: AtomicBool,
    pub(super) main_event: EventCount,
    pub(super) streams: Box<[OnceLock<Arc<Results<Arrived>>>]>,
    /// The main connection is the first.
    pub(super) sockets: Mutex<Vec<Arc<QemuSocket>>>,
}

impl Shared {
    /// The delta cache of the multifd channels. `None` if the main stream has it, or there is none.
    pub(super) fn channel_deltas(&self) -> Option<&Arc<ChannelCache>> {
        let make = || {
            let granted = self.delta_cache.swap(0, Ordering::AcqRel);
            (granted > 0).then(|| Arc::new(ChannelCache::new(granted, self.page_size)))
        };
        self.channel_deltas.get_or_init(make).as_ref()
    }

    /// Frees that cache: in postcopy no page is sent twice. Every table of the channels was applied
    /// before.
    pub(super) fn end_channel_deltas(&self) {
        let Some(Some(cache)) = self.channel_deltas.get() else { return };
        if !self.channel_deltas_ended.swap(true, Ordering::AcqRel) {
            let cache = cache.clone();
            run_aside(move || cache.close());
        }
    }

    pub(super) fn main_is_up(&self) {
        if !self.main_up.load(Ordering::Relaxed) {
            self.main_up.store(true, Ordering::Release);
            self.main_event.notify_all();
        }
    }

    /// Waits until bytes have been written to the main connection (W19); false when the session has
    /// ended.
    pub(super) fn wait_for_main(&self) -> bool {
        let up = self.main_event.wait_until(None, || {
            let ended = self.has_ended();
            let up = self.main_up.load(Ordering::Acquire);
            (up || ended).then_some(up)
        });
        up.unwrap_or(false)
    }

    /// Whether the session gives its target to another source: it has failed, or all its links are
    /// lost, and its source has not begun. Ends the session in the second case.
    pub(super) fn gives_way(&self) -> bool {
        if self.session.failure().is_some() {
            return !self.beginning.has_begun();
        }
        let gives_way = self.session.has_lost_its_links() && self.beginning.give_up();
        if gives_way {
            self.session.fail(SessionError::Local { reason: GAVE_WAY.into() });
        }
        gives_way
    }

    /// Whether nothing more may be written to QEMU.
    pub(super) fn has_ended(&self) -> bool {
        self.session.failure().is_some() || self.over.load(Ordering::Acquire)
    }

    /// Records that QEMU has sent SHUT(0).
    pub(super) fn set_confirmed(&self) {
        self.confirmed.store(true, Ordering::Release);
        self.main_event.notify_all();
    }

    /// Waits for SHUT(0); false when the session ends without it. A channel that accepts no more
    /// bytes is normal at the end: QEMU closes its channels before it sends SHUT.
    pub(super) fn wait_for_confirmation(&self) -> bool {
        let confirmed = self.main_event.wait_until(None, || {
            let confirmed = self.confirmed.load(Ordering::Acquire);
            (confirmed || self.has_ended()).then_some(confirmed)
        });
        confirmed.unwrap_or(false)
    }

    /// Whether QEMU has sent the PONG of the packaged state.
    pub(super) fn has_loaded(&self) -> bool {
        self.loaded.get().is_some()
    }

    /// Records that QEMU has sent the PONG of the packaged state.
    pub(super) fn set_loaded(&self) {
        if self.loaded.set(Instant::now()).is_ok() {
            self.main_event.notify_all();
        }
    }

    /// Records that QEMU has closed its main connection.
    pub(super) fn set_qemu_gone(&self) {
        self.qemu_gone.store(true, Ordering::Release);
        self.main_event.notify_all();
    }

    /// Whether QEMU may be loading the packaged state, and will report when it has loaded it.
    pub(super) fn is_loading(&self) -> bool {
        self.awaits_pong.load(Ordering::Acquire)
            && self.state_given.load(Ordering::Acquire)
            && !self.has_loaded()
            && !self.qemu_gone.load(Ordering::Acquire)
    }

    /// Whether a QEMU that has ended cannot have run the VM although it switched to postcopy.
    /// Either it never got all bytes that start the VM, or it had to report first that it had
    /// loaded them, and did not.
    pub(super) fn never_ran(&self) -> bool {
        let says = self.awaits_pong.load(Ordering::Acquire) && !self.has_loaded();
        says || !self.state_given.load(Ordering::Acquire)
    }

    /// Waits, at the end of a session, until a QEMU that is loading the packaged state has loaded
    /// it or has ended, so that the source gets that answer (W20c). If its connection ended in
    /// between, QEMU might exit with the VM that the source has given up.
    pub(super) fn let_it_load(&self) {
        if self.is_loading() {
            let until = Some(Instant::now() + LOADS);
            self.main_event.wait_until(until, || (!self.is_loading()).then_some(()));
        }
        if let Some(loaded) = self.loaded.get() {
            std::thread::sleep(STARTS.saturating_sub(loaded.elapsed()));
        }
    }

    /// Makes every waiting thread check whether the migration is over.
    pub(super) fn wake(&self) {
        self.barriers.wake();
        self.main_event.notify_all();
    }

    /// Makes QEMU listen, if this program controls QEMU; false when the migration has ended. Then
    /// the host restores QEMU's settings, and QEMU must not listen any more.
    pub(super) fn host_listens(&self) -> Result<bool, String> {
        // As in `connect`: either the end shows here, or `close_sockets` waits for this call.
        let _sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_ended() {
            return Ok(false);
        }
        (self.listen)().map(|()| true)
    }

    /// Connects to QEMU, which may take `patience` to listen; `None` when the migration has ended.
    /// Then QEMU gets no more connections: the target may be another migration's.
    ///
    /// `first`: the stream's first bytes, which are written before the migration can end. A QEMU
    /// that gets a connection without a byte takes it for its main channel, and then refuses the
    /// real one.
    pub(super) fn connect(
        &self,
        patience: Duration,
        is_main: bool,
        first: &[u8],
    ) -> Result<Option<Arc<QemuSocket>>, RelayError> {
        let until = Instant::now() + patience;
        loop {
            {
                // `close_sockets` takes this lock after `over` is set: either it finds the
                // connection here, or no connection is made.
                let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
                if self.has_ended() {
                    return Ok(None);
                }
                match self.target.connect() {
                    Ok(socket) => {
                        (self.vet)(&socket).map_err(|reason| RelayError::Deliver {
                            address: self.target.to_string(),
                            source: io::Error::other(reason),
                        })?;
                        // A new connection has room for them. An error shows at the next write.
                        let _ = { &socket }.write_all(first);
                        let socket = Arc::new(socket);
                        let place = if is_main { 0 } else { sockets.len() };
                        sockets.insert(place, socket.clone());
                        return Ok(Some(socket));
                    }
                    Err(error) if !error.is_absence() || Instant::now() >= until => {
                        return Err(error)
                    }
                    Err(_) => {}
                }
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Ends QEMU's connections, main first: then a QEMU that waits for channels notices the end.
    /// Waits for a call that makes QEMU listen.
    pub(super) fn close_sockets(&self) {
        for socket in self.sockets.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
