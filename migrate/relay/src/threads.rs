//! Threads of the relays.

use crate::error::RelayError;

/// Starts a detached thread.
///
/// # Errors
/// The system has no thread to give.
pub(crate) fn spawn(
    name: &'static str,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), RelayError> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop).map_err(|source| {
        RelayError::Resource { what: format!("cannot start thread {name}"), source }
    })
}

/// Drops a delta cache on a thread of its own: the kernel takes milliseconds to unmap it, and a VM
/// may be stopped meanwhile.
pub(crate) fn drop_aside(cache: Option<impl Send + 'static>) {
    if let Some(cache) = cache {
        // Where no thread can be had, the closure is dropped here, and the cache with it.
        let _ = spawn("release", move || drop(cache));
    }
}
