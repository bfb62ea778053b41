//! Threads of the relays.

use crate::error::RelayError;
use qat::{Qat, Unfinished};
use std::sync::Arc;
use std::time::Duration;

/// How long codec threads with an accelerator may take to end: a call of its library may never
/// return.
pub(crate) const CODEC_END: Duration = Duration::from_secs(5);

/// Starts a detached thread.
///
/// # Errors
/// The system refuses the thread.
pub(crate) fn spawn(
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), RelayError> {
    #[cfg(test)]
    refusals::check(name)?;
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop).map_err(|source| {
        RelayError::Resource { what: format!("cannot start thread {name}"), source }
    })
}

/// Drops a delta cache on a separate thread: the kernel takes milliseconds to unmap the cache, and
/// a VM may be stopped meanwhile.
pub(crate) fn drop_aside(cache: Option<impl Send + 'static>) {
    if let Some(cache) = cache {
        run_aside(move || drop(cache));
    }
}

/// The same for a cache that others still hold: `free` frees its memory.
pub(crate) fn run_aside(free: impl FnOnce() + Send + 'static) {
    // If the system refuses the thread, the closure is dropped here: a cache that nobody else holds
    // is freed now, any other at the end of the session.
    let _ = spawn("release", free);
}

/// Makes the contexts of codec threads by `make`. With a device this takes a thread of its own: the
/// calls that open a device may never return.
///
/// # Errors
/// Such a call; the system refuses the thread.
pub(crate) fn open_devices<T: Send + 'static>(
    device: Option<&Arc<Qat>>,
    remedy: &'static str,
    make: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RelayError> {
    if device.is_none() {
        return Ok(make());
    }
    qat::watched(make).map_err(|error| match error {
        Unfinished::Hang(hang) => RelayError::Accelerator { hang, remedy },
        Unfinished::Thread(source) => RelayError::Resource {
            what: "cannot start the thread that opens the accelerator".into(),
            source,
        },
    })
}

/// Checks whether the codec threads have the device that the user requires. `on_device`: for each
/// thread whose codec has a device.
///
/// # Errors
/// None of them has it.
pub(crate) fn check_engines(
    device: Option<&Arc<Qat>>,
    on_device: impl Iterator<Item = bool>,
) -> Result<(), RelayError> {
    let on_device: Vec<bool> = on_device.collect();
    let Some(device) = device.filter(|_| !on_device.is_empty()) else { return Ok(()) };
    device
        .check_engines(on_device.contains(&true))
        .map_err(|error| RelayError::Unsupported { what: error.to_string() })
}

/// A shortage of threads, for tests.
#[cfg(test)]
pub(crate) mod refusals {
    use super::RelayError;
    use std::cell::Cell;
    use std::io;

    thread_local! {
        /// How many threads the system still refuses to the thread that reads this.
        pub(crate) static LEFT: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn check(name: &str) -> Result<(), RelayError> {
        let left = LEFT.get();
        if left == 0 {
            return Ok(());
        }
        LEFT.set(left - 1);
        let source = io::Error::from_raw_os_error(rustix::io::Errno::AGAIN.raw_os_error());
        Err(RelayError::Resource { what: format!("cannot start thread {name}"), source })
    }
}
