//! A device's server: it creates, recovers, grows and stops the device by control commands.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use device::{Backend, Device};

use crate::control::{Control, ControlError};
use crate::error::ServeError;
use crate::geometry::{DiskState, Info};
use crate::options::{buffers_for, checked, granted, Options, LARGEST};
use crate::owned::{begin_recovery, remove};
use crate::queue::QueueError;
use crate::queues::{End, Queues};

/// A device with its queues' threads. If no other server takes the device over, a drop stops it.
#[derive(Debug)]
pub struct Server {
    control: Control,
    id: u32,
    /// The device's [`mark`](crate::Owner::mark).
    mark: u64,
    /// The backend's size in bytes.
    size: u64,
    threads: Vec<JoinHandle<()>>,
    ends: Receiver<End>,
    ended: Arc<AtomicBool>,
    /// Whether a drop leaves the disk to the next server.
    stays: bool,
}

impl Server {
    /// Creates a device, serves it, and starts its disk. `on_add` gets its number before anything
    /// else can fail. `buffers` come from [`Buffers::file`](crate::Buffers::file); with `None` they
    /// are made here.
    ///
    /// # Errors
    ///
    /// There is no driver, or it refuses; the kernel's error. Then no device is left.
    pub fn create(
        backend: &Device,
        buffers: Option<OwnedFd>,
        options: &Options,
        on_add: &dyn Fn(u32),
    ) -> Result<Self, ServeError> {
        let wanted = checked(&options.geometry, backend.pages())?;
        let mut control = Control::open(options.timeout)?;
        let info = control.add(&wanted, options.owner.mark(), options.recovers)?;
        let id = info.id;
        on_add(id);
        let begun = (|| {
            let geometry = granted(&info, &wanted, &wanted)?;
            control.set_parameters(id, &geometry)?;
            let buffers = buffers_for(id, buffers, &geometry)?;
            let mut queues =
                Queues::spawn(id, control.speaks_ioctl(), backend, buffers, &geometry)?;
            queues.fetch()?;
            queues.serve();
            let started = control.start(id);
            queues.or_first_end(id, started)?;
            Ok(queues)
        })();
        match begun {
            Ok(queues) => {
                notice_deaths(id);
                Ok(queues.into_server(control, &info, wanted.size, options.recovers))
            }
            Err(error) => {
                // Best effort: the first error is the more useful one.
                let _ = remove(&mut control, id, |found| found.mark == info.mark, || ());
                Err(error)
            }
        }
    }

    /// Takes over device `id`, whose server is gone: its disk has stayed, and this server gets all
    /// requests that the dead one had. If that server died before the disk was started, creates a
    /// new device.
    ///
    /// # Errors
    /// The errors of [`create`](Self::create); or the device has another owner or another geometry.
    /// Then the device is not changed.
    pub fn recover(
        id: u32,
        backend: &Device,
        buffers: Option<OwnedFd>,
        options: &Options,
        on_add: &dyn Fn(u32),
    ) -> Result<Self, ServeError> {
        let wanted = checked(&options.geometry, backend.pages())?;
        let mut control = Control::open(options.timeout)?;
        let info = control.info(id)?;
        if info.state == DiskState::Dead {
            // Its server died before the disk was started, so the device has no users. Or a server
            // deleted it, and another one is just starting a disk of that number.
            if options.owner.has(&info) {
                control.delete(id)?;
            }
            return Self::create(backend, buffers, options, on_add);
        }
        options.owner.check(&info)?;
        // The driver says how many queues and requests this device has, and how long they are. An
        // earlier version, or a machine with more CPUs or memory, may have made it for more or
        // longer ones than this server would, and has left buffers for them.
        let geometry = granted(&info, &wanted, &LARGEST)?;
        let buffers = buffers_for(id, buffers, &geometry)?;
        // A driver before Linux 6.15 gives a disk no further server if this one ends between the
        // start of recovery and its last fetch. So what may fail comes before, as far as it can.
        let mut queues = Queues::spawn(id, control.speaks_ioctl(), backend, buffers, &geometry)?;
        let deadline = control.deadline();
        begin_recovery(&mut control, id, &options.owner, deadline)?;
        queues.fetch()?;
        // Later drivers may pass requests from here on.
        if control.may_leave_work() && !queues.are_undisturbed()? {
            return Err(ServeError::Disturbed { id });
        }
        queues.serve();
        let ended = control.end_recovery(id);
        queues.or_first_end(id, ended)?;
        Ok(queues.into_server(control, &info, wanted.size, options.recovers))
    }

    /// Makes the disk as large as the backend, if it is smaller: the backend has grown since an
    /// earlier server started the disk. Requests flow meanwhile.
    ///
    /// # Errors
    ///
    /// The driver's error, as [`Control::set_size`]: then the disk has its former size, and is
    /// served.
    pub fn grow(&mut self) -> Result<(), ControlError> {
        if self.control.size(self.id)? < self.size {
            self.control.set_size(self.id, self.size)?;
        }
        Ok(())
    }

    /// The path of the disk.
    pub fn disk(&self) -> PathBuf {
        disk(self.id)
    }

    /// Whether the driver still has the device. A queue that ends without an error may be that of a
    /// disk which another process has removed, or the driver has ended the requests of this server
    /// in place of those of the dead one: its work that does so can come after the takeover.
    pub fn is_there(&mut self) -> bool {
        self.control.info(self.id).is_ok_and(|info| info.state != DiskState::Dead)
    }

    /// Whether the driver has ended a command of this server, and has the device still. The driver
    /// may pass a request to such a command, and nobody would answer it: the process should exit,
    /// and the next server recover the device. Since Linux 6.7 a disk that is stopped is gone
    /// before its commands end; before, such a disk may seem to be disturbed for a moment.
    pub fn is_disturbed(&mut self) -> bool {
        self.ended.load(Ordering::Acquire) && self.is_there()
    }

    /// Waits up to `timeout` for a queue to end; `None` if none has.
    pub fn wait(&self, timeout: Duration) -> Option<(u16, Result<(), QueueError>)> {
        self.ends.recv_timeout(timeout).ok()
    }

    /// Stops the disk, waits for the queues, and deletes the device, unless another process has
    /// deleted it. Users of the disk get errors from now on.
    ///
    /// # Errors
    ///
    /// The driver's error; then the device may still exist.
    pub fn stop(mut self) -> Result<(), ControlError> {
        self.stays = true;
        self.end()
    }

    fn end(&mut self) -> Result<(), ControlError> {
        let Self { control, threads, mark, .. } = self;
        // Another process may have deleted the device, and its number may be another one's.
        let ours = |info: &Info| info.mark == *mark;
        let joined = || {
            for thread in threads.drain(..) {
                // A panic of the thread has ended the process, or was reported already.
                let _ = thread.join();
            }
        };
        remove(control, self.id, ours, joined).map(drop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.stays {
            // The error for which the server ends is the more useful one.
            let _ = self.end();
        }
    }
}

impl Queues {
    fn into_server(self, control: Control, info: &Info, size: u64, stays: bool) -> Server {
        let (threads, ends, ended) = self.into_parts();
        let Info { id, mark, .. } = *info;
        Server { control, id, mark, size, threads, ends, ended, stays }
    }
}

/// Makes the driver notice the death of a server that had no pending fetch: if the server had
/// requests of all tags, drivers before Linux 6.16 notice only when a request times out, by default
/// after 30 s. A timeout does not disturb a running server.
fn notice_deaths(id: u32) {
    // Kernels without this setting use their default.
    let _ = std::fs::write(format!("/sys/block/ublkb{id}/queue/io_timeout"), "2000");
}

/// The path of the disk of device `id`.
pub fn disk(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}
