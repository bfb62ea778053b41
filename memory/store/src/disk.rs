//! The backing device as the store sees it: blocks of 4096 bytes.

use std::fmt;
use std::io;

use rustix::io::Errno;

use crate::layout::PAGE;

/// One block, aligned for direct I/O.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; PAGE]);

impl Block {
    /// A block of zeros.
    pub const ZERO: Self = Self([0; PAGE]);
}

/// Stores and returns blocks. Implementations do not allocate: errors carry errnos.
pub trait Disk: fmt::Debug + Send + Sync {
    /// The number of blocks that the device has now.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    fn blocks(&self) -> io::Result<u64>;

    /// Reads one block. If another thread writes the block meanwhile, any bytes may result.
    ///
    /// # Errors
    ///
    /// The kernel's error; `UnexpectedEof` for a block beyond the end.
    fn read(&self, block: u32, out: &mut Block) -> io::Result<()>;

    /// Writes adjacent blocks. After it returns, the blocks survive a kill of this process, but not
    /// a crash of the host.
    ///
    /// # Errors
    ///
    /// The kernel's error; then some of the blocks may be written.
    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()>;

    /// Bytes free to other users on the device's file system; `None` if the device is not a file.
    fn free(&self) -> Option<u64> {
        None
    }

    /// Whether the device bypasses the page cache.
    fn is_direct(&self) -> bool {
        true
    }

    /// Whether the file was never written to; `None` where only reading all of it could tell.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    fn is_hole(&self) -> io::Result<Option<bool>> {
        Ok(None)
    }

    /// Extends the file to the configured size, once it is known to be this store's.
    ///
    /// # Errors
    ///
    /// The kernel's error.
    fn make_room(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Why a file or block device cannot be a backing device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// Another server has the lock.
    #[error("another server has it")]
    InUse,
    /// The kernel refused exclusive access: the block device is mounted, used for swap, part of an
    /// array, or another server has it.
    #[error("it is mounted, swapped to, a part of another device, or another server's")]
    Claimed,
    /// The path is a directory, a pipe or a character device.
    #[error("it is neither a file nor a block device")]
    Kind,
    /// There is no device of this name below /dev: a file created there would be in memory.
    #[error("there is no such device, and no file is made below /dev")]
    NoDevice,
    /// The file's file system is in memory.
    #[error("it is on {0}, which is memory itself")]
    Memory(&'static str),
    /// The file's file system is a network's or another process's. It may report a write as done
    /// before it is, or never.
    #[error("it is on {0}: a network or another process stands between it and a disk")]
    Remote(&'static str),
    /// Writing to the device may need memory, and swap writes to it in order to free memory.
    #[error("it is {0}, which may need memory to be written to: with --swap it must be a disk or a partition")]
    Swap(&'static str),
    /// The kernel refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// An error's errno; 0 for the end of the file, `EIO` if the error has none.
pub(crate) fn number_of(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        Some(errno) => errno,
        None if error.kind() == io::ErrorKind::UnexpectedEof => 0,
        None => Errno::IO.raw_os_error(),
    }
}

/// The text of an errno.
pub(crate) fn name_of(errno: i32) -> String {
    match errno {
        0 => "it ends before that".to_owned(),
        _ => io::Error::from_raw_os_error(errno).to_string(),
    }
}
