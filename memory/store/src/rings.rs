//! Reads and writes in which a thread can be killed.
//!
//! A thread in `pread` on a disk that does not answer cannot be killed, and its process does not
//! exit until the disk answers. The next server would wait for the store's lock, and the supervisor
//! for the exit. A thread that waits for an io_uring completion sleeps interruptibly: a signal ends
//! the sleep, and the request is left to the kernel. (If the kernel cannot submit without blocking,
//! as for a device whose request queue is full, a worker thread of the process blocks; then it is
//! as with `pread`.)
//!
//! So the bytes of a read may arrive when the process is gone, and a swap server's heap is its
//! successor's by then. The kernel therefore reads to a page of the ring, which is private to the
//! process: the kernel keeps that page until the disk has answered, and nobody else gets it. A late
//! write takes whatever the successor has in that memory to blocks that are not used any more
//! (`backing.rs`).
#![expect(unsafe_code, reason = "entries name memory by its address")]

use std::io;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use io_uring::{opcode, squeue, types, IoUring};
use rustix::io::Errno;
use rustix::mm::{mmap_anonymous, munmap, MapFlags, ProtFlags};

use crate::layout::PAGE;

/// Threads that may wait for the disk at a time: the fetch threads, the policy, and one more.
const RINGS: usize = 6;

/// The pause before a retry of a request for which the kernel had no memory.
const AGAIN: Duration = Duration::from_millis(1);

/// A pool of rings.
pub(crate) struct Rings(Box<[Mutex<Option<Ring>>]>);

/// A ring, with the page that the kernel reads to.
struct Ring {
    ring: IoUring,
    page: Private,
}

impl Rings {
    /// Makes the rings, if the kernel allows io_uring.
    pub(crate) fn new() -> Option<Self> {
        let ring = || Some(Ring { ring: IoUring::new(2).ok()?, page: Private::new()? });
        (0..RINGS).map(|_| Some(Mutex::new(Some(ring()?)))).collect::<Option<_>>().map(Self)
    }

    fn any(&self) -> MutexGuard<'_, Option<Ring>> {
        let free = self.0.iter().find_map(|ring| ring.try_lock().ok());
        // A panic under this lock leaves no ring half updated.
        free.unwrap_or_else(|| self.0[0].lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads as `pread` does, at most a page; `None` if the ring cannot do it.
    pub(crate) fn read(&self, fd: RawFd, out: &mut [u8], at: u64) -> Option<io::Result<usize>> {
        let mut slot = self.any();
        let page = slot.as_ref()?.page.0;
        let len = out.len().min(PAGE);
        let entry = opcode::Read::new(types::Fd(fd), page.as_ptr(), u32::try_from(len).ok()?);
        // SAFETY: the page belongs to the ring in `slot`, which is locked until this returns.
        let done = unsafe { run(&mut slot, &entry.offset(at).build()) }?;
        if let Ok(read) = done {
            // SAFETY: a ring that has completed a request is still there, and so is its page, whose
            // bytes are initialised and which the kernel does not use any more.
            let bytes = unsafe { slice::from_raw_parts(page.as_ptr(), len) };
            let read = read.min(len);
            out[..read].copy_from_slice(&bytes[..read]);
        }
        Some(done)
    }

    /// Writes as `pwrite` does; `None` if the ring cannot do it.
    pub(crate) fn write(&self, fd: RawFd, bytes: &[u8], at: u64) -> Option<io::Result<usize>> {
        let len = u32::try_from(bytes.len()).ok()?;
        let entry = opcode::Write::new(types::Fd(fd), bytes.as_ptr(), len).offset(at).build();
        // SAFETY: `bytes` is borrowed until it returns.
        unsafe { run(&mut self.any(), &entry) }
    }
}

/// Submits the request to the ring and waits for its completion.
///
/// # Safety
///
/// The memory that `entry` names stays valid, and unused by others, until this returns.
unsafe fn run(slot: &mut Option<Ring>, entry: &squeue::Entry) -> Option<io::Result<usize>> {
    let Ring { ring, .. } = slot.as_mut()?;
    // SAFETY: by the caller's promise the memory stays valid until we return. By then the kernel
    // has completed the request, or never got it and the ring is closed.
    if unsafe { ring.submission().push(entry) }.is_err() {
        return None;
    }
    loop {
        match ring.submit() {
            Ok(0) => thread::sleep(AGAIN),
            Ok(_) => break,
            Err(error) if passes(&error) => thread::sleep(AGAIN),
            Err(_) => {
                // Closing the ring drops the request that it has not submitted.
                *slot = None;
                return None;
            }
        }
    }
    loop {
        if let Some(done) = ring.completion().next() {
            let done = done.result();
            return Some(usize::try_from(done).map_err(|_| io::Error::from_raw_os_error(-done)));
        }
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
            // The kernel may use the memory until the completion: keep waiting.
            Err(_) => thread::sleep(AGAIN),
        }
    }
}

/// A page that no other process has, wherever the heap lies.
struct Private(NonNull<u8>);

// SAFETY: a page without thread affinity, which belongs to its ring.
unsafe impl Send for Private {}

impl Private {
    fn new() -> Option<Self> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), PAGE, both, flags) }.ok()?;
        NonNull::new(start.cast()).map(Self)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // SAFETY: the mapping made above, to which nothing refers. A request that the kernel still
        // has keeps the page itself.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

fn passes(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::INTR | Errno::AGAIN | Errno::BUSY | Errno::NOMEM))
}

impl std::fmt::Debug for Rings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rings").field("number", &self.0.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn threads_beyond_the_rings_get_their_own_bytes() {
        let Some(rings) = Rings::new() else {
            println!("skipped: this kernel has no io_uring for us");
            return;
        };
        let mut file = tempfile();
        let bytes: Vec<u8> = (0..64 * 4096_usize).map(|at| (at / 4096).to_le_bytes()[0]).collect();
        file.write_all(&bytes).unwrap();
        let fd = file.as_raw_fd();
        thread::scope(|scope| {
            for number in 0..2 * u8::try_from(RINGS).unwrap() {
                let rings = &rings;
                scope.spawn(move || {
                    let mut out = [0xff; 4096];
                    for _ in 0..200 {
                        let at = u64::from(number) * 4096;
                        assert_eq!(rings.read(fd, &mut out, at).unwrap().unwrap(), 4096);
                        assert!(out.iter().all(|&byte| byte == number));
                        let at = u64::from(32 + number) * 4096;
                        assert_eq!(rings.write(fd, &out, at).unwrap().unwrap(), 4096);
                    }
                });
            }
        });
        let mut out = [0; 4096];
        assert_eq!(rings.read(fd, &mut out, 33 * 4096).unwrap().unwrap(), 4096);
        assert_eq!(out, [1; 4096]);
        assert_eq!(rings.read(fd, &mut out, 1 << 20).unwrap().unwrap(), 0);
        assert!(rings.read(-1, &mut out, 0).unwrap().is_err());
    }

    /// A thread that waits for a completion that never comes: a signal wakes it, and it waits
    /// again, so only a kill ends it.
    #[test]
    fn a_wait_can_be_interrupted() {
        let Some(rings) = Rings::new() else {
            println!("skipped: this kernel has no io_uring for us");
            return;
        };
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let waits = AtomicBool::new(false);
        thread::scope(|scope| {
            let (rings, waits) = (&rings, &waits);
            let id = std::sync::mpsc::channel();
            let waiter = scope.spawn(move || {
                id.0.send(rustix::thread::gettid()).unwrap();
                waits.store(true, Ordering::Release);
                let mut out = [0; 8];
                (rings.read(reader.as_raw_fd(), &mut out, u64::MAX).unwrap().unwrap(), out)
            });
            let tid = id.1.recv().unwrap();
            // "S" is an interruptible sleep, "D" an uninterruptible one, as also for a moment in a
            // page fault.
            let stat = format!("/proc/self/task/{}/stat", tid.as_raw_nonzero());
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(300);
            let state = loop {
                let stat = std::fs::read_to_string(&stat).unwrap();
                let state = stat.rsplit_once(") ").unwrap().1.as_bytes()[0];
                let sleeps = waits.load(Ordering::Acquire) && state == b'S';
                if sleeps || std::time::Instant::now() >= deadline {
                    break state;
                }
                thread::yield_now();
            };
            rustix::io::write(&writer, b"at last!").unwrap();
            assert_eq!(waiter.join().unwrap(), (8, *b"at last!"));
            assert_eq!(state, b'S', "it cannot be killed");
        });
    }

    fn tempfile() -> std::fs::File {
        rustix::fs::memfd_create("rings", rustix::fs::MemfdFlags::CLOEXEC).unwrap().into()
    }
}
