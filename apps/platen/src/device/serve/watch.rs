//! Threads that check the device, its files and the kernel's NBD client once a second.

use super::supervisor::swapped_to;
use crate::device::claims::Left;
use crate::say::{say, say_untaken};
use device::Device;
use nbd::Server;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use swap::Untaken;

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

/// Two threads. One prints the first damage that an I/O thread finds, because I/O threads do not
/// print, and each removed socket of the device. The other exits when the kernel's client is lost:
/// only a new server gives it new connections, and nothing completes the requests on the old ones.
///
/// The latter has nothing to do with the former: the file system of a socket's path, or of the log,
/// may not answer. So it prints nothing. The supervisor reports the exit.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Watch {
    pub(super) fn start(
        device: &Arc<Device>,
        client: Option<Client>,
        sockets: Left,
    ) -> anyhow::Result<Self> {
        let missing = move || sockets.missing().map(Path::to_owned).collect();
        let is_lost = client.map(|client| move || client.is_lost());
        Self::start_with(device, missing, is_lost, || {
            std::process::exit(swap::supervisor::CLIENT_LOST.into())
        })
    }

    /// Starts the threads with the functions that they call. `lost` is called once.
    fn start_with(
        device: &Arc<Device>,
        missing: impl Fn() -> Vec<PathBuf> + Send + 'static,
        is_lost: Option<impl Fn() -> bool + Send + 'static>,
        lost: impl FnOnce() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let mut this = Self { stop: Arc::default(), threads: Vec::new() };
        let (untaken, to_say) = channel();
        if let Some(is_lost) = is_lost {
            this.spawn("client", move |stop| {
                // No page is swapped out until this thread has found the client lost, for which the
                // kernel needs some memory.
                if let Err(error) = swap::prefer_alone() {
                    // Fails if the other thread has ended, and so has the server.
                    let _ = untaken.send(error);
                }
                while next(stop) {
                    if is_lost() {
                        return lost();
                    }
                }
            })?;
        }
        let device = Arc::downgrade(device);
        this.spawn("watch", move |stop| {
            let (mut told, mut before) = (false, Vec::new());
            while next(stop) {
                before = report_files(&to_say, missing(), &before);
                let Some(device) = device.upgrade() else { return };
                if let Some(damage) = device.damage().filter(|_| !told) {
                    told = true;
                    say(&format!("{damage}; failed reads are counted in `platen device stat`"));
                }
            }
        })?;
        Ok(this)
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce(&AtomicBool) + Send + 'static,
    ) -> anyhow::Result<()> {
        let stop = Arc::clone(&self.stop);
        let thread = thread::Builder::new().name(name.into());
        self.threads.push(thread.spawn(move || run(&stop))?);
        Ok(())
    }
}

/// Waits a second; returns whether to look again.
fn next(stop: &AtomicBool) -> bool {
    let goes_on = || !stop.load(Ordering::Acquire);
    if goes_on() {
        thread::park_timeout(Duration::from_secs(1));
    }
    goes_on()
}

/// Prints what the other thread could not take, and which files are `missing` and were not
/// `before`. Returns the missing ones.
fn report_files(
    untaken: &Receiver<Untaken>,
    missing: Vec<PathBuf>,
    before: &[PathBuf],
) -> Vec<PathBuf> {
    say_untaken(untaken.try_iter());
    for path in missing.iter().filter(|path| !before.contains(path)) {
        say(&format!(
            "{} was removed or replaced: no client finds the device by it until the device is \
             started anew",
            path.display()
        ));
    }
    missing
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // The panic handler has reported a panic.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::DeviceOptions;
    use store::{Options, Store};

    /// Only a hang takes longer.
    const LONG: Duration = Duration::from_secs(300);

    /// Regression: one thread did both, and a network file system that hung kept the kernel's
    /// requests from another server for ever.
    #[test]
    fn a_lost_client_is_found_while_the_file_system_of_a_socket_does_not_answer() {
        let options = Options { reserve: 0, ..Options::default() };
        let store = Store::create(64, options).unwrap();
        let options = DeviceOptions { workers: 0, ..DeviceOptions::default() };
        let device = Arc::new(Device::new(&store, &options).unwrap());
        let (asked, is_asked) = channel();
        let (answer, answered) = channel::<Vec<PathBuf>>();
        let missing = move || {
            // Nobody listens after the first time.
            let _ = asked.send(());
            answered.recv().unwrap_or_default()
        };
        let is_gone = Arc::new(AtomicBool::new(false));
        let gone = Arc::clone(&is_gone);
        let (end, ended) = channel();
        let watch = Watch::start_with(
            &device,
            missing,
            Some(move || gone.load(Ordering::Acquire)),
            move || end.send(()).unwrap(),
        );
        let watch = watch.unwrap();
        is_asked.recv_timeout(LONG).unwrap();
        is_gone.store(true, Ordering::Release);
        let found = ended.recv_timeout(LONG);
        // Now the file system answers: the thread that waits for it has to end.
        drop(answer);
        drop(watch);
        found.expect("the client's end is found");
    }
}
