//! Interrupts: SIGINT, SIGTERM and SIGHUP.

use crate::leave;
use anyhow::Context;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;

/// Whether the work of this process has succeeded, and an interrupt ends it.
static DONE: AtomicBool = AtomicBool::new(false);

/// Lets each interrupt from now on end this process, with exit status 0: its work has succeeded,
/// and the rest is not needed.
pub(crate) fn end_at_once() {
    DONE.store(true, Ordering::Release);
}

/// Ends this process if [`end_at_once`] was called.
pub(crate) fn end_if_done() {
    if DONE.load(Ordering::Acquire) {
        leave::now(0);
    }
}

/// Counts the interrupts from now on, instead of ending this process.
///
/// # Errors
/// The kernel's, or another part of this process handles them already.
pub(crate) fn counted() -> anyhow::Result<Arc<AtomicU32>> {
    let interrupts = Arc::new(AtomicU32::new(0));
    let counted = interrupts.clone();
    ctrlc::set_handler(move || {
        end_if_done();
        counted.fetch_add(1, Ordering::AcqRel);
    })
    .context("cannot handle signals")?;
    Ok(interrupts)
}

/// Sets the flag at the first interrupt, instead of ending this process.
///
/// # Errors
/// Those of [`counted`].
pub(crate) fn noticed() -> anyhow::Result<Arc<AtomicBool>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    ctrlc::set_handler(move || flag.store(true, Ordering::Release))
        .context("cannot handle signals")?;
    Ok(interrupted)
}
