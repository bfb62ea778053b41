//! What becomes of pages that nobody touches: recompressed by a stronger codec, in groups of
//! neighbours, or written back to a disk.
//!
//! ```text
//!  entries of the table: age, codec               the store, beside clients that read and write
//!        │ each period: one older                          ▲
//!        ▼                                                 │ exchange, if it is what was read
//!  sweep: idle neighbours ── read, decode ── compress as one, outside of the store
//!        ▲
//!        │ sooner and faster while memory is short
//!  pressure stall information
//! ```
//!
//! A page gets one period older each period (a client's read or write makes it young, in the one
//! compare-and-swap that it costs anyway). Idle pages that are near each other are compressed as
//! one: what single pages of 4 KiB have in common is most of what a strong codec finds. A lonely
//! one is compressed again by itself. A page that is read in its group leaves it at the next pass,
//! and so do all when most have left. What did not get smaller is marked, and not tried again until
//! it is written.
//!
//! What did not get smaller, and what is idle for long, is written back, if there is a backing
//! device: in batches, by this same thread, while memory is short, within the day's budget and as
//! long as its file system has room. Pages that are read there stay there, as zram's do.
//!
//! # What it may not do
//!
//! It never makes a client's thread wait for more than the comparison of one page with what was
//! read of it (no lock, no compression while a page is pinned), never uses memory that the keeper
//! has ready for writes, and allocates nothing once it runs: on a device that is swapped to, a
//! thread that asks for memory may wait for itself. It uses so many per cent of one CPU.
//!
//! # What fails
//!
//! [`SettingsError`] and [`StartError`] at the start, and nothing later: without memory to spare a group is put
//! off ([`PolicyStats::no_room`]); a page that cannot be read is left ([`PolicyStats::damaged`])
//! for the client that reads it; without pressure stall information memory is never short. A write
//! that fails ends writing back until somebody asks for it ([`Policy::write_back`]); what is not on
//! the device is in memory.
//!
//! # Limits
//!
//! Groups have up to 32 pages and 28 KiB. A group keeps its memory until half of its pages have
//! left and a pass has come by. Ages are three bits: a page is at most 7 periods old.

mod channel;
mod error;
mod pressure;
mod requests;
mod settings;
mod stats;
mod sweep;
mod thread;
mod trainer;
mod training;
#[cfg(test)]
mod training_tests;
mod writeback;

use std::sync::Arc;

use store::Store;

pub use error::StartError;
pub use requests::{AskError, Asked, Outcome};
pub use settings::{Pressure, Settings, SettingsError};
pub use stats::{Field, PolicyStats};
pub use sweep::Step;
pub use thread::Policy;
pub use trainer::train;
pub use training::Trainer;
pub use writeback::What;

/// What a pressure stall file says, as hundredths of a per cent: for the fuzz target.
#[doc(hidden)]
pub fn stalled(text: &[u8]) -> Option<u32> {
    pressure::average(text)
}

/// The policy without its thread: for who decides himself when and how fast, as benchmarks do.
#[derive(Debug)]
pub struct Passes {
    sweep: sweep::Sweep,
    back: Option<writeback::WriteBack>,
    counters: Arc<stats::Counters>,
}

impl Passes {
    /// For one thread.
    ///
    /// # Errors
    ///
    /// As [`Policy::start`].
    pub fn new(store: &Arc<Store>, settings: &Settings) -> Result<Self, StartError> {
        let counters = Arc::new(stats::Counters::default());
        let worker = store.worker().ok_or(StartError::Full)?;
        let sweep = sweep::Sweep::new(worker, settings, &counters)?;
        let back = writeback::WriteBack::new(store, settings, &counters)?;
        Ok(Self { sweep, back, counters })
    }

    /// One step of writing such pages back; whether the pass goes on. Nothing without a backing
    /// device.
    pub fn write_back(&mut self, what: What) -> bool {
        self.back.as_mut().is_some_and(|back| back.step(writeback::Wanted::Asked(what)))
    }

    /// Makes all pages one period older.
    pub fn grow_older(&self) {
        self.sweep.grow_older(0, u64::MAX);
    }

    /// One step of a pass over the pages that are at least `idle` periods old.
    pub fn step(&mut self, idle: u8) -> Step {
        self.sweep.step(idle)
    }

    /// What was done.
    pub fn stats(&self) -> PolicyStats {
        self.counters.stats()
    }
}
