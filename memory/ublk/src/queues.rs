//! The queues of a device, each of which is served by a thread.

use std::fs::File;
use std::io;
use std::sync::atomic::AtomicBool;
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
use crate::queue::{fetch, serve, QueueError};
use crate::ring::{Arrival, KernelRing};
use crate::tags::Tags;

/// How long a queue's thread may take for a step.
const STEP: Duration = Duration::from_secs(30);

/// A queue whose thread has ended, and how.
pub(crate) type End = (u16, Result<(), QueueError>);

/// An order to a queue's thread. Each thread does what it is told and reports; without a further
/// order it ends.
enum Order {
    /// Fetch the first request of each tag of this device.
    Fetch(Arc<File>),
    /// Report whether the driver has ended a command.
    Look,
    /// Serve the queue until the disk is stopped.
    Serve,
}

/// Queues of a device that is being started.
pub(crate) struct Queues {
    id: u32,
    threads: Vec<JoinHandle<()>>,
    ends: Receiver<End>,
    orders: Vec<Sender<Order>>,
    /// The reports; `true` if the driver has ended a command.
    reports: Receiver<bool>,
    /// Set when the driver ends a command while the queues are served.
    ended: Arc<AtomicBool>,
}

impl Queues {
    /// Starts the threads. When this returns each has what it needs, except for the device.
    pub(crate) fn spawn<B: Backend>(
        id: u32,
        ioctl: bool,
        backend: &B,
        buffers: Buffers,
        geometry: &Geometry,
    ) -> Result<Self, ServeError> {
        let failed = |action| move |source| ServeError::Io { id, action, source };
        let buffers = Arc::new(buffers);
        let (ended, ends) = mpsc::channel();
        let (report, reports) = mpsc::channel();
        let is_ended = Arc::new(AtomicBool::new(false));
        let (threads, orders) = (Vec::new(), Vec::new());
        let mut queues = Self { id, threads, ends, orders, reports, ended: Arc::clone(&is_ended) };
        for queue in 0..geometry.queues {
            let backend = backend.open().map_err(failed("open the store"))?;
            let (order, orders) = mpsc::channel();
            let buffers = Arc::clone(&buffers);
            let report = report.clone();
            let (geometry, is_ended) = (*geometry, Arc::clone(&is_ended));
            let thread = Thread { geometry, queue, ioctl, buffers, orders, report, is_ended };
            let ended: Sender<_> = ended.clone();
            let spawned = thread::Builder::new()
                .name(format!("ublk{id}-q{queue}"))
                .spawn(move || thread.run(backend, &ended))
                .map_err(failed("start a thread"))?;
            queues.threads.push(spawned);
            queues.orders.push(order);
        }
        queues.reported(Some(STEP))?;
        Ok(queues)
    }

    /// Has each thread fetch the first request of each tag. Without a time limit: a driver before
    /// Linux 6.15 gives a disk no further server if one ends in the middle of its fetches.
    pub(crate) fn fetch(&mut self) -> Result<(), ServeError> {
        let device = Arc::new(open_device(self.id)?);
        for order in &self.orders {
            // The receiver is gone if the thread has ended, which `reported` finds.
            let _ = order.send(Order::Fetch(Arc::clone(&device)));
        }
        self.reported(None).map(drop)
    }

    /// Whether the driver has ended none of the fetches. Call this before the queues are served.
    pub(crate) fn are_undisturbed(&mut self) -> Result<bool, ServeError> {
        self.orders.iter().for_each(|order| drop(order.send(Order::Look)));
        self.reported(Some(STEP)).map(|ended| !ended)
    }

    /// Has each thread serve its queue.
    pub(crate) fn serve(&mut self) {
        self.orders.iter().for_each(|order| drop(order.send(Order::Serve)));
    }

    /// Waits for a report of each thread. Returns whether one has found an ended command.
    fn reported(&mut self, limit: Option<Duration>) -> Result<bool, ServeError> {
        let (id, begun) = (self.id, Instant::now());
        let (mut ended, mut missing) = (false, self.threads.len());
        while missing > 0 {
            if let Ok(found) = self.reports.recv_timeout(Duration::from_millis(20)) {
                ended |= found;
                missing -= 1;
                continue;
            }
            if let Ok((queue, Err(source))) = self.ends.try_recv() {
                return Err(ServeError::Queue { id, queue, source });
            }
            if let Some(limit) = limit.filter(|&limit| begun.elapsed() >= limit) {
                return Err(ServeError::Late { id, seconds: limit.as_secs() });
            }
        }
        Ok(ended)
    }

    /// The threads, their ends, and whether the driver has ended a command.
    pub(crate) fn into_parts(self) -> (Vec<JoinHandle<()>>, Receiver<End>, Arc<AtomicBool>) {
        (self.threads, self.ends, self.ended)
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
    geometry: Geometry,
    queue: u16,
    ioctl: bool,
    buffers: Arc<Buffers>,
    orders: Receiver<Order>,
    report: Sender<bool>,
    is_ended: Arc<AtomicBool>,
}

impl Thread {
    fn run(self, mut backend: impl Queue, ended: &Sender<End>) {
        let queue = self.queue;
        // The backend may still write to the buffers.
        let buffers = Arc::clone(&self.buffers);
        let mut ring = None;
        let result = self.run_on(&mut backend, &mut ring);
        // First the report: the drop of the backend waits for its requests, and so for a disk that
        // may never answer. The receiver is gone when the server is being dropped.
        let _ = ended.send((queue, result));
        drop(backend);
        drop((ring, buffers));
    }

    fn run_on(
        self,
        backend: &mut impl Queue,
        kept: &mut Option<KernelRing>,
    ) -> Result<(), QueueError> {
        let Self { geometry, queue, ioctl, buffers, orders, report, is_ended } = self;
        let mut tags = Tags::new(geometry.depth, geometry.size / 4096, geometry.max_io);
        let mut arrivals: Vec<Arrival> = Vec::with_capacity(usize::from(geometry.depth) + 1);
        let ring = KernelRing::empty(&geometry)?;
        // The receiver is gone when the start has failed; then no order comes either.
        let _ = report.send(false);
        let Ok(Order::Fetch(device)) = orders.recv() else { return Ok(()) };
        let (of_ring, backend_fd) = (Arc::clone(&buffers), backend.fd());
        let ring = KernelRing::new(ring, device, &geometry, queue, ioctl, of_ring, backend_fd)?;
        let ring = kept.insert(ring);
        fetch(ring, &mut tags)?;
        let _ = report.send(false);
        loop {
            match orders.recv() {
                Ok(Order::Look) => drop(report.send(ring.has_ended()?)),
                Ok(Order::Serve) => break,
                Ok(Order::Fetch(_)) | Err(_) => return Ok(()),
            }
        }
        let path = IoPath::enter();
        let served = serve(ring, backend, &mut tags, &buffers, queue, &mut arrivals, &is_ended);
        drop(path);
        served
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

#[cfg(test)]
mod tests {
    use super::*;
    use device::{Errno, Extent, Request};
    use std::os::fd::{AsFd, BorrowedFd};

    /// The queue of a device whose drop waits for a disk until it is told to end.
    struct Waits(File, Receiver<()>);

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.1.recv();
        }
    }

    impl Queue for Waits {
        fn submit(&mut self, _: u64, _: Request) -> Option<Result<(), Errno>> {
            unreachable!("no request comes")
        }
        fn reap(&mut self, _: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
            0
        }
        fn in_flight(&self) -> usize {
            1
        }
        fn arm(&mut self) -> bool {
            true
        }
        fn fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
        fn patch(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), Errno> {
            unreachable!("no request comes")
        }
        fn extent(&mut self, _: u64, _: u64) -> Result<Extent, Errno> {
            unreachable!("nobody asks")
        }
    }

    #[test]
    fn the_end_of_a_queue_is_reported_before_its_requests_to_a_disk_are_waited_for() {
        let geometry = Geometry { size: 1 << 20, queues: 1, depth: 4, max_io: 8 * 4096 };
        let (order, orders) = mpsc::channel();
        let (report, _reports) = mpsc::channel();
        let thread = Thread {
            geometry,
            queue: 7,
            ioctl: true,
            buffers: Arc::new(Buffers::new(&geometry).unwrap()),
            orders,
            report,
            is_ended: Arc::default(),
        };
        // No device of the driver: the queue ends with an error.
        let file = File::open("/dev/null").unwrap();
        order.send(Order::Fetch(Arc::new(file.try_clone().unwrap()))).unwrap();
        let (answers, answered) = mpsc::channel();
        let backend = Waits(file, answered);
        let (ended, ends) = mpsc::channel();
        let running = thread::spawn(move || thread.run(backend, &ended));
        // Only a hang takes longer.
        let (queue, result) = ends.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(queue == 7 && result.is_err());
        assert!(!running.is_finished());
        drop(answers);
        running.join().unwrap();
    }
}
