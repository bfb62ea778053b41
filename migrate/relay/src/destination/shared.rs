//! What the threads of a destination relay share.

use super::barrier::Barriers;
use super::decode::DecodeJob;
use crate::counters::Counters;
use crate::inbox::Arrived;
use crate::unix::UnixAddress;
use pipeline::{Lanes, Results};
use ring::EventCount;
use session::{Session, SessionError};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What the threads tell the one that decides.
pub(super) enum Event {
    /// QEMU has said SHUT.
    Shut(u32),
    /// QEMU has closed its main connection.
    QemuEof,
    /// QEMU does not take a stream's bytes.
    WriterGone { stream: u16, is_channel: bool, error: String },
    /// The source's main connection ended well (no return path).
    SourceEof,
    /// The session ended before its time.
    Closed(Arc<SessionError>),
    /// The client's report: all is over.
    Finished(Vec<u8>),
}

pub(super) struct Shared {
    pub(super) session: Arc<Session>,
    pub(super) lanes: Arc<Lanes<DecodeJob>>,
    pub(super) target: UnixAddress,
    pub(super) page_size: usize,
    /// Bytes granted for a delta cache, until a stream has taken it.
    pub(super) delta_cache: AtomicU64,
    pub(super) barriers: Barriers,
    pub(super) counters: Counters,
    pub(super) events: Sender<Event>,
    /// The stream asked for a return path.
    pub(super) return_path: AtomicBool,
    /// The stream holds what starts the VM in postcopy: QEMU may close its socket and run it all
    /// the same.
    pub(super) postcopy: AtomicBool,
    pub(super) over: AtomicBool,
    /// QEMU has said SHUT(0): it has all it needs, whatever its channels still take.
    pub(super) confirmed: AtomicBool,
    pub(super) main_up: AtomicBool,
    pub(super) main_event: EventCount,
    pub(super) streams: Box<[OnceLock<Arc<Results<Arrived>>>]>,
    /// Main first.
    pub(super) sockets: Mutex<Vec<Arc<UnixStream>>>,
}

impl Shared {
    pub(super) fn main_is_up(&self) {
        if !self.main_up.load(Ordering::Relaxed) {
            self.main_up.store(true, Ordering::Release);
            self.main_event.notify_all();
        }
    }

    /// Waits until the main connection has bytes at QEMU (W19); false when the session has ended.
    pub(super) fn wait_for_main(&self) -> bool {
        let up = self.main_event.wait_until(None, || {
            let ended = self.has_ended();
            let up = self.main_up.load(Ordering::Acquire);
            (up || ended).then_some(up)
        });
        up.unwrap_or(false)
    }

    /// Nothing more is to be written to QEMU.
    pub(super) fn has_ended(&self) -> bool {
        self.session.failure().is_some() || self.over.load(Ordering::Acquire)
    }

    /// QEMU has said SHUT(0).
    pub(super) fn set_confirmed(&self) {
        self.confirmed.store(true, Ordering::Release);
        self.main_event.notify_all();
    }

    /// Waits for SHUT(0); false when the session ends without. A channel that takes no more bytes
    /// is normal at the end: QEMU closes its channels before it says SHUT.
    pub(super) fn wait_for_confirmation(&self) -> bool {
        let confirmed = self.main_event.wait_until(None, || {
            let confirmed = self.confirmed.load(Ordering::Acquire);
            (confirmed || self.has_ended()).then_some(confirmed)
        });
        confirmed.unwrap_or(false)
    }

    /// Lets every thread that waits look whether the migration is over.
    pub(super) fn wake(&self) {
        self.barriers.wake();
        self.main_event.notify_all();
    }

    /// Keeps a new connection to QEMU, to close it at the end.
    pub(super) fn keep_socket(&self, socket: &Arc<UnixStream>, is_main: bool) {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        let place = if is_main { 0 } else { sockets.len() };
        sockets.insert(place, socket.clone());
        // `close_sockets` may have been here before: `over` is set ahead of it, and both hold the
        // lock.
        if self.over.load(Ordering::Acquire) {
            for socket in sockets.iter() {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }

    /// Ends QEMU's connections, main first: a QEMU that waits for channels then notices (section
    /// 3.4).
    pub(super) fn close_sockets(&self) {
        for socket in self.sockets.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}
