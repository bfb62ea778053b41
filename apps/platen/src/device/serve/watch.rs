//! A thread that checks the device and the kernel's NBD client once a second, and one that checks
//! the files of the device.

use super::supervisor::swapped_to;
use crate::device::claims::Left;
use crate::say::{say, say_untaken, STACK};
use device::Device;
use nbd::Server;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The time between two looks.
const LOOK: Duration = Duration::from_secs(1);

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
        let device = Arc::downgrade(device);
        let (mut begun, mut told) = (false, false);
        let look = move || {
            if client.is_some() && !std::mem::replace(&mut begun, true) {
                // No page is swapped out until this thread has found the client lost, for which the
                // kernel needs some memory.
                say_untaken(swap::prefer_alone().err());
            }
            if let Some(client) = client.as_ref().filter(|client| client.is_lost()) {
                say(&format!("the kernel has given up a connection of {}", client.disk));
                std::process::exit(swap::supervisor::CLIENT_LOST.into());
            }
            let Some(device) = device.upgrade() else { return false };
            if let Some(damage) = device.damage().filter(|_| !told) {
                told = true;
                say(&format!("{damage}; failed reads are counted in `platen device stat`"));
            }
            true
        };
        Self::begin(look, move || sockets.missing().map(Path::to_owned).collect())
    }

    /// Calls `look` once a second while it returns true, and `missing` on another thread: the file
    /// system of a socket's path may not answer.
    fn begin(
        mut look: impl FnMut() -> bool + Send + 'static,
        missing: impl FnMut() -> Vec<PathBuf> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        // Nobody waits for its end.
        let files = thread::Builder::new().name("files".into()).stack_size(STACK);
        files.spawn(move || report(missing, &stopped))?;
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new().name("watch".into()).spawn(move || {
            while !stopped.load(Ordering::Acquire) && look() {
                thread::park_timeout(LOOK);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

/// Prints the files that are missing, each when it is found to be.
fn report(mut missing: impl FnMut() -> Vec<PathBuf>, stopped: &AtomicBool) {
    let mut before = Vec::new();
    while !stopped.load(Ordering::Acquire) {
        let now = missing();
        for path in now.iter().filter(|path| !before.contains(*path)) {
            say(&format!(
                "{} was removed or replaced: no client finds the device by it until the device is \
                 started anew",
                path.display()
            ));
        }
        before = now;
        thread::sleep(LOOK);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// A lost client would be noticed only when that file system answers.
    #[test]
    fn a_file_system_that_does_not_answer_delays_no_look_at_the_client() {
        let (seen, looks) = mpsc::channel();
        let (asked, is_asked) = mpsc::channel();
        let (_answer, answers) = mpsc::channel::<()>();
        let watch = Watch::begin(
            move || seen.send(()).is_ok(),
            move || {
                let _ = asked.send(());
                let _ = answers.recv();
                Vec::new()
            },
        );
        let watch = watch.unwrap();
        is_asked.recv().unwrap();
        // Those that were there before it was asked, and one more.
        while looks.try_recv().is_ok() {}
        looks.recv().unwrap();
        drop(watch);
    }
}
