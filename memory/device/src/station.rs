//! A station: a queue's flights, and the notification of the queue that one has finished.

use std::collections::VecDeque;
use std::io;

use ring::Ring;

use crate::flight::Flight;
use crate::sync::{fence_seq_cst, spin, step, AtomicBool, AtomicU32, Ordering, Site, Wake};

/// Shared by a queue and the workers.
pub(crate) struct Station {
    pub(crate) flights: Box<[Flight]>,
    /// Numbers of finished flights. Has room for all.
    done: Ring<u16>,
    /// Whether the queue's thread sleeps or is about to. The thread that clears it sets `wake`.
    armed: AtomicBool,
    wake: Wake,
    /// Whether the queue, since it armed itself, has seen that a worker cleared `armed`. Used by
    /// the queue only.
    looked: AtomicBool,
    /// How often `wake` was set, or is about to be, since it was cleared. Used by the queue only.
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

    /// Notifies the queue that a flight has finished. For workers.
    pub(crate) fn finish(&self, flight: u16) {
        self.put(flight);
        self.notify();
    }

    /// Adds a finished flight; the caller has to [`notify`](Self::notify) the queue.
    pub(crate) fn put(&self, flight: u16) {
        let mut flight = flight;
        while let Err(back) = self.done.push(flight) {
            // Another thread is just emptying the cell.
            flight = back;
            spin();
        }
    }

    /// Wakes the queue's thread after a [`put`](Self::put), if it sleeps.
    pub(crate) fn notify(&self) {
        // Pairs with the fence in `arm`: either we see that the queue is armed, or it sees the
        // flight.
        fence_seq_cst(Site::FinishFence);
        if self.armed.load(Ordering::Relaxed)
            && self.armed.swap(false, Ordering::Relaxed)
            && step(Site::Wakes)
        {
            self.wake.set();
        }
    }

    /// Takes a finished flight. For the queue.
    #[inline]
    pub(crate) fn done(&self) -> Option<u16> {
        self.done.pop()
    }

    /// Arms the queue before it sleeps; called by the queue. Returns `false` if a flight has
    /// finished, which is in `early` then.
    pub(crate) fn arm(&self, early: &mut VecDeque<u16>) -> bool {
        self.disarm();
        let set = self.set.load(Ordering::Relaxed);
        if set > 0 {
            // The code below looks at the flights that it announces. A thread that has yet to set
            // it causes a spurious wake-up.
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

    /// Disarms the queue after its sleep.
    pub(crate) fn disarm(&self) {
        // An exchange sees whether a worker has cleared it, and exactly that worker sets `wake`. So
        // a queue that was not woken needs no system call to clear `wake`.
        let taken = !self.armed.swap(false, Ordering::Relaxed);
        if taken && !self.looked.load(Ordering::Relaxed) {
            let set = self.set.load(Ordering::Relaxed);
            self.set.store(set + 1, Ordering::Relaxed);
        }
        self.looked.store(true, Ordering::Relaxed);
    }

    /// The event to sleep on.
    pub(crate) fn wake(&self) -> &Wake {
        &self.wake
    }
}
