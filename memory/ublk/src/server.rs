//! A device's server: it creates, recovers, grows and stops the device by control commands.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device::{Backend, Device};

use crate::buffers::Buffers;
use crate::control::{Control, ControlError};
use crate::error::ServeError;
use crate::geometry::{DiskState, Geometry, Info};
use crate::owned::{begin_recovery, remove, Owner};
use crate::queue::QueueError;
use crate::queues::{End, Queues};
use crate::sys::{self, MAX_DEPTH};

/// A server's options.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device's geometry, with the backend's size.
    pub geometry: Geometry,
    /// The time limit of a control command.
    pub timeout: Duration,
    /// The owner of the device.
    pub owner: Owner,
    /// Whether another server takes the device over if this one dies. Otherwise the disk goes with
    /// its server: processes that have it open would wait for ever.
    pub recovers: bool,
}

impl Options {
    /// The options for a backend of `pages` pages. The default number of queues is that of CPUs, at
    /// most 8. A queue has up to 64 requests of up to 512 KiB (a page-out of 128 pages) in flight.
    /// Both numbers are reduced until all buffers together take at most `buffers` bytes, down to 8
    /// requests of 16 KiB.
    pub fn new(pages: u64, queues: Option<u16>, buffers: u64) -> Self {
        Self::on(thread::available_parallelism().map_or(1, usize::from), pages, queues, buffers)
    }

    /// As [`new`](Self::new), on a machine with this number of CPUs.
    pub fn on(cpus: usize, pages: u64, queues: Option<u16>, buffers: u64) -> Self {
        let cpus = u16::try_from(cpus).unwrap_or(u16::MAX).max(1);
        let queues = queues.unwrap_or(8).clamp(1, cpus);
        let mut geometry =
            Geometry { size: pages.saturating_mul(4096), queues, depth: 64, max_io: 512 << 10 };
        while Buffers::len_of(&geometry) > buffers
            && (geometry.depth > 8 || geometry.max_io > 16384)
        {
            // Depth is worth more than length, because most swap requests are short.
            if geometry.max_io > 131_072 || geometry.depth <= 16 && geometry.max_io > 16384 {
                geometry.max_io /= 2;
            } else {
                geometry.depth /= 2;
            }
        }
        Self { geometry, timeout: Duration::from_secs(30), owner: Owner::default(), recovers: true }
    }

    /// Checks that [`Server::recover`] takes over the device that the driver describes, with
    /// buffers of this many bytes. It asks and changes nothing.
    ///
    /// # Errors
    ///
    /// As [`Server::recover`].
    pub fn check(&self, info: &Info, buffers: u64) -> Result<(), ServeError> {
        self.owner.check(info)?;
        let geometry = granted(info, &self.geometry, &LARGEST)?;
        Buffers::check_len(buffers, &geometry)
            .map(drop)
            .map_err(|source| no_buffers(info.id, source))
    }
}

/// The most bytes of a request.
const MAX_IO: u32 = 32 << 20;

/// The most queues and requests, and the longest, that an existing device may have: another version
/// has made it, or the machine had more CPUs or memory then.
const LARGEST: Geometry =
    Geometry { size: u64::MAX, queues: sys::MAX_QUEUES, depth: MAX_DEPTH, max_io: MAX_IO };

/// A device with its queues' threads. If no other server takes the device over, a drop stops it.
#[derive(Debug)]
pub struct Server {
    control: Control,
    id: u32,
    /// The device's [`mark`](Owner::mark).
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
    /// else can fail. `buffers` come from [`Buffers::file`]; with `None` they are made here.
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

/// Refuses geometries that the driver would refuse or interpret differently.
fn checked(geometry: &Geometry, pages: u64) -> Result<Geometry, ServeError> {
    let Geometry { size, queues, depth, max_io } = *geometry;
    let no = |what| Err(ServeError::Geometry { what });
    if size == 0 || size % 4096 != 0 || size / 4096 != pages {
        return no(format!("{size} bytes over a store of {pages} pages"));
    }
    if queues == 0 || queues > sys::MAX_QUEUES {
        return no(format!("{queues} queues, it has 1 to {}", sys::MAX_QUEUES));
    }
    if depth == 0 || depth > sys::MAX_DEPTH {
        return no(format!("{depth} requests in flight, it has 1 to {}", sys::MAX_DEPTH));
    }
    if max_io < 4096 || max_io % 4096 != 0 || max_io > MAX_IO {
        return no(format!(
            "requests of {max_io} bytes, they have 4 KiB to 32 MiB, in whole pages"
        ));
    }
    Ok(*geometry)
}

/// The granted geometry. The driver grants at most one queue a CPU. There are at most as many
/// queues and requests as in `most`, and no request is longer.
fn granted(info: &Info, wanted: &Geometry, most: &Geometry) -> Result<Geometry, ServeError> {
    let same = (1..=most.queues).contains(&info.queues)
        && (1..=most.depth).contains(&info.depth)
        && info.max_io >= 4096
        && info.max_io.is_multiple_of(4096)
        && info.max_io <= most.max_io;
    if !same {
        let (has, wanted) = (Box::new(*info), Box::new(*wanted));
        return Err(ServeError::Other { id: info.id, has, wanted });
    }
    Ok(Geometry { size: wanted.size, queues: info.queues, depth: info.depth, max_io: info.max_io })
}

fn buffers_for(id: u32, kept: Option<OwnedFd>, geometry: &Geometry) -> Result<Buffers, ServeError> {
    match kept {
        Some(fd) => Buffers::adopt(fd, geometry),
        None => Buffers::new(geometry),
    }
    .map_err(|source| no_buffers(id, source))
}

fn no_buffers(id: u32, source: io::Error) -> ServeError {
    ServeError::Io { id, action: "make its buffers", source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_stay_within_their_memory_limit() {
        for budget in [1 << 20, 16 << 20, 64 << 20, 1 << 30] {
            let geometry = Options::new(1 << 20, None, budget).geometry;
            checked(&geometry, 1 << 20).unwrap();
            let len = Buffers::len_of(&geometry);
            let smallest = u64::from(geometry.queues) * 8 * 16384;
            assert!(len <= budget.max(smallest), "{geometry:?} takes {len} of {budget}");
        }
        let geometry = Options::new(1 << 20, Some(1), 1 << 30).geometry;
        assert_eq!((geometry.depth, geometry.max_io), (64, 512 << 10));
    }

    #[test]
    fn an_impossible_geometry_is_refused_with_its_numbers() {
        let good = Geometry { size: 8 << 20, queues: 2, depth: 64, max_io: 1 << 20 };
        checked(&good, 2048).unwrap();
        for (bad, word) in [
            (Geometry { size: 8 << 20 | 1, ..good }, "8388609"),
            (Geometry { size: 4 << 20, ..good }, "2048 pages"),
            (Geometry { queues: 0, ..good }, "0 queues"),
            (Geometry { depth: 5000, ..good }, "5000"),
            (Geometry { max_io: 5000, ..good }, "5000"),
        ] {
            let error = checked(&bad, 2048).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_device_of_another_geometry_is_not_recovered() {
        let wanted = Geometry { size: 8 << 20, queues: 4, depth: 64, max_io: 1 << 19 };
        let state = DiskState::Quiesced;
        let info = Info { id: 3, queues: 2, depth: 64, max_io: 1 << 19, state, pid: 9, mark: 0 };
        let recovered = |info: &Info| granted(info, &wanted, &LARGEST);
        assert_eq!(recovered(&info).unwrap(), Geometry { queues: 2, ..wanted });
        for bad in [
            Info { queues: sys::MAX_QUEUES + 1, ..info },
            Info { queues: 0, ..info },
            Info { depth: MAX_DEPTH + 1, ..info },
            Info { depth: 0, ..info },
            Info { max_io: 64 << 20, ..info },
            Info { max_io: 5000, ..info },
            Info { max_io: 0, ..info },
        ] {
            let error = recovered(&bad).unwrap_err();
            assert!(matches!(error, ServeError::Other { id: 3, .. }), "{error}");
        }
    }

    /// CPUs are taken offline, a cpuset or a quota shrinks, a balloon takes memory; and back.
    #[test]
    fn a_disk_is_recovered_whatever_cpus_and_memory_the_machine_has_now() {
        let at = |cpus, queues, budget| Options::on(cpus, 2048, queues, budget);
        let machines = [
            at(1, None, 256 << 10),
            at(2, Some(2), 512 << 10),
            at(4, None, 64 << 20),
            at(8, None, 256 << 20),
            at(64, Some(32), 256 << 20),
        ];
        for (then, now) in
            machines.iter().flat_map(|then| machines.iter().map(move |now| (then, now)))
        {
            let Geometry { queues, depth, max_io, .. } = then.geometry;
            let mark = now.owner.mark();
            let state = DiskState::Quiesced;
            let info = Info { id: 3, queues, depth, max_io, state, pid: 9, mark };
            let recovered = granted(&info, &now.geometry, &LARGEST).unwrap();
            assert_eq!(recovered, then.geometry, "{now:?}");
            // A server that is to replace a live one finds the same before that one ends.
            let len = Buffers::len_of(&then.geometry);
            now.check(&info, len).unwrap();
            let short = now.check(&info, len - 1).unwrap_err();
            assert!(matches!(short, ServeError::Io { id: 3, .. }), "{short}");
            let other = now.check(&Info { mark: mark + 1, ..info }, len).unwrap_err();
            let other = matches!(other, ServeError::Control(ControlError::Another { id: 3, .. }));
            assert!(other, "a device of another owner");
            let impossible = now.check(&Info { queues: 0, ..info }, len).unwrap_err();
            assert!(matches!(impossible, ServeError::Other { id: 3, .. }), "{impossible}");
        }
    }

    #[test]
    fn a_device_with_more_or_longer_requests_is_recovered_with_the_buffers_that_it_has() {
        // The geometry of earlier versions on a machine of 256 MiB, and that of this one.
        let oldest = Geometry { size: 8 << 20, queues: 2, depth: 16, max_io: 32 << 10 };
        for older in [oldest, Geometry { max_io: 16 << 10, ..oldest }] {
            recovers(older, Geometry { depth: 8, max_io: 16 << 10, ..older });
        }
    }

    fn recovers(older: Geometry, wanted: Geometry) {
        let state = DiskState::Quiesced;
        let (depth, max_io) = (older.depth, older.max_io);
        let info = Info { id: 3, queues: 2, depth, max_io, state, pid: 9, mark: 0 };
        let geometry = granted(&info, &wanted, &LARGEST).unwrap();
        assert_eq!(geometry, older);
        buffers_for(3, Some(Buffers::file(&older).unwrap()), &geometry).unwrap();
        // Buffers of this version's length would let the kernel write beyond them.
        let short = buffers_for(3, Some(Buffers::file(&wanted).unwrap()), &geometry).unwrap_err();
        assert!(matches!(short, ServeError::Io { id: 3, .. }), "{short}");
        // A new device never has more or longer requests than were asked for.
        let error = granted(&info, &wanted, &wanted).unwrap_err();
        assert!(matches!(error, ServeError::Other { id: 3, .. }), "{error}");
        // The earlier version takes back what this one has made.
        let info = Info { depth: wanted.depth, max_io: wanted.max_io, ..info };
        assert_eq!(granted(&info, &older, &older).unwrap(), wanted);
    }
}
