//! The memory that the processes share.
#![expect(unsafe_code, reason = "maps memory that other processes write too")]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::{null_mut, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::fs::{
    fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create, open, FileType, MemfdFlags,
    Mode, OFlags, SealFlags,
};
use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};
use rustix::process::geteuid;

use crate::stopped::Stopped;

/// The shared state. Each value is read and written atomically, and gives no ordering.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct State {
    /// Bytes per second of all sessions together; 0 is no limit.
    pub(crate) rate: AtomicU64,
    /// Nanoseconds of the monotonic clock up to which the slices so far take.
    pub(crate) taken: AtomicU64,
    /// The sessions that go first.
    pub(crate) stopped: Stopped,
}

const LEN: usize = size_of::<State>();

/// Truncating the file would kill the processes that map it. A file with a path has no seals: no
/// other user may write to it.
const SEALS: SealFlags = SealFlags::SHRINK;
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

pub(crate) fn file() -> io::Result<OwnedFd> {
    let file = memfd_create("turns", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, LEN as u64)?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Opens the file at `path`. Makes it if it is missing, or holds something else.
pub(crate) fn file_at(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if let Ok(file) = open(path, flags, Mode::empty()) {
        if is_fit(&file)? {
            return Ok(file);
        }
    }
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let file = open(&new, flags | OFlags::CREATE | OFlags::EXCL, MODE)?;
    // Written, not only made as long: a full file system would kill the process at its first write
    // to the mapping.
    let mut file = File::from(file);
    file.write_all(&[0; LEN])?;
    std::fs::rename(&new, path)?;
    Ok(file.into())
}

/// Whether the file may be mapped.
fn is_fit(file: &OwnedFd) -> io::Result<bool> {
    let stat = fstat(file)?;
    let is_private = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == geteuid().as_raw()
        && Mode::from_raw_mode(stat.st_mode) == MODE;
    // Of files without a path, only a memfd has seals.
    let is_sealed = || fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
    Ok(stat.st_size == LEN as i64 && (is_private || is_sealed()))
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
        if !is_fit(file)? {
            let len = fstat(file)?.st_size;
            let what = format!(
                "a file of {len} bytes holds no turns: {LEN}, sealed or private, are wanted"
            );
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
