//! A queue's connection to the kernel: a ring with its tags' commands, and the descriptors of their
//! requests.
#![expect(unsafe_code, reason = "maps what the driver shares, and pushes entries that name memory")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{opcode, types, IoUring};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};

use crate::buffers::Buffers;
use crate::geometry::Geometry;
use crate::sys::{self, IoCommand, IoDescriptor};

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// A tag's command is complete, with this result.
    Tag(u64, i32),
    /// The backend's descriptor is readable.
    Backend,
}

/// A queue thread's interface to the kernel.
pub(crate) trait Ring {
    /// Queues a fetch of a tag, for the next [`wait`](Self::wait).
    fn fetch(&mut self, tag: u16) -> io::Result<()>;
    /// Queues the result of a tag's request and the next fetch of the tag, for the next `wait`.
    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()>;
    /// Submits the queued commands.
    fn submit(&mut self) -> io::Result<()>;
    /// Submits the queued commands, waits for at least one completion, and adds completions to
    /// `out`, up to its capacity.
    fn wait(&mut self, out: &mut Vec<Arrival>) -> io::Result<()>;
    /// The driver's descriptor of a tag's request.
    fn descriptor(&self, tag: u16) -> IoDescriptor;
}

/// The kernel's ring.
pub(crate) struct KernelRing {
    ring: IoUring,
    device: Arc<File>,
    descriptors: Descriptors,
    buffers: Arc<Buffers>,
    queue: u16,
    /// Whether commands are encoded as ioctls.
    ioctl: bool,
    backend: i32,
    watching: bool,
    /// Arrivals from before the queue was served.
    early: Vec<Arrival>,
}

/// The user data of the poll of the backend's descriptor, in the place of a tag.
const BACKEND: u64 = u64::MAX;

impl KernelRing {
    /// Makes a ring for a queue of this geometry. Call this on the queue's thread: only that thread
    /// may then use it.
    pub(crate) fn empty(geometry: &Geometry) -> io::Result<IoUring> {
        // A command for each tag, and the poll of the backend.
        let entries = (u32::from(geometry.depth) + 1).next_power_of_two();
        IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(entries)
    }

    /// Connects an empty ring with a queue.
    pub(crate) fn new(
        ring: IoUring,
        device: Arc<File>,
        geometry: &Geometry,
        queue: u16,
        ioctl: bool,
        buffers: Arc<Buffers>,
        backend: BorrowedFd<'_>,
    ) -> io::Result<Self> {
        let descriptors = Descriptors::map(&device, queue, geometry.depth)?;
        let backend = backend.as_raw_fd();
        let (watching, early) = (false, Vec::with_capacity(geometry.depth.into()));
        Ok(Self { ring, device, descriptors, buffers, queue, ioctl, backend, watching, early })
    }

    /// Whether the driver has ended a command. Requests that it has already passed are served
    /// later.
    pub(crate) fn has_ended(&mut self) -> io::Result<bool> {
        // The kernel adds completions when this thread enters it.
        while !submitted(self.ring.submit_and_wait(0))? {}
        let completions = self.ring.completion();
        self.early.extend(completions.map(|entry| Arrival::Tag(entry.user_data(), entry.result())));
        Ok(self.early.iter().any(|one| matches!(one, Arrival::Tag(_, sys::ABORT))))
    }

    fn push(&mut self, number: u8, tag: u16, result: i32) -> io::Result<()> {
        let addr = self.buffers.at(self.queue, tag).addr().get() as u64;
        let message = IoCommand { queue: self.queue, tag, result, addr }.to_bytes();
        let number = if self.ioctl { sys::io_ioctl(number) } else { number.into() };
        let entry = opcode::UringCmd16::new(types::Fd(self.device.as_raw_fd()), number)
            .cmd(message)
            .build()
            .user_data(tag.into());
        self.push_entry(&entry)
    }

    fn push_entry(&mut self, entry: &io_uring::squeue::Entry) -> io::Result<()> {
        // SAFETY: the buffer that it names is in `buffers`, which this ring owns. When the ring is
        // dropped the kernel has released the tags, because closing it cancels their commands. A
        // poll holds its file, also after the descriptor is closed.
        if unsafe { self.ring.submission().push(entry) }.is_ok() {
            return Ok(());
        }
        // There is an entry for each tag, so the queue is never full; a submit would be harmless.
        self.ring.submit()?;
        // SAFETY: as above.
        unsafe { self.ring.submission().push(entry) }
            .map_err(|_| io::Error::other("the submission queue stays full"))
    }
}

impl Ring for KernelRing {
    fn fetch(&mut self, tag: u16) -> io::Result<()> {
        self.push(sys::FETCH, tag, 0)
    }

    fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
        self.push(sys::COMMIT_AND_FETCH, tag, result)
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            submitted(self.ring.submit())?;
        }
        Ok(())
    }

    fn wait(&mut self, out: &mut Vec<Arrival>) -> io::Result<()> {
        const POLLIN: u32 = 1;
        if !self.watching {
            let entry = opcode::PollAdd::new(types::Fd(self.backend), POLLIN).multi(true).build();
            self.push_entry(&entry.user_data(BACKEND))?;
            self.watching = true;
        }
        out.append(&mut self.early);
        while out.is_empty() {
            submitted(self.ring.submit_and_wait(1))?;
            let room = out.capacity() - out.len();
            for entry in self.ring.completion().take(room) {
                out.push(match entry.user_data() {
                    BACKEND => {
                        self.watching &= io_uring::cqueue::more(entry.flags());
                        Arrival::Backend
                    }
                    tag => Arrival::Tag(tag, entry.result()),
                });
            }
        }
        Ok(())
    }

    fn descriptor(&self, tag: u16) -> IoDescriptor {
        self.descriptors.read(tag)
    }
}

/// Whether the kernel has taken entries; after a pause `false` if it could not do so now.
fn submitted(result: io::Result<usize>) -> io::Result<bool> {
    let Err(error) = result else { return Ok(true) };
    match error.kind() {
        io::ErrorKind::Interrupted => {}
        // EAGAIN, EBUSY, ENOMEM: the kernel has no memory for a request now, and this very server
        // may have to free some. Entries that were not taken stay in the queue.
        io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy | io::ErrorKind::OutOfMemory => {
            std::thread::sleep(Duration::from_millis(1));
        }
        _ => return Err(error),
    }
    Ok(false)
}

/// The descriptors of a queue's requests, which the driver writes.
struct Descriptors {
    base: NonNull<IoDescriptor>,
    len: usize,
    depth: u16,
}

// SAFETY: the mapping has no thread affinity.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn map(device: &File, queue: u16, depth: u16) -> io::Result<Self> {
        let size = size_of::<IoDescriptor>();
        let len = (usize::from(depth) * size).next_multiple_of(4096);
        // The offsets of queues are spaced for the largest depth.
        let offset = u64::from(queue) * u64::from(sys::MAX_DEPTH) * size as u64;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, flags, device, offset) }?;
        let base = NonNull::new(base.cast::<IoDescriptor>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, depth })
    }

    fn read(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth);
        // SAFETY: within the mapping, which has `depth` of them.
        let place = unsafe { self.base.add(usize::from(tag)) };
        // SAFETY: mapped, aligned (the mapping starts at a page), and every bit pattern is a valid
        // descriptor. The driver wrote it before it completed the tag's command, and does not write
        // it again until the tag is committed; volatile, because the compiler cannot know that.
        unsafe { place.read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it exists.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
