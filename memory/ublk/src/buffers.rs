//! The buffers to and from which the kernel copies requests' bytes. All buffers of a device are in
//! one memfd, allocated and locked before the first request.
//!
//! A memfd, so that the supervisor, which has a copy of the descriptor, can pass the same memory to
//! the server that replaces a dead one: when memory is short there is none for a second set.
#![expect(unsafe_code, reason = "maps memory and points into it")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{ftruncate, memfd_create, MemfdFlags};
use rustix::mm::{mlock, mmap, munmap, MapFlags, ProtFlags};

use crate::geometry::Geometry;

/// A device's buffers: one for each tag of each queue.
///
/// Ownership rule: a tag's buffer belongs to the kernel while the tag is fetching, and to the
/// backend from a request's arrival until its completion; nothing else makes references into it.
#[derive(Debug)]
pub struct Buffers {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    depth: u16,
    max_io: u32,
}

// SAFETY: the mapping has no thread affinity, and `at` only computes addresses; the ownership rule
// says who may use the memory when.
unsafe impl Send for Buffers {}
// SAFETY: as above; there is no interior state.
unsafe impl Sync for Buffers {}

impl Buffers {
    /// Bytes of a device's buffers.
    pub fn len_of(geometry: &Geometry) -> u64 {
        u64::from(geometry.queues) * u64::from(geometry.depth) * u64::from(geometry.max_io)
    }

    /// Makes the buffers of a device, and allocates all their memory.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn new(geometry: &Geometry) -> io::Result<Self> {
        Self::adopt(Self::file(geometry)?, geometry)
    }

    /// Makes a file for the buffers, which has no memory yet.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    pub fn file(geometry: &Geometry) -> io::Result<OwnedFd> {
        let fd = memfd_create("platen-buffers", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, Self::len_of(geometry))?;
        Ok(fd)
    }

    /// Takes over buffers that another server made for the same geometry, or for more queues.
    ///
    /// # Errors
    ///
    /// The file is too short; the kernel's error.
    pub fn adopt(fd: OwnedFd, geometry: &Geometry) -> io::Result<Self> {
        let found = u64::try_from(rustix::fs::fstat(&fd)?.st_size).map_err(io::Error::other)?;
        let len = Self::check_len(found, geometry)?;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, &fd, 0)
        }?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let buffers = Self { fd, base, len, depth: geometry.depth, max_io: geometry.max_io };
        // SAFETY: the range is the mapping just made.
        if let Err(error) = unsafe { mlock(base.as_ptr().cast(), len) } {
            // Unlocked buffers are not fit for swap; the check reports that.
            if error != rustix::io::Errno::NOMEM && error != rustix::io::Errno::PERM {
                return Err(error.into());
            }
        }
        Ok(buffers)
    }

    /// The bytes that buffers of this geometry take of a file of `found` bytes.
    ///
    /// # Errors
    ///
    /// The file is too short.
    pub(crate) fn check_len(found: u64, geometry: &Geometry) -> io::Result<usize> {
        let wanted = Self::len_of(geometry);
        // A file for more queues than the driver then granted is longer.
        if found < wanted || wanted == 0 {
            return Err(io::Error::other(format!(
                "the buffers have {found} bytes, a device of this geometry has {wanted}"
            )));
        }
        usize::try_from(wanted).map_err(io::Error::other)
    }

    /// The file, for the supervisor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The start of a tag's buffer.
    ///
    /// # Panics
    ///
    /// If the device has no such queue or tag.
    pub(crate) fn at(&self, queue: u16, tag: u16) -> NonNull<u8> {
        let size = self.max_io as usize;
        let nth = usize::from(queue) * usize::from(self.depth) + usize::from(tag);
        assert!(tag < self.depth && (nth + 1) * size <= self.len, "queue {queue}, tag {tag}");
        // SAFETY: within the mapping by the assertion.
        unsafe { self.base.add(nth * size) }
    }
}

impl Buffers {
    /// The first `len` bytes of a tag's buffer, for the tag's current request.
    ///
    /// # Panics
    ///
    /// If the device has no such queue or tag, or `len` exceeds the buffer.
    pub(crate) fn request(&self, queue: u16, tag: u16, len: usize) -> device::Buffer {
        assert!(len <= self.max_io as usize, "{len} bytes of a buffer of {}", self.max_io);
        // SAFETY: within the mapping, which outlives the queue's backend, and initialised, as a
        // file's memory is. By the ownership rule the kernel does not use it from the request's
        // arrival until the request is committed, which is when it is complete.
        unsafe { device::Buffer::new(self.at(queue, tag).as_ptr(), len) }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and by the ownership rule no request is in flight.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { size: 1 << 20, queues: 2, depth: 4, max_io: 8192 };

    #[test]
    fn each_tag_has_its_own_and_the_next_server_sees_the_same() {
        let first = Buffers::new(&GEOMETRY).unwrap();
        for queue in 0..2u16 {
            for tag in 0..4u16 {
                let mark = u8::try_from(queue * 4 + tag + 1).unwrap();
                // SAFETY: a whole buffer, which nothing else uses.
                unsafe { first.at(queue, tag).write_bytes(mark, 8192) };
            }
        }
        let fd = first.fd().try_clone_to_owned().unwrap();
        drop(first);
        let second = Buffers::adopt(fd, &GEOMETRY).unwrap();
        for queue in 0..2u16 {
            for tag in 0..4u16 {
                // SAFETY: within the buffer.
                let last = unsafe { second.at(queue, tag).add(8191) };
                // SAFETY: mapped, and nothing writes it.
                let mark = unsafe { last.read() };
                assert_eq!(u16::from(mark), queue * 4 + tag + 1);
            }
        }
    }

    #[test]
    fn buffers_of_another_geometry_are_refused() {
        let first = Buffers::new(&GEOMETRY).unwrap();
        let fd = first.fd().try_clone_to_owned().unwrap();
        let error = Buffers::adopt(fd, &Geometry { depth: 8, ..GEOMETRY }).unwrap_err();
        assert!(error.to_string().contains("65536"), "{error}");
    }
}
