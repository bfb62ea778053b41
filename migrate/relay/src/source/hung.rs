//! A codec thread that does not return from a call of the accelerator's library.
//!
//! Its chunks are lost with it, although their bytes are not: the source VM has them. So the
//! session ends as after any failure at this end, and the VM continues at the source, or pauses in
//! postcopy. A late return changes nothing: the session takes no frame any more, and each buffer of
//! the call belongs to its thread until then.

use super::shared::{Event, Shared};
use crate::error::RelayError;
use crate::threads::spawn;
use qat::Watchdog;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The pause between two calls of the watchdog, which looks once a second.
const PAUSE: Duration = Duration::from_millis(250);

/// Starts the thread that watches the accelerator's library. It ends with the session.
pub(super) fn watch(shared: &Arc<Shared>) -> Result<(), RelayError> {
    let (session, events) = (shared.session.clone(), shared.events.clone());
    // No reference that would keep the codec threads: they end before the process does.
    let shared = Arc::downgrade(shared);
    spawn("watchdog", move || {
        let mut watchdog = Watchdog::default();
        while shared.strong_count() > 0 && session.failure().is_none() {
            if let Some(hang) = watchdog.look(Instant::now()) {
                let remedy = "repeat the migration";
                let _ = events.send(Event::Fatal(RelayError::Accelerator { hang, remedy }));
                return;
            }
            std::thread::sleep(PAUSE);
        }
    })
}
