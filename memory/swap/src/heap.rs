//! The heap of swap servers: memory that outlives each of them.
//!
//! A server that takes over cannot count on free memory, so its heap must be there before. A heap
//! for the server and another one for its stand-by server would double the memory that the device
//! takes from a small host. So there is one file of memory. The server's allocator uses it. The
//! stand-by server has it mapped and locked, and gives it to its own allocator once the server has
//! ended.
//!
//! ```text
//!  reserve   address space on the C library's heap, without memory and out of use
//!  map       the file elsewhere: present, locked, with page tables; neither read nor written
//!  adopt     moves the mapping onto the reserved addresses and frees them to the allocator
//! ```
//!
//! Both places begin at a multiple of 2 MiB, so that the kernel moves whole page tables and
//! allocates none. The last page table, if it is not full, exists for the heap's next page. The
//! former contents are never used: nothing on the new heap refers to them.
#![expect(unsafe_code, reason = "changes the mapping under the allocator's free memory")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::null_mut;

use rustix::fs::{
    fallocate, fcntl_add_seals, fstat, ftruncate, memfd_create, FallocateFlags, MemfdFlags,
    SealFlags,
};
use rustix::mm::{
    mmap, mmap_anonymous, mprotect, mremap_fixed, munmap, MapFlags, MprotectFlags, MremapFlags,
    ProtFlags,
};

/// Memory of one page table.
const BLOCK: usize = 2 << 20;

/// Memory of one page.
const PAGE: usize = 4096;

/// The header that the C library stores before each piece.
const HEADER: usize = 2 * size_of::<usize>();

/// A file for [`Heap::map`], at first without memory.
///
/// # Errors
///
/// The kernel's error.
pub fn file() -> io::Result<OwnedFd> {
    let file = memfd_create("platen-heap", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    // Truncating the file would kill the server.
    fcntl_add_seals(&file, SealFlags::SHRINK)?;
    Ok(file)
}

/// Frees the memory of a heap that no process uses. The kernel may have swapped it out since its
/// last server ended; it need not be read back.
///
/// # Errors
///
/// The kernel's error.
pub fn discard(file: impl AsFd) -> io::Result<()> {
    let len = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
    if len > 0 {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, flags, 0, len)?;
    }
    Ok(())
}

/// Reserved addresses on this process's heap, and the file's memory for them.
#[derive(Debug)]
pub struct Heap {
    /// The reserved piece of the C library's heap, allocated and inaccessible.
    reserved: *mut c_void,
    /// The mapping of the file.
    mapped: Option<*mut c_void>,
    /// Length in bytes, a multiple of [`PAGE`].
    len: usize,
}

impl Heap {
    /// Reserves addresses for `bytes` of memory, rounded up to pages. Call it before memory is
    /// locked and before there are threads, in a process started with [`KEEPING`](crate::KEEPING).
    ///
    /// # Errors
    ///
    /// The allocator's error or the kernel's; `Unsupported` if the allocator does not place one
    /// piece behind the other, as the GNU C library does.
    pub fn reserve(bytes: usize) -> io::Result<Self> {
        let len = bytes.next_multiple_of(PAGE);
        let first = allocate(len + 2 * BLOCK)?;
        let reserved = (first as usize + PAGE).next_multiple_of(BLOCK);
        // Shortened to end where the header of the reserved piece begins, and never freed.
        let padding = reserved - first as usize - size_of::<usize>();
        // SAFETY: allocated above.
        let before = unsafe { libc::realloc(first, padding) };
        let this = Self { reserved: allocate(len)?, mapped: None, len };
        if before != first || this.reserved as usize != reserved {
            // SAFETY: allocated above, and unused.
            unsafe { libc::free(this.reserved) };
            // SAFETY: as above.
            unsafe { libc::free(before) };
            let why = "the C library does not place pieces of memory one behind the other";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        // The header of the reserved piece is on the page before it.
        let unused = (first as usize).next_multiple_of(PAGE)..reserved - PAGE;
        forbid(unused.start as *mut c_void, unused.len())?;
        forbid(this.reserved, len)?;
        // Locking would fill the rest of the heap.
        // SAFETY: takes a number.
        unsafe { libc::malloc_trim(0) };
        Ok(this)
    }

    /// Maps the file, which is extended if it is shorter, and allocates its memory. With
    /// [`own`](crate::own) the memory is locked. The memory may be another process's heap, so it is
    /// not accessed.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn map(&mut self, file: impl AsFd) -> io::Result<()> {
        let wanted = self.len as u64;
        if u64::try_from(fstat(&file)?.st_size).is_ok_and(|len| len < wanted) {
            ftruncate(&file, wanted)?;
        }
        let range = self.len + BLOCK;
        let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(null_mut(), range, none, flags) }?;
        let aligned = (start as usize).next_multiple_of(BLOCK) as *mut c_void;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::POPULATE;
        // SAFETY: replaces a part of the mapping above, which nothing refers to.
        unsafe { mmap(aligned, self.len, both, flags, &file, 0) }?;
        let before = aligned as usize - start as usize;
        let after = (aligned as usize + self.len) as *mut c_void;
        if before > 0 {
            // SAFETY: the part of that mapping before the file's, which nothing refers to.
            unsafe { munmap(start, before) }?;
        }
        // SAFETY: the part after it.
        unsafe { munmap(after, BLOCK - before) }?;
        self.mapped = Some(aligned);
        Ok(())
    }

    /// Gives the memory to this process's allocator, for ever.
    ///
    /// # Errors
    ///
    /// The kernel's error; the heap is then as large as before.
    ///
    /// # Safety
    ///
    /// Every other process that has called `adopt` for this file has ended, so that none writes to
    /// the memory. No child of this process uses the heap before it executes another program.
    pub unsafe fn adopt(self) -> io::Result<()> {
        let Some(mapped) = self.mapped else { return Ok(()) };
        let flags = MremapFlags::MAYMOVE;
        // SAFETY: the reserved addresses are a piece of the heap that only this value refers to.
        unsafe { mremap_fixed(mapped, self.len, self.len, flags, self.reserved) }?;
        // SAFETY: allocated in `reserve`, and accessible again. The C library assumes nothing about
        // the contents of free memory.
        unsafe { libc::free(self.reserved) };
        Ok(())
    }
}

fn allocate(bytes: usize) -> io::Result<*mut c_void> {
    // SAFETY: takes a number.
    let piece = unsafe { libc::malloc(bytes) };
    if piece.is_null() {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    // `reserve` counts on it.
    debug_assert!((piece as usize).is_multiple_of(HEADER), "malloc aligns for every type");
    Ok(piece)
}

/// Makes a range inaccessible, so that locking memory does not fill it.
fn forbid(start: *mut c_void, len: usize) -> io::Result<()> {
    // SAFETY: whole pages inside a piece of the heap that its owner does not use.
    Ok(unsafe { mprotect(start, len, MprotectFlags::empty()) }?)
}
