//! The end of a process in which a call never came back.

#![expect(unsafe_code, reason = "ends the process past its exit handlers")]

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// A call was given up: its thread is in the library until the process ends.
static STUCK: AtomicBool = AtomicBool::new(false);

pub(crate) fn stuck() {
    STUCK.store(true, Ordering::Relaxed);
}

/// Ends the process with `status` if a call was given up; otherwise returns. For the end of `main`:
/// exit handlers of QATzip and libqat would take down what that call still uses, and the process
/// would end by SIGSEGV after all had gone well.
pub fn end_process_if_stuck(status: u8) {
    if STUCK.load(Ordering::Relaxed) {
        let _ = std::io::stdout().flush();
        // SAFETY: ends the process; no memory is touched any more.
        unsafe { libc::_exit(i32::from(status)) }
    }
}
