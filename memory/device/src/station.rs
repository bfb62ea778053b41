//! What a queue shares with the workers: flights, and how it hears that one is finished.

use std::collections::VecDeque;
use std::io;

use ring::Ring;

use crate::flight::Flight;
use crate::sync::{fence_seq_cst, spin, step, AtomicBool, AtomicU32, Ordering, Site, Wake};

/// What a queue shares with the workers.
pub(crate) struct Station {
    pub(crate) flights: Box<[Flight]>,
    /// Numbers of flights that workers have finished. Has room for all.
    done: Ring<u16>,
    /// Whether the queue's thread sleeps, or is about to. Who takes it back sets `wake`.
    armed: AtomicBool,
    wake: Wake,
    /// The queue has armed itself, and not looked since who took that back. Its own.
    looked: AtomicBool,
    /// Times that `wake` was set, or is about to be, and was not cleared. The queue's own.
    set: AtomicU32,
}

impl Station {
    pub(crate) fn new(depth: u16) -> io::Result<Self> {
        Ok(Self {
            flights: (0..depth).map(|_| Flight::new()).collect(),
            done: Ring::new(usize::from(depth)),
            armed: AtomicBool::new(false),
            wake: Wake::new()?,
            looked: AtomicBool::new(true),
            set: AtomicU32::new(0),
        })
    }

    /// Tells the queue that a flight is finished. For workers.
    pub(crate) fn finish(&self, flight: u16) {
        self.put(flight);
        self.notify();
    }

    /// A flight is finished; the queue is to be [notified](Self::notify) of it.
    pub(crate) fn put(&self, flight: u16) {
        let mut flight = flight;
        while let Err(back) = self.done.push(flight) {
            // The cell that it needs is being emptied just now.
            flight = back;
            spin();
        }
    }

    /// Wakes the queue's thread for what was [`put`](Self::put), if it sleeps.
    pub(crate) fn notify(&self) {
        // Pairs with the fence in `arm`: either we see that it is armed, or it sees the flight.
        fence_seq_cst(Site::FinishFence);
        if self.armed.load(Ordering::Relaxed)
            && self.armed.swap(false, Ordering::Relaxed)
            && step(Site::Wakes)
        {
            self.wake.set();
        }
    }

    /// A flight that is finished. For the queue.
    #[inline]
    pub(crate) fn done(&self) -> Option<u16> {
        self.done.pop()
    }

    /// For the queue, before it sleeps: `false` if a flight is finished, which is in `early` then.
    pub(crate) fn arm(&self, early: &mut VecDeque<u16>) -> bool {
        self.disarm();
        let set = self.set.load(Ordering::Relaxed);
        if set > 0 {
            // What it says is looked at below. A thread that is yet to set it wakes us for nothing.
            self.set.store(set - self.wake.clear(), Ordering::Relaxed);
        }
        self.looked.store(false, Ordering::Relaxed);
        self.armed.store(true, Ordering::Relaxed);
        // Pairs with the fence in `notify`.
        fence_seq_cst(Site::ArmFence);
        if early.is_empty() {
            early.extend(self.done.pop());
        }
        if !early.is_empty() {
            self.disarm();
        }
        early.is_empty()
    }

    /// The queue sleeps no more.
    pub(crate) fn disarm(&self) {
        // An exchange, which cannot miss that a worker has taken it back: exactly that worker sets
        // `wake`, so that a queue which nobody wakes needs no system call to clear it.
        let taken = !self.armed.swap(false, Ordering::Relaxed);
        if taken && !self.looked.load(Ordering::Relaxed) {
            let set = self.set.load(Ordering::Relaxed);
            self.set.store(set + 1, Ordering::Relaxed);
        }
        self.looked.store(true, Ordering::Relaxed);
    }

    /// What to sleep on.
    pub(crate) fn wake(&self) -> &Wake {
        &self.wake
    }
}
