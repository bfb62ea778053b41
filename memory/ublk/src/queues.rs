//! The queues of a device, each of which is served by a thread.

use std::fs::File;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use device::guard::IoPath;
use device::{Backend, Queue};

use crate::buffers::Buffers;
use crate::control::ControlError;
use crate::error::ServeError;
use crate::geometry::Geometry;
use crate::queue::{serve, QueueError};
use crate::ring::{Arrival, KernelRing};
use crate::tags::Tags;

/// Queues of a device that is being started.
pub(crate) struct Queues {
    pub(crate) threads: Vec<JoinHandle<()>>,
    pub(crate) ends: Receiver<(u16, Result<(), QueueError>)>,
}

impl Queues {
    pub(crate) fn spawn<B: Backend>(
        id: u32,
        ioctl: bool,
        backend: &B,
        buffers: Buffers,
        geometry: &Geometry,
    ) -> Result<Self, ServeError> {
        let failed = |action| move |source| ServeError::Io { id, action, source };
        let device = open_device(id)?;
        let buffers = Arc::new(buffers);
        let (ended, ends) = mpsc::channel();
        let mut threads = Vec::with_capacity(geometry.queues.into());
        for queue in 0..geometry.queues {
            let backend = backend.open().map_err(failed("open the store"))?;
            let thread = Thread {
                device: device.try_clone().map_err(failed("copy a descriptor"))?,
                geometry: *geometry,
                queue,
                ioctl,
                buffers: Arc::clone(&buffers),
            };
            let ended: Sender<_> = ended.clone();
            let spawned = thread::Builder::new()
                .name(format!("ublk{id}-q{queue}"))
                .spawn(move || {
                    let result = thread.run(backend);
                    // The receiver is gone when the server is being dropped.
                    let _ = ended.send((queue, result));
                })
                .map_err(failed("start a thread"))?;
            threads.push(spawned);
        }
        Ok(Self { threads, ends })
    }

    /// The result of a command that waits for the queues; if a queue has ended, its error is the
    /// cause.
    pub(crate) fn or_first_end(
        &mut self,
        id: u32,
        said: Result<(), ControlError>,
    ) -> Result<(), ServeError> {
        match (said, self.ends.try_recv()) {
            (Ok(()), _) => Ok(()),
            (Err(_), Ok((queue, Err(source)))) => Err(ServeError::Queue { id, queue, source }),
            (Err(error), _) => Err(error.into()),
        }
    }
}

struct Thread {
    device: File,
    geometry: Geometry,
    queue: u16,
    ioctl: bool,
    buffers: Arc<Buffers>,
}

impl Thread {
    fn run(self, mut backend: impl Queue) -> Result<(), QueueError> {
        let Self { device, geometry, queue, ioctl, buffers } = self;
        let mut tags = Tags::new(geometry.depth, geometry.size / 4096, geometry.max_io);
        let mut arrivals: Vec<Arrival> = Vec::with_capacity(usize::from(geometry.depth) + 1);
        let kept = Arc::clone(&buffers);
        let mut ring = KernelRing::new(device, &geometry, queue, ioctl, kept, backend.fd())?;
        let path = IoPath::enter();
        let result = serve(&mut ring, &mut backend, &mut tags, &buffers, queue, &mut arrivals);
        drop(path);
        // First the backend, because it may still write to the buffers.
        drop(backend);
        drop(ring);
        result
    }
}

/// Opens the device's character device. It appears a moment after the device is created, and only
/// one server at a time may open it.
fn open_device(id: u32) -> Result<File, ServeError> {
    let path = format!("/dev/ublkc{id}");
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match File::options().read(true).write(true).open(&path) {
            Ok(file) => return Ok(file),
            Err(error) if Instant::now() < deadline => {
                let soon = [io::ErrorKind::NotFound, io::ErrorKind::ResourceBusy];
                if !soon.contains(&error.kind()) {
                    return Err(ServeError::Io { id, action: "open /dev/ublkc", source: error });
                }
                thread::sleep(Duration::from_millis(5));
            }
            Err(source) => return Err(ServeError::Io { id, action: "open /dev/ublkc", source }),
        }
    }
}
