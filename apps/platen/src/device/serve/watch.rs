//! A thread that checks the device and the kernel's NBD client once a second.

use super::supervisor::swapped_to;
use crate::device::claims::Left;
use crate::say::{say, say_untaken};
use device::Device;
use nbd::Server;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The kernel's NBD client.
pub(super) struct Client {
    pub(super) disk: String,
    pub(super) nbd: Arc<Server<Device>>,
    pub(super) stopping: Arc<AtomicBool>,
}

impl Client {
    /// Whether the client has dropped a connection needed for swapping. The client does so when a
    /// request times out, submits the request on another connection, and does not reconnect.
    fn is_lost(&self) -> bool {
        self.nbd.kernel_ended() > 0
            && !self.stopping.load(Ordering::Acquire)
            && swapped_to(&self.disk)
    }
}

/// Prints the first damage that an I/O thread finds, because I/O threads do not print, and each
/// removed socket of the device. Exits when the kernel's client is lost: only a new server gives it
/// new connections, and nothing completes the requests on the old ones.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(
        device: &Arc<Device>,
        client: Option<Client>,
        sockets: Left,
    ) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (device, stopped) = (Arc::downgrade(device), Arc::clone(&stop));
        let thread = thread::Builder::new().name("watch".into()).spawn(move || {
            if client.is_some() {
                // No page is swapped out until this thread has found the client lost, for which the
                // kernel needs some memory.
                say_untaken(swap::prefer_alone().err());
            }
            let mut told = false;
            let mut missing = Vec::new();
            while !stopped.load(Ordering::Acquire) {
                thread::park_timeout(Duration::from_secs(1));
                // First: the file system of a socket's path may not answer.
                if let Some(client) = client.as_ref().filter(|client| client.is_lost()) {
                    say(&format!("the kernel has given up a connection of {}", client.disk));
                    std::process::exit(swap::supervisor::CLIENT_LOST.into());
                }
                let before = std::mem::replace(&mut missing, sockets.missing().collect());
                for path in missing.iter().filter(|path| !before.contains(path)) {
                    say(&format!(
                        "{} was removed or replaced: no client finds the device by it until the \
                         device is started anew",
                        path.display()
                    ));
                }
                let Some(device) = device.upgrade() else { return };
                if let Some(damage) = device.damage().filter(|_| !told) {
                    told = true;
                    say(&format!("{damage}; failed reads are counted in `platen device stat`"));
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The panic handler has reported a panic.
            let _ = thread.join();
        }
    }
}
