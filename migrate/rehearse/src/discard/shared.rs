//! The state that the discarding end and its thread share: the counts, and how far the thread may
//! read.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Counts of the stream so far. Pages of zeros are not data.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Pages.
    pub pages: u64,
    /// Pages with data.
    pub data_pages: u64,
    /// Of these, pages of the first pass.
    pub first_data_pages: u64,
    /// All pages of the first pass.
    pub first_pages: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// Pages before the pace of the first pass began.
    pub unpaced: Option<u64>,
    /// Pages with data per second while nothing made QEMU wait: the highest rate over some time.
    pub fastest: Option<f64>,
    /// Whether the connection has ended.
    pub has_ended: bool,
}

#[derive(Debug)]
pub(super) struct State {
    /// The number of pages that may be read, counted from the start.
    pub(super) allowed: u64,
    /// Pages of the first pass; `u64::MAX` before it.
    pub(super) first: u64,
    /// Pages of the first pass per second.
    pub(super) rate: f64,
    pub(super) stop: bool,
    pub(super) totals: Totals,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}
