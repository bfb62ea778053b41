//! The memory that the processes share.
#![expect(unsafe_code, reason = "maps memory that other processes write too")]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::fs::{
    fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create, MemfdFlags, SealFlags,
};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};

/// The shared state. Each value is read and written atomically, and gives no ordering.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct State {
    /// Bytes per second of all sessions together; 0 is no limit.
    pub(crate) rate: AtomicU64,
    /// Nanoseconds of the monotonic clock up to which the slices so far take.
    pub(crate) taken: AtomicU64,
    /// Nanoseconds of the monotonic clock up to which one session goes first.
    pub(crate) hurried_until: AtomicU64,
    /// The number of that session.
    pub(crate) hurried_by: AtomicU64,
}

const LEN: usize = size_of::<State>();

/// Truncating the file would kill the processes that map it.
const SEALS: SealFlags = SealFlags::SHRINK;

pub(crate) fn file() -> io::Result<OwnedFd> {
    let file = memfd_create("turns", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, LEN as u64)?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

#[derive(Debug)]
pub(crate) struct Map {
    start: NonNull<State>,
}

// SAFETY: the memory has no thread affinity, and the state consists of atomics.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    pub(crate) fn new(file: &OwnedFd) -> io::Result<Self> {
        let len = rustix::fs::fstat(file)?.st_size;
        // No file but a memfd has seals.
        let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
        if len != LEN as i64 || !sealed {
            let what = format!("a file of {len} bytes holds no turns: {LEN}, sealed, are wanted");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(null_mut(), LEN, prot, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start })
    }

    pub(crate) fn state(&self) -> &State {
        // SAFETY: the state is mapped until `self` is dropped, and the seal prevents truncation;
        // every bit pattern is a valid atomic; a page is aligned for it.
        unsafe { self.start.as_ref() }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference to it outlives `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), LEN) };
    }
}
