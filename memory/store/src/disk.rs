//! What pages are written back to: a file or a block device, in blocks of 4096 bytes.

use std::fmt;
use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{fadvise, fdatasync, flock, fstatvfs, Advice, FlockOperation, OFlags, StatFs};
use rustix::io::Errno;

use crate::layout::PAGE;
use crate::rings::Rings;

/// One block, aligned as direct I/O wants it.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; PAGE]);

impl Block {
    /// Of zeros.
    pub const ZERO: Self = Self([0; PAGE]);
}

/// Where blocks are written to and read from. Nothing here allocates: errors are the kernel's
/// numbers.
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

    /// Writes blocks that lie one behind the other. When it returns they are there for whoever
    /// opens it next, though this process is killed; not if the host is.
    ///
    /// # Errors
    ///
    /// The kernel's; some of them may be written then.
    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()>;

    /// Bytes that others may still store on the file system that it is in; `None` if it is in none.
    fn free(&self) -> Option<u64>;

    /// Whether it goes around the page cache.
    fn is_direct(&self) -> bool;

    /// Whether nothing was ever written to it, where that can be known without reading all of it.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn is_hole(&self) -> io::Result<Option<bool>> {
        Ok(None)
    }

    /// Makes it as long as it is wanted, now that it is known to be ours to write.
    ///
    /// # Errors
    ///
    /// The kernel's.
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
    /// Somebody has claimed the block device: a mount, swap, an array, another server.
    #[error("it is mounted, swapped to, a part of another device, or another server's")]
    Claimed,
    /// A folder, a pipe, a character device.
    #[error("it is neither a file nor a block device")]
    Kind,
    /// A name below /dev that nothing has: made, it would be a file in memory.
    #[error("there is no such device, and no file is made below /dev")]
    NoDevice,
    /// Its file system keeps files in memory.
    #[error("it is on {0}, which is memory itself")]
    Memory(&'static str),
    /// Its file system is somebody else's, who may say that a write is done before it is, or never.
    #[error("it is on {0}: a network or another process stands between it and a disk")]
    Remote(&'static str),
    /// It may need memory to be written to, and that is what writing to it is to make.
    #[error("it is {0}, which may need memory to be written to: with --swap it must be a disk or a partition")]
    Swap(&'static str),
    /// The kernel refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// File systems that keep nothing on a disk of this machine, by the numbers that statfs(2) has, and
/// whether they keep it in memory.
const UNFIT: [(u32, &str, bool); 14] = [
    (0x0102_1994, "tmpfs", true),
    (0x8584_58f6, "ramfs", true),
    (0x9584_58f6, "hugetlbfs", true),
    (0x6969, "NFS", false),
    (0x517b, "SMB", false),
    (0xff53_4d42, "CIFS", false),
    (0xfe53_4d42, "SMB", false),
    (0x0102_1997, "9P", false),
    (0x6573_5546, "FUSE", false),
    (0x00c3_6400, "Ceph", false),
    (0x5346_414f, "AFS", false),
    (0x6b41_4653, "AFS", false),
    (0x7375_7245, "Coda", false),
    (0x0bd0_0bd0, "Lustre", false),
];

/// Majors of block devices that are not a disk of their own: devices(4).
const RAM_DISK: u32 = 1;
const LOOP: u32 = 7;
const NBD: u32 = 43;

/// A file or a block device.
///
/// Opened for direct I/O where that is possible: a page cache would use the memory that is to be
/// freed. Where it is not (a file system that knows none) each write is followed by its data's way
/// to the disk, and the cache is told to forget. Who waits for it can be killed, where the kernel
/// has io_uring for us (`rings.rs`).
#[derive(Debug)]
pub struct FileDisk {
    file: File,
    direct: bool,
    in_file_system: bool,
    /// Whether it was made when it was opened.
    made: bool,
    /// Bytes that the file is to have.
    size: u64,
    rings: Option<Rings>,
}

impl FileDisk {
    /// Opens `path`, and locks it against other servers until all copies of its
    /// [descriptor](Self::fd) are closed; a block device is claimed from mounts and everything else
    /// as well. A file that is not there is made, for its owner alone. Nothing is written; one
    /// shorter than `size` bytes gets as long when it is
    /// [formatted](crate::format_backing), without using the room yet.
    ///
    /// # Errors
    ///
    /// [`DiskError`].
    pub fn open(path: &Path, size: u64) -> Result<Self, DiskError> {
        let mut made = false;
        let file = match fs::metadata(path) {
            Ok(found) => {
                in_file_system(found.file_type())?;
                // Without O_CREAT it means that nobody else may have claimed the block device, or
                // will as long as it is open; for a file it means nothing.
                let exclusive = i32::try_from(OFlags::EXCL.bits()).expect("a low bit");
                let file =
                    OpenOptions::new().read(true).write(true).custom_flags(exclusive).open(path);
                file.map_err(|error| match error.kind() {
                    io::ErrorKind::ResourceBusy => DiskError::Claimed,
                    _ => error.into(),
                })?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                made = true;
                Self::create(path)?
            }
            Err(error) => return Err(error.into()),
        };
        // It may be another by now.
        if in_file_system(file.metadata()?.file_type())? {
            fit(&rustix::fs::fstatfs(&file).map_err(io::Error::from)?)?;
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(DiskError::InUse),
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        let disk = Self { size, made, ..Self::of(file)? };
        disk.go_direct();
        Ok(Self { direct: disk.try_direct(), ..disk })
    }

    fn create(path: &Path) -> Result<File, DiskError> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        // A mistyped name of a disk.
        if folder.canonicalize()?.starts_with("/dev") {
            return Err(DiskError::NoDevice);
        }
        fit(&rustix::fs::statfs(folder).map_err(io::Error::from)?)?;
        let mut options = OpenOptions::new();
        Ok(options.read(true).write(true).create_new(true).mode(0o600).open(path)?)
    }

    /// Whether pages that are swapped out may go on to it: a file's file system asks for memory
    /// when it is written to (for its tree, its journal, a block to a place that had none), a loop
    /// device's does, a network may.
    ///
    /// # Errors
    ///
    /// [`DiskError::Swap`] if not.
    pub fn check_for_swap(&self) -> Result<(), DiskError> {
        if self.in_file_system {
            return Err(DiskError::Swap("a file"));
        }
        match rustix::fs::major(self.file.metadata()?.rdev()) {
            RAM_DISK => Err(DiskError::Memory("a RAM disk")),
            LOOP => Err(DiskError::Swap("a loop device")),
            NBD => Err(DiskError::Swap("a network block device")),
            _ => Ok(()),
        }
    }

    /// The one that `fd` is, which whoever left it to us has [opened](Self::open) and locked; it is
    /// used as they left it.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn inherit(fd: BorrowedFd<'_>) -> Result<Self, DiskError> {
        // Nothing here waits for the disk, which need not answer just now: not even to open it.
        let disk = Self::of(fd.try_clone_to_owned()?.into())?;
        let direct = rustix::fs::fcntl_getfl(&disk.file).map_err(io::Error::from)?;
        Ok(Self { direct: direct.contains(OFlags::DIRECT), ..disk })
    }

    fn of(file: File) -> Result<Self, DiskError> {
        let in_file_system = in_file_system(file.metadata()?.file_type())?;
        let rings = Rings::new();
        Ok(Self { file, direct: false, in_file_system, made: false, size: 0, rings })
    }

    /// Whether the file was not there when it was [opened](Self::open), and was made.
    pub fn was_made(&self) -> bool {
        self.made
    }

    /// Whether who waits for it can be killed meanwhile.
    pub fn is_killable(&self) -> bool {
        self.rings.is_some()
    }

    fn read_some(&self, out: &mut [u8], at: u64) -> io::Result<usize> {
        let by_ring = self.rings.as_ref().and_then(|rings| {
            rings.read(self.file.as_raw_fd(), out, at).filter(|done| !is_refused(done))
        });
        by_ring.unwrap_or_else(|| self.file.read_at(out, at))
    }

    fn write_some(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let by_ring = self.rings.as_ref().and_then(|rings| {
            rings.write(self.file.as_raw_fd(), bytes, at).filter(|done| !is_refused(done))
        });
        by_ring.unwrap_or_else(|| self.file.write_at(bytes, at))
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
        // Any other error is the disk's, and may pass.
        let refused = self.file.read_at(&mut block.0, 0);
        if refused.is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
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
        let (at, mut done) = (u64::from(block) * PAGE as u64, 0);
        while done < PAGE {
            match self.read_some(&mut out.0[done..], at + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()> {
        let (at, mut done) = (u64::from(block) * PAGE as u64, 0);
        let bytes = bytes_of(blocks);
        while done < bytes.len() {
            match self.write_some(&bytes[done..], at + done as u64) {
                Ok(0) => return Err(Errno::IO.into()),
                Ok(written) => done += written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
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

    fn is_hole(&self) -> io::Result<Option<bool>> {
        if !self.in_file_system {
            return Ok(None);
        }
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(0)) {
            Err(Errno::NXIO) => Ok(Some(true)),
            // Where the file system knows of no holes all of it is data.
            Ok(_) | Err(Errno::INVAL) => Ok(Some(self.file.metadata()?.len() == 0)),
            Err(errno) => Err(errno.into()),
        }
    }

    fn make_room(&self) -> io::Result<()> {
        if self.in_file_system && self.file.metadata()?.len() < self.size {
            self.file.set_len(self.size)?;
        }
        Ok(())
    }
}

/// Whether a file of this kind is in a file system, or is a block device.
fn in_file_system(kind: FileType) -> Result<bool, DiskError> {
    if !kind.is_file() && !kind.is_block_device() {
        return Err(DiskError::Kind);
    }
    Ok(kind.is_file())
}

/// Whether what is written to a file there comes to a disk.
fn fit(at: &StatFs) -> Result<(), DiskError> {
    let found = UNFIT.iter().find(|(number, ..)| {
        // Some have it with its sign.
        i128::from(at.f_type) & 0xffff_ffff == i128::from(*number)
    });
    match found {
        None => Ok(()),
        Some((_, name, true)) => Err(DiskError::Memory(name)),
        Some((_, name, false)) => Err(DiskError::Remote(name)),
    }
}

/// Whether a ring did not do it that another way may do.
fn is_refused(done: &io::Result<usize>) -> bool {
    let errno = done.as_ref().err().and_then(io::Error::raw_os_error).map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::AGAIN | Errno::INVAL | Errno::OPNOTSUPP | Errno::CANCELED))
}

#[expect(unsafe_code, reason = "an array of arrays of bytes is bytes")]
fn bytes_of(blocks: &[Block]) -> &[u8] {
    // SAFETY: a block is 4096 bytes and as long as its alignment, so that there is nothing between
    // them.
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
