//! A memfd of slots, mapped.
#![expect(unsafe_code, reason = "maps memory that other processes write too")]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{null_mut, NonNull};

use rustix::fs::{
    fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create, MemfdFlags, SealFlags,
};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};

use crate::{Slot, SLOTS};

const LEN: usize = SLOTS * size_of::<Slot>();

/// Truncating the file would kill the processes that map it.
const SEALS: SealFlags = SealFlags::SHRINK;

pub(crate) fn file() -> io::Result<OwnedFd> {
    let file = memfd_create("pulse", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, LEN as u64)?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

#[derive(Debug)]
pub(crate) struct Map {
    start: NonNull<Slot>,
}

// SAFETY: the memory has no thread affinity, and slots consist of atomics.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    pub(crate) fn new(file: &OwnedFd) -> io::Result<Self> {
        let len = rustix::fs::fstat(file)?.st_size;
        if len != LEN as i64 || !fcntl_get_seals(file)?.contains(SEALS) {
            let what = format!("{len} bytes are no signs of life: {LEN}, sealed, are wanted");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(null_mut(), LEN, prot, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start })
    }

    #[inline]
    pub(crate) fn slots(&self) -> &[Slot] {
        // SAFETY: as many slots are mapped until `self` is dropped, and the seal prevents
        // truncation; every bit pattern is a valid atomic; a page is aligned for a slot.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), SLOTS) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference to it outlives `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), LEN) };
    }
}
