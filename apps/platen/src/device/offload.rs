//! QAT offload of a served device, started with the server or while it already serves.

use super::args::{PageAccelerator, ServeArgs};
use super::inherited::Inherited;
use crate::say::say;
use anyhow::{ensure, Context};
use codec::Codec;
use device::{Device, OffloadOptions};
use qat::{Libraries, Location, Qat, StartOptions};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

/// How this program starts QAT devices, if it can.
static START: OnceLock<Start> = OnceLock::new();

type Start = fn(&Location, Arc<Device>, OffloadOptions) -> anyhow::Result<usize>;

/// Makes this program start QAT devices. `platen-device` does not: it is linked statically, so it
/// cannot load a driver, and its memory is locked, so it has no code that it does not need.
pub(crate) fn with_drivers() {
    // Set once.
    let _ = START.set(start);
}

/// Whether these arguments need a driver.
pub(super) fn needs_drivers(args: &ServeArgs) -> bool {
    args.codec == Codec::DeflateQz && args.accelerator != PageAccelerator::None
}

/// Checks that the arguments for QAT agree.
pub(super) fn check(args: &ServeArgs) -> anyhow::Result<()> {
    ensure!(
        args.accelerator != PageAccelerator::Qat || args.codec == Codec::DeflateQz,
        "--accelerator qat goes with --codec qatzip, not with {}",
        args.codec
    );
    Ok(())
}

fn starter() -> anyhow::Result<Start> {
    START.get().copied().context("platen-device loads no driver: serve the device with platen")
}

/// The thread that starts QAT devices, if there is one, and why none compresses.
pub(super) struct Offload {
    starting: Option<JoinHandle<()>>,
    why: Arc<Why>,
}

/// Why a server compresses in software although it may use an accelerator.
#[derive(Debug, Default)]
pub(super) struct Why(Mutex<Option<String>>);

impl Why {
    pub(super) fn get(&self) -> Option<String> {
        self.lock().clone()
    }

    /// Takes note of the reason, and then prints it: a reader of the log may ask for the status at
    /// once.
    fn say(&self, why: &str) {
        *self.lock() = Some(why.to_owned());
        say(&format!("codec qatzip in software: {why}"));
    }

    fn begin(&self, start: impl FnOnce() -> anyhow::Result<usize>) -> anyhow::Result<()> {
        let threads = start()?;
        *self.lock() = None;
        say(&format!("QAT: {threads} threads with an instance each"));
        Ok(())
    }

    /// Runs [`Why::begin`] in a thread of its own.
    fn begin_in_thread(
        self: &Arc<Self>,
        start: impl FnOnce() -> anyhow::Result<usize> + Send + 'static,
    ) -> Option<JoinHandle<()>> {
        // Set here: the thread may get its first CPU time after the first request for the status.
        *self.lock() = Some("the QAT device has not started yet".to_owned());
        let why = Arc::clone(self);
        let starting = thread::Builder::new().name("qat-start".into()).spawn(move || {
            if let Err(error) = why.begin(start) {
                why.say(&format!("{error:#}"));
            }
        });
        if let Err(error) = &starting {
            self.say(&format!("no thread: {error}"));
        }
        starting.ok()
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Offload {
    /// Starts compression by a QAT device, if it is requested and present. A server that replaces
    /// another one starts it in the background and compresses in software until then, which stores
    /// pages equally well: starting a QAT device allocates memory, for which the kernel may have to
    /// swap to this very disk.
    pub(super) fn begin(
        args: &ServeArgs,
        device: &Arc<Device>,
        inherited: &Inherited,
    ) -> anyhow::Result<Self> {
        let why = Arc::<Why>::default();
        if !needs_drivers(args) {
            return Ok(Self { starting: None, why });
        }
        if inherited.in_software {
            why.say("a server before this one hung in the driver of the QAT device");
            return Ok(Self { starting: None, why });
        }
        let device = Arc::clone(device);
        let location = args.qat_libraries.clone().map_or(Location::System, Location::Folder);
        let mut options = OffloadOptions::default();
        if let Some(threads) = args.qat_threads {
            options.threads = usize::from(threads);
        }
        let start = move || starter()?(&location, device, options);
        if inherited.replaces {
            let starting = why.begin_in_thread(start);
            return Ok(Self { starting, why });
        }
        match why.begin(start) {
            Ok(()) => {}
            Err(error) if args.accelerator == PageAccelerator::Auto => {
                why.say(&format!("{error:#}"));
            }
            Err(error) => return Err(error).context(
                "--accelerator qat: no QAT device (`platen qat status` lists the missing parts)",
            ),
        }
        Ok(Self { starting: None, why })
    }

    /// Why no accelerator compresses, if one may.
    pub(super) fn why(&self) -> &Arc<Why> {
        &self.why
    }

    /// Waits for the start of a QAT device to finish.
    pub(super) fn end(self) {
        if let Some(starting) = self.starting {
            // A panic of that thread ended the process.
            let _ = starting.join();
        }
    }
}

/// Ends also if a call of the library never returns.
fn start(
    location: &Location,
    device: Arc<Device>,
    options: OffloadOptions,
) -> anyhow::Result<usize> {
    let libraries = Libraries::load(location)?;
    let qat = Qat::start(&libraries, &StartOptions::default())?;
    Ok(qat::watched(move || device.offload(&qat, &options))??)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_start_in_a_thread_that_has_had_no_cpu_time_yet_is_no_started_device() {
        // The more often, the surer does a thread come late.
        for _ in 0..100 {
            let why = Arc::<Why>::default();
            let (proceed, wait) = mpsc::channel::<()>();
            let starting = why.begin_in_thread(move || {
                wait.recv()?;
                Ok(1)
            });
            assert_eq!(why.get().as_deref(), Some("the QAT device has not started yet"));
            proceed.send(()).unwrap();
            starting.unwrap().join().unwrap();
            assert_eq!(why.get(), None);
        }
    }

    #[test]
    fn a_start_in_a_thread_that_fails_leaves_its_reason() {
        let why = Arc::<Why>::default();
        let starting = why.begin_in_thread(|| anyhow::bail!("no instance"));
        starting.unwrap().join().unwrap();
        assert_eq!(why.get().as_deref(), Some("no instance"));
    }
}
