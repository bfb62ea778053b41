//! Heartbeats: the current activity of each I/O thread of a server, in memory that the server's
//! supervisor also maps.
//!
//! ```text
//!  server                                   memfd, 192 slots                      supervisor
//!  I/O thread n: begin, advance, end ─────► slot n: thread, progress, state ────► look, each second
//! ```
//!
//! Writing a slot costs a thread one store to a cache line of its own: no lock, no system call, no
//! allocation. A server that is stopped, livelocked or blocked need not report anything: its slots
//! stop changing.
//!
//! This crate only defines the slots. `swap::supervisor` decides when a server counts as hung.
//!
//! # Ownership
//!
//! A slot has one writer at a time, and any number of processes may read it. Each value is read
//! atomically, and gives no ordering.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

mod map;

use map::Map;

/// Slots of a [`Pulse`]: one for each possible thread of a device.
pub const SLOTS: usize = 192;

/// A thread's activity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The thread has no request.
    Idle,
    /// The thread works on requests: its progress must grow.
    Busy,
    /// The thread waits for a disk, which may take any time.
    Waits,
}

/// A snapshot of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// The thread's id, as in `/proc/PID/task`; 0 before its first request.
    pub thread: u32,
    /// The thread's activity.
    pub state: State,
    /// The thread's progress: it grows with each page and each request, and wraps at 2^62.
    pub progress: u64,
}

/// One thread's heartbeat.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Slot {
    /// The state in the lowest two bits, the progress above.
    word: AtomicU64,
    thread: AtomicU32,
}

const STATE: u64 = 3;
const BUSY: u64 = 1;
const WAITS: u64 = 2;
const ONE: u64 = 4;

impl Slot {
    /// Resets the slot for another thread, which has no request yet.
    pub fn assign(&self) {
        self.word.store(0, Ordering::Relaxed);
        self.thread.store(0, Ordering::Relaxed);
    }

    /// Records that the slot's thread, which is the caller, starts to work on requests.
    #[inline]
    pub fn begin(&self) {
        if self.thread.load(Ordering::Relaxed) == 0 {
            self.name();
        }
        self.set(BUSY);
    }

    #[cold]
    fn name(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Records that another page or request is done.
    #[inline]
    pub fn advance(&self) {
        let word = self.word.load(Ordering::Relaxed);
        self.word.store(word.wrapping_add(ONE), Ordering::Relaxed);
    }

    /// Records that the thread has no request any more.
    #[inline]
    pub fn end(&self) {
        self.set(0);
    }

    /// Marks the time of `wait`, in which the thread waits for a disk.
    #[inline]
    pub fn while_waiting<T>(&self, wait: impl FnOnce() -> T) -> T {
        let before = self.word.load(Ordering::Relaxed) & STATE;
        self.set(WAITS);
        let done = wait();
        self.set(before);
        done
    }

    #[inline]
    fn set(&self, state: u64) {
        let word = self.word.load(Ordering::Relaxed);
        self.word.store((word & !STATE).wrapping_add(ONE) | state, Ordering::Relaxed);
    }

    /// A snapshot of the slot.
    pub fn look(&self) -> Look {
        let word = self.word.load(Ordering::Relaxed);
        let state = match word & STATE {
            BUSY => State::Busy,
            WAITS => State::Waits,
            _ => State::Idle,
        };
        Look { thread: self.thread.load(Ordering::Relaxed), state, progress: word >> 2 }
    }
}

/// The slots of one server.
#[derive(Debug)]
pub struct Pulse {
    slots: Memory,
}

#[derive(Debug)]
enum Memory {
    Own(Box<[Slot]>),
    Shared(Map),
}

impl Pulse {
    /// Creates slots in private memory.
    pub fn private() -> Self {
        Self { slots: Memory::Own((0..SLOTS).map(|_| Slot::default()).collect()) }
    }

    /// Creates memory for shared slots, as a descriptor to pass on.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn file() -> io::Result<OwnedFd> {
        map::file()
    }

    /// Maps slots in memory that [`file`](Self::file) has made.
    ///
    /// # Errors
    ///
    /// The file has another length or lacks its seals; the kernel's error.
    pub fn open(file: &OwnedFd) -> io::Result<Self> {
        Ok(Self { slots: Memory::Shared(Map::new(file)?) })
    }

    /// All slots.
    #[inline]
    pub fn slots(&self) -> &[Slot] {
        match &self.slots {
            Memory::Own(slots) => slots,
            Memory::Shared(map) => map.slots(),
        }
    }

    /// The slot with this number.
    ///
    /// # Panics
    ///
    /// If `number` is not below [`SLOTS`].
    #[inline]
    pub fn slot(&self, number: usize) -> &Slot {
        &self.slots()[number]
    }

    /// Resets all slots. Call it between two servers.
    pub fn clear(&self) {
        self.slots().iter().for_each(Slot::assign);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_mapping_reads_the_writes_of_the_other() {
        let file = Pulse::file().unwrap();
        let (server, supervisor) = (Pulse::open(&file).unwrap(), Pulse::open(&file).unwrap());
        let seen = || supervisor.slot(7).look();
        assert_eq!(seen(), Look { thread: 0, state: State::Idle, progress: 0 });
        let slot = server.slot(7);
        slot.begin();
        let begun = seen();
        assert_eq!(begun.state, State::Busy);
        assert_eq!(
            begun.thread,
            u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap()
        );
        slot.advance();
        let advanced = seen();
        assert_eq!((advanced.state, advanced.thread), (State::Busy, begun.thread));
        assert!(advanced.progress > begun.progress);
        assert_eq!(slot.while_waiting(|| seen().state), State::Waits);
        assert_eq!(seen().state, State::Busy);
        slot.end();
        assert_eq!(seen().state, State::Idle);
        assert!(seen().progress > advanced.progress);
        assert_eq!(supervisor.slot(6).look().thread, 0);
        supervisor.clear();
        assert_eq!(seen(), Look { thread: 0, state: State::Idle, progress: 0 });
    }

    /// If a supervisor sees two requests only at their start, it can tell them apart.
    #[test]
    fn a_slot_that_is_busy_again_has_progressed() {
        let pulse = Pulse::private();
        pulse.slot(0).begin();
        let first = pulse.slot(0).look();
        pulse.slot(0).end();
        pulse.slot(0).begin();
        assert_ne!(pulse.slot(0).look(), first);
    }

    #[test]
    fn a_foreign_file_is_refused() {
        let other = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let error = Pulse::open(&other).unwrap_err();
        assert!(error.to_string().contains("0 bytes"), "{error}");
    }
}
