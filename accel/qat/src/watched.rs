//! Work that may never return from a call of the library, and its wait.

use crate::watchdog::{Hang, Watchdog};
use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// The pause between two calls of the watchdog, which looks once a second.
const PAUSE: Duration = Duration::from_millis(250);

/// Why [`watched`] has no result.
#[derive(Debug, thiserror::Error)]
pub enum Unfinished {
    /// A call of the library does not return.
    #[error(transparent)]
    Hang(#[from] Hang),
    /// The system refuses the thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}

/// Does `work` on a thread of its own, and waits for it until a call of the library in this process
/// hangs. For work that opens engines: the calls that open a device may hang as any other. The
/// thread is then left behind, with all that `work` owns.
///
/// # Errors
///
/// [`Unfinished`]; the work may still be going on.
///
/// # Panics
///
/// If `work` panics.
pub fn watched<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Unfinished> {
    let (sender, receiver) = mpsc::channel();
    let body = move || {
        // Nobody waits for a result that is this late.
        let _ = sender.send(work());
    };
    let thread = Builder::new().name("qat-open".into()).spawn(body).map_err(Unfinished::Thread)?;
    let mut watchdog = Watchdog::default();
    loop {
        match receiver.recv_timeout(PAUSE) {
            Ok(done) => return Ok(done),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(hang) = watchdog.look(Instant::now()) {
                    return Err(hang.into());
                }
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => resume_unwind(panic),
                Ok(()) => unreachable!("it has sent its result"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_ends_has_its_result_or_its_panic() {
        assert_eq!(watched(|| 7).unwrap(), 7);
        let panic = std::panic::catch_unwind(|| watched(|| std::panic::panic_any(8_i32)));
        assert_eq!(panic.unwrap_err().downcast_ref(), Some(&8_i32));
    }
}
