//! The policy for idle pages: they are recompressed by a stronger codec, in groups of neighbours,
//! or written back to a disk.
//!
//! ```text
//!  entries of the table: age, codec               the store, beside clients that read and write
//!        │ each period: age + 1                            ▲
//!        ▼                                                 │ replace, if unchanged since it was
//!        read
//!  sweep: idle neighbours ── read, decode ── compress together, outside of the store
//!        ▲
//!        │ sooner and faster while memory is short
//!  pressure stall information
//! ```
//!
//! Each period increments the age of every page; a client's read or write resets it, in the one
//! compare-and-swap that it needs anyway. Idle pages that are near each other are compressed
//! together, because most of what a strong codec finds is redundancy between pages. A page without
//! idle neighbours is recompressed alone. A page that was read is taken out of its group in the
//! next pass; when most pages of a group are gone, so are the others. A page that does not get
//! smaller is marked, and not tried again until it is written.
//!
//! If there is a backing device, pages that did not get smaller and pages that are idle for long
//! are written back: in batches, by this same thread, while memory is short, within the daily
//! limit, and as long as the file system has room. In a store without room for a mark, the policy
//! itself tries whether an old page compresses. Reading such a page does not bring it back to
//! memory, as in zram.
//!
//! # Guarantees
//!
//! The policy delays a client's thread at most by the comparison of one page with what was read of
//! it (no lock, no compression while a page is pinned). It never uses the keeper's reserve for
//! writes. It allocates nothing after its start: on a device that is swapped to, a thread that
//! allocates may wait for itself. It uses a limited share of one CPU.
//!
//! # Errors
//!
//! [`SettingsError`] and [`StartError`] at the start, and no errors later. If no memory can be
//! spared, a group is postponed ([`PolicyStats::no_room`]). A page that cannot be read is skipped
//! ([`PolicyStats::damaged`]); the client that reads it gets the error. Without pressure stall
//! information memory is never short. After a failed write, writeback stops until
//! [`Policy::write_back`]; pages that are not on the device are still in memory.
//!
//! # Limits
//!
//! Groups have up to 32 pages and 28 KiB. A group has its memory until half of its pages are gone
//! and a pass has found that. Ages have three bits: at most 7 periods.

mod channel;
mod error;
mod heap;
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
pub use heap::{memory, writeback_memory};
pub use requests::{AskError, Asked, Outcome};
pub use settings::{Pressure, Settings, SettingsError};
pub use stats::{Field, PolicyStats};
pub use sweep::Step;
pub use thread::Policy;
pub use trainer::train;
pub use training::Trainer;
pub use writeback::What;

/// Parses a pressure stall file, in hundredths of a per cent: for the fuzz target.
#[doc(hidden)]
pub fn stalled(text: &[u8]) -> Option<u32> {
    pressure::average(text)
}

/// The policy without its thread, for callers that decide when and how fast it works, such as
/// benchmarks.
#[derive(Debug)]
pub struct Passes {
    sweep: sweep::Sweep,
    back: Option<writeback::WriteBack>,
    counters: Arc<stats::Counters>,
}

impl Passes {
    /// Creates a policy for one thread.
    ///
    /// # Errors
    ///
    /// The errors of [`Policy::start`].
    pub fn new(store: &Arc<Store>, settings: &Settings) -> Result<Self, StartError> {
        let counters = Arc::new(stats::Counters::default());
        let worker = store.worker().ok_or(StartError::Full)?;
        let sweep = sweep::Sweep::new(worker, settings, &counters)?;
        let back = writeback::WriteBack::new(store, settings, &counters)?;
        Ok(Self { sweep, back, counters })
    }

    /// One step of writeback of these pages; returns whether the pass continues. Does nothing
    /// without a backing device.
    pub fn write_back(&mut self, what: What) -> bool {
        self.back.as_mut().is_some_and(|back| back.step(writeback::Wanted::Asked(what)))
    }

    /// Increments the age of all pages.
    pub fn grow_older(&self) {
        self.sweep.grow_older(0, u64::MAX);
    }

    /// One step of a pass over the pages that are at least `idle` periods old.
    pub fn step(&mut self, idle: u8) -> Step {
        self.sweep.step(idle)
    }

    /// The counters.
    pub fn stats(&self) -> PolicyStats {
        self.counters.stats()
    }
}
