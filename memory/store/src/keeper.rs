//! The keeper: a thread that allocates memory before it is needed, and frees memory that is not
//! needed.
//!
//! A worker that needs a slab takes a ready one, so that it never asks the kernel for memory: under
//! memory pressure the kernel might find some only by writing to this very store. The keeper asks
//! instead, for slabs of the lengths in demand. It is woken when half of the ready slabs of a
//! length are taken, and when far more than needed are ready (swapoff waits for freed memory, so it
//! goes back at once). It also looks once a second, and then runs compaction if that frees enough.
//!
//! While the machine is short of memory, unused ready pages are taken from the processes whose
//! pages this store holds. The reserve then shrinks, by half in a second, to the pages that writes
//! took in the last half second, and [`LEAST`] at least. It does not shrink at once: the first
//! writes come when memory runs out, from all CPUs and of all lengths, and the kernel has nothing
//! to give at that moment. The reserve grows back when memory is free again.

mod ready;

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::available::Available;
use crate::class::LENGTHS;
use crate::compact::Compacted;
use crate::heap::Heap;
use crate::layout::PAGE;
use crate::stats::sum;
use crate::store::Store;
use crate::sync::{AtomicU32, Ordering};

/// How often the keeper looks without being woken.
const PERIOD: Duration = Duration::from_secs(1);

/// Compaction starts when it frees at least this fraction of the memory used.
const WORTH: u64 = 256;

/// The same fraction for a large store, and the pages that suffice where this fraction is less. A
/// pass looks at some of the slabs of a class: however much is unused, it may not free
/// 1/[`WORTH`].
const WORTH_LARGE: u64 = 4096;
const ENOUGH: u64 = 1024;

/// The pages that a pass of compaction must free, with `used` pages of memory.
fn worth(used: u64) -> u64 {
    (used / WORTH).min(ENOUGH.max(used / WORTH_LARGE)).max(1)
}

/// After a pass of compaction the keeper begins no other one for this many times the time that the
/// pass took. A pass looks at the whole table, which takes seconds in a large store, and the keeper
/// may have real-time priority: while pages change there is always enough to compact, and it would
/// keep a CPU for itself.
const REST: u32 = 3;

/// The reserve in pages while memory is short and nothing is written: 1 MiB, the compressed pages
/// of some 600 writes. The keeper allocates the next pages in less time than such writes take.
const LEAST: u64 = 256;

/// How often the keeper asks the kernel whether memory is short.
const ASK: Duration = Duration::from_millis(200);

/// The reserve that remains while memory is short and nothing is written, after `passed`: an eighth
/// less each [`ASK`].
fn decayed(reserve: u64, passed: Duration) -> u64 {
    let steps = (passed.as_millis() / ASK.as_millis()).min(100);
    (0..steps).fold(reserve, |reserve, _| reserve - reserve.div_ceil(8))
}

/// Table entries that compaction handles before the keeper looks at its other work.
const STEP: u64 = 8192;

/// The keeper of one store. Dropping it ends the thread; workers of a store without a keeper ask
/// the kernel for memory themselves.
#[derive(Debug)]
pub struct Keeper {
    store: Arc<Store>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The keeper's state between two looks.
#[derive(Debug)]
struct Memory {
    /// Slabs taken of each length, decaying by a quarter each second.
    demand: [u32; LENGTHS],
    /// Objects freed when the gain of compaction was last estimated; `None` to estimate it again.
    freed: Option<u64>,
    compacting: bool,
    /// When the last pass of compaction began, and before when no other one begins.
    begun: Instant,
    rest: Instant,
    looked: Instant,
    /// The kernel does not take memory back: the keeper retries once a second only.
    stuck: bool,
    /// The next region to map, of those that another server left.
    warm: Option<u32>,
    /// Asks the kernel how much memory there is.
    available: Available,
    asked: Instant,
    /// The reserve in pages without the demand of writes: less and less while memory is short.
    reserve: u64,
}

impl Memory {
    fn new(store: &Store, available: Available) -> Self {
        Self {
            demand: [0; LENGTHS],
            freed: Some(0),
            compacting: false,
            begun: Instant::now(),
            rest: Instant::now(),
            looked: Instant::now(),
            stuck: false,
            warm: Some(0),
            available,
            asked: Instant::now(),
            reserve: store.options.reserve / PAGE as u64,
        }
    }
}

impl Keeper {
    /// The thread's name.
    pub const THREAD: &'static str = "store-keeper";

    /// Starts the thread, and returns when the first slabs of each length are ready.
    ///
    /// # Errors
    ///
    /// The kernel's error, if it cannot make a thread.
    pub fn start(store: &Arc<Store>) -> io::Result<Self> {
        Self::start_in(store, || ())
    }

    /// As [`start`](Self::start). The thread calls `enter` and holds the value while it works: a
    /// guard can check that the thread allocates nothing but the store's memory.
    ///
    /// # Errors
    ///
    /// The kernel's error, if it cannot make a thread.
    pub fn start_in<G>(
        store: &Arc<Store>,
        enter: impl FnOnce() -> G + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_on(store, enter, Available::new())
    }

    fn start_on<G>(
        store: &Arc<Store>,
        enter: impl FnOnce() -> G + Send + 'static,
        available: Available,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut memory = Memory::new(store, available);
        store.look(&mut memory);
        store.stock(&memory.demand);
        // The first wait of a process asks for the number of its CPUs, which allocates: do it here,
        // and not when a worker first waits.
        let _ = store.heap.room.wait_until(Some(Instant::now()), || None::<()>);
        let (counted, stopped) = (Counted::new(store), Arc::clone(&stop));
        let thread = thread::Builder::new().name(Self::THREAD.to_owned()).spawn(move || {
            let kept = &counted.0;
            kept.heap.asks.enter();
            // As above, for this thread's own first wait.
            let _ = kept.heap.work.wait_until(Some(Instant::now()), || None::<()>);
            let _held = enter();
            while !stopped.load(std::sync::atomic::Ordering::Acquire) {
                let busy = kept.tend(&mut memory);
                if !busy {
                    let deadline = Instant::now() + PERIOD;
                    let woken = || {
                        let stop = stopped.load(std::sync::atomic::Ordering::Acquire);
                        (stop || kept.has_work(memory.stuck)).then_some(())
                    };
                    kept.heap.work.wait_until(Some(deadline), woken);
                }
            }
        })?;
        Ok(Self { store: Arc::clone(store), stop, thread: Some(thread) })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Release);
        self.store.heap.work.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the keeper has ended the process, or was reported already.
            let _ = thread.join();
        }
    }
}

/// A keeper that workers wait for: the thread has this value, also if it ends by a panic.
struct Counted(Arc<Store>);

impl Counted {
    fn new(store: &Arc<Store>) -> Self {
        store.heap.keepers.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(store))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // From now on workers ask the kernel; those that wait for the keeper are woken and try
        // again.
        self.0.heap.keepers.fetch_sub(1, Ordering::Relaxed);
        self.0.heap.room.notify_all();
    }
}

impl Store {
    fn has_work(&self, stuck: bool) -> bool {
        let some =
            |counts: &[AtomicU32]| counts.iter().any(|count| count.load(Ordering::Relaxed) > 0);
        some(std::slice::from_ref(&self.heap.is_low))
            || self.some_wait()
            || !stuck && self.heap.regions.ready() > self.plenty()
    }

    /// Whether the machine is short of memory, as a [`Keeper`] last saw it: less than a 16th of the
    /// machine's memory plus the reserve is available. `false` without a keeper, and if the kernel
    /// does not report the memory.
    pub fn is_short(&self) -> bool {
        self.heap.short.load(Ordering::Relaxed)
    }

    /// Whether a write of a page that does not compress must fail: see
    /// [`Options::whole_part`](crate::Options::whole_part).
    pub(crate) fn refuses_whole(&self) -> bool {
        let limit = self.heap.regions.limit();
        let part = self.options.whole_part;
        if part == 0 || limit == u64::MAX || self.refusals.is_off() || !self.is_short() {
            return false;
        }
        let pages = sum(&self.counters, |c| &c.pages);
        let huge = sum(&self.counters, |c| &c.huge);
        let backed = sum(&self.counters, |c| &c.backed);
        // The counters need not agree exactly.
        let smaller = pages.saturating_sub(huge.saturating_add(backed));
        huge >= smaller.saturating_add(limit / part) && self.refusals.ask()
    }

    fn look(&self, memory: &mut Memory) {
        let passed = memory.asked.elapsed();
        memory.asked = Instant::now();
        let was_short = self.is_short();
        let short = |(total, free)| free < total / 16 + self.options.reserve;
        self.heap.short.store(memory.available.look().is_some_and(short), Ordering::Relaxed);
        self.refusals.allow(sum(&self.counters, |c| &c.stored));
        memory.reserve = match (was_short, self.is_short()) {
            (true, true) => decayed(memory.reserve, passed),
            _ => self.options.reserve / PAGE as u64,
        };
        self.set_reserve(memory);
    }

    /// Sets the target of ready pages.
    fn set_reserve(&self, memory: &Memory) {
        let whole = self.options.reserve / PAGE as u64;
        let reserve = if self.is_short() {
            // `demand` covers about four seconds.
            let pages = |(pages, demand): (u64, &u32)| pages * u64::from(*demand);
            let taken: u64 = (0..).zip(&memory.demand).map(pages).sum();
            whole.min(LEAST.max(taken / 8).max(memory.reserve))
        } else {
            whole
        };
        self.heap.reserve.store(reserve, Ordering::Relaxed);
    }

    /// Does the pending work. Returns whether there is more to do at once.
    fn tend(&self, memory: &mut Memory) -> bool {
        // Reset before looking: a length that runs low from here on wakes the keeper again.
        self.heap.is_low.store(0, Ordering::Relaxed);
        for (demand, taken) in memory.demand.iter_mut().zip(&self.heap.taken) {
            *demand = demand.saturating_add(taken.swap(0, Ordering::Relaxed));
        }
        self.serve_waiting();
        if memory.asked.elapsed() >= ASK {
            self.look(memory);
        }
        self.set_reserve(memory);
        self.stock(&memory.demand);
        let period = memory.looked.elapsed() >= PERIOD;
        if period || !memory.stuck && self.heap.regions.ready() > self.plenty() {
            memory.stuck = !self.release_surplus(&memory.demand);
        }
        if period {
            memory.looked = Instant::now();
            for demand in &mut memory.demand {
                *demand -= *demand / 4;
            }
            self.trim_records();
            let freed = sum(&self.counters, |c| &c.freed);
            // If nothing was freed, there is nothing new to compact.
            let may_begin = !memory.compacting && memory.looked >= memory.rest;
            if may_begin && memory.freed != Some(freed) {
                memory.freed = Some(freed);
                memory.compacting = self.compactable() >= worth(self.heap.regions.used());
                memory.begun = memory.looked;
            }
        }
        if memory.compacting {
            let used = self.heap.regions.used();
            let step = self.compact_step(STEP);
            memory.compacting = matches!(step, Compacted::More);
            if !memory.compacting {
                memory.rest = Instant::now() + memory.begun.elapsed() * REST;
            }
            if matches!(step, Compacted::Pages(pages) if pages >= worth(used)) {
                // The next pass finds as much in other slabs, also if nothing is freed meanwhile.
                memory.freed = None;
            }
        }
        if let Some(region) = memory.warm {
            let Heap { regions, map, asks, .. } = &self.heap;
            memory.warm = regions.warm(map, region, asks).then_some(region + 1);
        }
        memory.compacting || memory.warm.is_some()
    }
}

#[cfg(test)]
mod tests;
