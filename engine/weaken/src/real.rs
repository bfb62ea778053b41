//! Implementation of a normal build: everything is as written.

use std::sync::atomic::Ordering;

use crate::Site;

/// The ordering.
#[inline(always)]
pub fn strong<S: Site>(_: S, ordering: Ordering) -> Ordering {
    ordering
}

/// Whether to take a step.
#[inline(always)]
pub fn step<S: Site>(_: S) -> bool {
    true
}

/// A SeqCst fence.
#[inline(always)]
pub fn fence_seq_cst<S: Site>(_: S) {
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// A fence of this ordering.
#[inline(always)]
pub fn fence<S: Site>(_: S, ordering: Ordering) {
    std::sync::atomic::fence(ordering);
}
