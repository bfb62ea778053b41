//! What pages are written back to: a file or a block device, in blocks of 4096 bytes.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{fadvise, fdatasync, flock, fstatvfs, Advice, FlockOperation, OFlags};
use rustix::io::Errno;

use crate::layout::PAGE;

/// One block, aligned as direct I/O wants it.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; PAGE]);

impl Block {
    /// Of zeros.
    pub const ZERO: Self = Self([0; PAGE]);
}

/// Where blocks are written to and read from. Nothing here allocates: errors are the kernel's numbers.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Blocks that it has now.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn blocks(&self) -> io::Result<u64>;

    /// Reads one block. Another thread may write it meanwhile: then any bytes may come.
    ///
    /// # Errors
    ///
    /// The kernel's; `UnexpectedEof` for one that is not there.
    fn read(&self, block: u32, out: &mut Block) -> io::Result<()>;

    /// Writes blocks that lie one behind the other. When it returns they are there for whoever opens it next,
    /// though this process is killed; not if the host is.
    ///
    /// # Errors
    ///
    /// The kernel's; some of them may be written then.
    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()>;

    /// Bytes that others may still store on the file system that it is in; `None` if it is in none.
    fn free(&self) -> Option<u64>;

    /// Whether it goes around the page cache.
    fn is_direct(&self) -> bool;
}

/// A file or a block device.
///
/// Opened for direct I/O where that is possible: a page cache would use the memory that is to be freed. Where it is
/// not (a file system that knows none) each write is followed by its data's way to the disk, and the cache is told
/// to forget.
#[derive(Debug)]
pub struct FileDisk {
    file: File,
    direct: bool,
    in_file_system: bool,
}

impl FileDisk {
    /// Opens `path`, and locks it against other servers until all copies of its
    /// [descriptor](Self::fd) are closed. A file that is not there is made, for its owner alone; one shorter than
    /// `size` bytes is made as long, without using the room yet.
    ///
    /// # Errors
    ///
    /// The kernel's; [`io::ErrorKind::WouldBlock`] if another server has it, and
    /// [`io::ErrorKind::InvalidInput`] if it is neither a file nor a block device.
    pub fn open(path: &Path, size: u64) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(errno) => return Err(errno.into()),
        }
        let disk = Self::of(file)?;
        if disk.in_file_system && disk.file.metadata()?.len() < size {
            disk.file.set_len(size)?;
        }
        disk.go_direct();
        Ok(Self { direct: disk.try_direct(), ..disk })
    }

    /// The one that `fd` is, which whoever left it to us has [opened](Self::open) and locked; the lock is this
    /// process's as long as it leaves `fd` open.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn inherit(fd: BorrowedFd<'_>) -> io::Result<Self> {
        // An opening of its own, so that its flags are not those of others.
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let disk = Self::of(OpenOptions::new().read(true).write(true).open(path)?)?;
        disk.go_direct();
        Ok(Self { direct: disk.try_direct(), ..disk })
    }

    fn of(file: File) -> io::Result<Self> {
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(Errno::INVAL.into());
        }
        Ok(Self { file, direct: false, in_file_system: kind.is_file() })
    }

    fn go_direct(&self) {
        if let Ok(flags) = rustix::fs::fcntl_getfl(&self.file) {
            // Refused by file systems that cannot.
            let _ = rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT);
        }
    }

    /// Whether direct I/O works in blocks of ours; it is off again if not.
    fn try_direct(&self) -> bool {
        let Ok(flags) = rustix::fs::fcntl_getfl(&self.file) else { return false };
        if !flags.contains(OFlags::DIRECT) {
            return false;
        }
        let mut block = Box::new(Block::ZERO);
        if self.file.read_at(&mut block.0, 0).is_err() {
            let _ = rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT);
            return false;
        }
        true
    }

    /// The descriptor, to leave to a server that is to take over.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Disk for FileDisk {
    fn blocks(&self) -> io::Result<u64> {
        let len = if self.in_file_system {
            self.file.metadata()?.len()
        } else {
            (&self.file).seek(SeekFrom::End(0))?
        };
        Ok(len / PAGE as u64)
    }

    fn read(&self, block: u32, out: &mut Block) -> io::Result<()> {
        self.file.read_exact_at(&mut out.0, u64::from(block) * PAGE as u64)
    }

    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()> {
        let (at, mut done) = (u64::from(block) * PAGE as u64, 0);
        let bytes = bytes_of(blocks);
        while done < bytes.len() {
            match rustix::io::pwrite(&self.file, &bytes[done..], at + done as u64) {
                Ok(0) => return Err(Errno::IO.into()),
                Ok(written) => done += written,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        if !self.direct {
            fdatasync(&self.file)?;
            // Advice: whoever does not follow it keeps the memory.
            let len = std::num::NonZeroU64::new(bytes.len() as u64);
            let _ = fadvise(&self.file, at, len, Advice::DontNeed);
        }
        Ok(())
    }

    fn free(&self) -> Option<u64> {
        let stat = self.in_file_system.then(|| fstatvfs(&self.file).ok()).flatten()?;
        Some(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn is_direct(&self) -> bool {
        self.direct
    }
}

#[expect(unsafe_code, reason = "an array of arrays of bytes is bytes")]
fn bytes_of(blocks: &[Block]) -> &[u8] {
    // SAFETY: a block is 4096 bytes and as long as its alignment, so that there is nothing between them.
    unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast(), blocks.len() * PAGE) }
}

/// An error's number, 0 for the end of the file, EIO if the kernel did not say it.
pub(crate) fn number_of(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        Some(errno) => errno,
        None if error.kind() == io::ErrorKind::UnexpectedEof => 0,
        None => Errno::IO.raw_os_error(),
    }
}

/// What a number says.
pub(crate) fn name_of(errno: i32) -> String {
    match errno {
        0 => "it ends before that".to_owned(),
        _ => io::Error::from_raw_os_error(errno).to_string(),
    }
}
