//! The memfd and its mapping: the only file that accesses memory by address.
#![expect(unsafe_code, reason = "hands out parts of one shared mapping made with mmap")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::slice;

use rustix::fs::{
    fallocate, fcntl_add_seals, fcntl_get_seals, flock, fstat, ftruncate, memfd_create, seek,
    FallocateFlags, FlockOperation, MemfdFlags, SealFlags, SeekFrom,
};
use rustix::io::Errno;
use rustix::mm::{madvise, mmap, mprotect, munmap, Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::class::SUM;
use crate::layout::{Layout, PAGE, TABLE};
use crate::record::Record;
use crate::slab::Slab;
use crate::slot::Slot;
use crate::sync::{AtomicU64, Ordering};

/// Creates a file for `layout`, sealed so that no process can change its size.
pub(crate) fn create(layout: &Layout) -> io::Result<OwnedFd> {
    let fd = memfd_create("platen-store", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, layout.len as u64)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Bytes of the file, and whether it is sealed against truncation, which would kill a process that
/// maps it.
pub(crate) fn size(fd: BorrowedFd<'_>) -> io::Result<(u64, bool)> {
    let len = u64::try_from(fstat(fd)?.st_size).unwrap_or(0);
    // A file that has no seals at all answers EINVAL.
    let sealed = fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    Ok((len, sealed))
}

/// Why a file could not be taken.
pub(crate) enum Taken {
    /// Another server has it.
    InUse,
    /// The kernel's error.
    Io(io::Error),
}

/// A second open file description of the same file.
pub(crate) fn open(fd: BorrowedFd<'_>) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    File::options().read(true).write(true).open(path)
}

/// Makes the caller the file's only server, until the returned file is closed.
///
/// Opens the file anew, because flock locks belong to an open file description: the descriptor that
/// the supervisor passed on shares the supervisor's, and its copies do not exclude each other.
pub(crate) fn take(fd: BorrowedFd<'_>) -> Result<File, Taken> {
    let own = open(fd).map_err(Taken::Io)?;
    match flock(&own, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(own),
        Err(Errno::WOULDBLOCK) => Err(Taken::InUse),
        Err(errno) => Err(Taken::Io(errno.into())),
    }
}

/// The mapping of the whole file.
///
/// Ownership rule: superblock, table and slab states are atomics, shared by all. An object's bytes
/// and checksum belong to the thread that claimed its place until it publishes them, are readable
/// by threads that have pinned it, and then belong to the thread that removed its entry from the
/// table.
pub(crate) struct Map {
    base: NonNull<u8>,
    layout: Layout,
    /// The file description that holds the lock. Dropping the map unlocks it: a process that is
    /// being started has a copy of the descriptor until its `execve`, and so closing it is not
    /// enough.
    file: File,
    /// The file description to pass on, without a lock.
    shared: OwnedFd,
}

// SAFETY: the mapping is plain memory without thread affinity; the ownership rule on `Map` says
// which thread may access which byte.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `file`, which is another open file description of `shared` and whose length is fixed at
    /// `layout.len`. Only for reading until [`take`](Self::take).
    pub(crate) fn new(file: File, shared: OwnedFd, layout: Layout) -> io::Result<Self> {
        // Under `mlockall(MCL_FUTURE)` the kernel would fill every hole of a mapping that may be
        // read: it is made unreadable first.
        // SAFETY: a new mapping wherever the kernel likes; no address of ours is named.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                layout.len,
                ProtFlags::empty(),
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>()).expect("the kernel maps nothing at address 0");
        let map = Self { base, layout, file, shared };
        // SAFETY: base and length are those of the mapping just made.
        unsafe {
            mprotect(base.as_ptr().cast(), layout.len, MprotectFlags::READ | MprotectFlags::WRITE)
        }?;
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontDump] {
            // Kernels built without the feature refuse the advice, and have nothing to turn off.
            // SAFETY: as above; neither advice changes what the memory holds.
            let _ = unsafe { madvise(base.as_ptr().cast(), layout.len, advice) };
        }
        Ok(map)
    }

    /// Makes the caller the file's only server, as [`take`] does.
    pub(crate) fn take(&mut self) -> Result<(), Taken> {
        self.file = take(self.shared.as_fd())?;
        Ok(())
    }

    /// Changes the number of pages: another server has changed it, or the table has memory for
    /// them.
    ///
    /// # Panics
    ///
    /// If places or the file's length differ.
    pub(crate) fn resize(&mut self, layout: Layout) {
        assert!(layout.len == self.layout.len && layout.capacity == self.layout.capacity);
        self.layout = layout;
    }

    /// A copy of the superblock.
    pub(crate) fn superblock_bytes(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        for (bytes, word) in page.chunks_exact_mut(8).zip(self.superblock()) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        page
    }

    /// The offset of the next page with memory, from `at` on.
    pub(crate) fn next_data(&self, at: usize) -> Option<usize> {
        let found = seek(&self.file, SeekFrom::Data(at as u64)).ok()?;
        usize::try_from(found).ok()
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.as_fd()
    }

    /// The file's memory in pages.
    pub(crate) fn resident(&self) -> io::Result<u64> {
        let stat = fstat(&self.file)?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * 512 / PAGE as u64)
    }

    /// The superblock as 64-bit words.
    pub(crate) fn superblock(&self) -> &[AtomicU64] {
        // SAFETY: the first page of the mapping, which is longer, is aligned for words, lives as
        // long as `self`, and by the ownership rule is only used as atomics.
        unsafe { slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU64>(), PAGE / 8) }
    }

    /// The slot table.
    #[inline]
    pub(crate) fn table(&self) -> &[Slot] {
        // SAFETY: the layout has room for the table behind the superblock.
        let table = unsafe { self.base.add(TABLE) };
        let len = usize::try_from(self.layout.pages).expect("the table is mapped");
        // SAFETY: `pages` words from there are in the mapping, aligned, live as long as `self`, and
        // `Slot` is an atomic word for which every bit pattern is valid.
        unsafe { slice::from_raw_parts(table.as_ptr().cast::<Slot>(), len) }
    }

    /// The records of groups. Touching a record without memory would allocate a page that the store
    /// does not count.
    #[inline]
    pub(crate) fn records(&self) -> &[Record] {
        // SAFETY: the layout has room for the records behind the table.
        let records = unsafe { self.base.add(self.layout.records_at) };
        // SAFETY: as many as the layout has are in the mapping, aligned to 64, live as long as
        // `self`, and `Record` consists of atomics for which every bit pattern is valid.
        unsafe { slice::from_raw_parts(records.as_ptr().cast::<Record>(), self.layout.records) }
    }

    /// The state of a slab.
    ///
    /// # Panics
    ///
    /// If the number's region does not exist: callers have the number from a list or from a checked
    /// entry.
    #[inline]
    pub(crate) fn slab(&self, slab: u32) -> &Slab {
        let at = self.layout.state(slab).expect("slab numbers are checked when words are read");
        // SAFETY: the layout says that the state lies in a region, so in the mapping.
        let state = unsafe { self.base.add(at) };
        // SAFETY: 24 bytes from there are in the region, aligned to 8, live as long as `self`, and
        // `Slab` consists of atomics for which every bit pattern is valid.
        unsafe { state.cast::<Slab>().as_ref() }
    }

    /// Writes an object's bytes and checksum to a place from `Layout::place`. Only for the thread
    /// that has claimed the place and not yet published it.
    #[inline]
    pub(crate) fn write(&self, (sum_at, at): (usize, usize), sum: u32, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.layout.len && sum_at + SUM <= self.layout.len);
        let sum = sum.to_le_bytes();
        // SAFETY: inside the mapping by the assertions above.
        let to = unsafe { self.base.add(at) };
        // SAFETY: both ranges are valid for their length; by the ownership rule on `Map` no other
        // thread reads or writes the place, and no slice the caller holds is part of the mapping,
        // since none is ever handed out.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        // SAFETY: inside the mapping by the assertions above.
        let to = unsafe { self.base.add(sum_at) };
        // SAFETY: as for the bytes.
        unsafe { ptr::copy_nonoverlapping(sum.as_ptr(), to.as_ptr(), SUM) };
    }

    /// Copies an object from a place of `Layout::place`, and returns its stored checksum. Only
    /// while the caller has it pinned, or no thread writes.
    #[inline]
    pub(crate) fn read(&self, (sum_at, at): (usize, usize), out: &mut [u8]) -> u32 {
        assert!(at + out.len() <= self.layout.len && sum_at + SUM <= self.layout.len);
        // SAFETY: inside the mapping by the assertion above.
        let from = unsafe { self.base.add(at) };
        // SAFETY: both ranges are valid for their length; while the object is pinned no thread
        // writes it (ownership rule on `Map`), and `out` is the caller's own and no part of the
        // mapping.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), out.len()) };
        let mut sum = [0; SUM];
        // SAFETY: inside the mapping by the assertion above.
        let from = unsafe { self.base.add(sum_at) };
        // SAFETY: as for the bytes.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), sum.as_mut_ptr(), SUM) };
        u32::from_le_bytes(sum)
    }

    /// Allocates memory for `pages` pages at `at`, with entries in this process's page tables. May
    /// wait as long as the kernel needs to find memory.
    pub(crate) fn populate(&self, at: usize, pages: u32) -> io::Result<()> {
        let len = pages as usize * PAGE;
        assert!(at.is_multiple_of(PAGE) && at + len <= self.layout.len);
        if pages == 0 {
            return Ok(());
        }
        // SAFETY: inside the mapping by the assertion above.
        let start = unsafe { self.base.add(at) };
        // SAFETY: the range is mapped and writable; populating it changes no byte.
        match unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) } {
            Ok(()) => Ok(()),
            // Before Linux 5.14: allocates the memory only; its first use then takes a minor fault.
            Err(Errno::INVAL) => {
                Ok(fallocate(&self.file, FallocateFlags::KEEP_SIZE, at as u64, len as u64)?)
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Frees the memory of `pages` pages at `at`, which read as zeros from then on. Only for slabs
    /// without objects, and heads of regions without slabs.
    pub(crate) fn punch(&self, at: usize, pages: usize) -> io::Result<()> {
        assert!(at.is_multiple_of(PAGE) && at + pages * PAGE <= self.layout.len);
        if pages == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, at as u64, (pages * PAGE) as u64)?)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, and what was handed out borrows `self`.
        // Unmapping our own mapping cannot fail, and drop could not report it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.layout.len) };
        // Fails for no lock of ours.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::{Options, Store};
    use std::os::fd::AsFd;

    /// As a process has it that another thread is just starting.
    #[test]
    fn a_copy_of_its_descriptor_does_not_keep_a_store_that_was_dropped() {
        let store = Store::create(16, Options { reserve: 0, ..Options::default() }).unwrap();
        let (fd, copy) = (store.fd().try_clone_to_owned(), store.heap.map.file.try_clone());
        let (fd, copy) = (fd.unwrap(), copy.unwrap());
        assert!(Store::attach(fd.as_fd(), Options::default()).is_err(), "it has a server");
        drop(store);
        Store::attach(fd.as_fd(), Options::default()).unwrap();
        drop(copy);
    }
}
