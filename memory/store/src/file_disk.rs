//! A file or a block device as the backing device.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{fadvise, fdatasync, flock, fstatvfs, Advice, FlockOperation, OFlags, StatFs};
use rustix::io::Errno;

use crate::disk::{Block, Disk, DiskError};
use crate::layout::PAGE;
use crate::rings::Rings;

/// Magic numbers (statfs(2)) of file systems that are not on a disk of this machine, and whether
/// they are in memory.
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

/// Major numbers of block devices that are not disks of their own: devices(4).
const RAM_DISK: u32 = 1;
const LOOP: u32 = 7;
const NBD: u32 = 43;

/// A file or a block device.
///
/// Opened for direct I/O where possible: a page cache would use the memory that writeback is to
/// free. On a file system without direct I/O each write is followed by fdatasync, and the page
/// cache is dropped. A thread that waits for the disk can be killed if the kernel has io_uring
/// (`rings.rs`).
#[derive(Debug)]
pub struct FileDisk {
    file: File,
    direct: bool,
    in_file_system: bool,
    /// Whether [`open`](Self::open) created it.
    made: bool,
    /// The file's configured size in bytes.
    size: u64,
    rings: Option<Rings>,
}

impl FileDisk {
    /// Opens `path` and locks it against other servers until all copies of its
    /// [descriptor](Self::fd) are closed; a block device is also claimed against mounts and other
    /// users. A missing file is created with mode 0600. Nothing is written;
    /// [formatting](crate::format_backing) extends a file that is shorter than `size` bytes to that
    /// size, sparsely.
    ///
    /// # Errors
    ///
    /// [`DiskError`].
    pub fn open(path: &Path, size: u64) -> Result<Self, DiskError> {
        let mut made = false;
        let file = match fs::metadata(path) {
            Ok(found) => {
                in_file_system(found.file_type())?;
                // Without O_CREAT, O_EXCL claims a block device exclusively for as long as it is
                // open; for a file it has no effect.
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
        // The path may name another file by now.
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
        // The path is probably a mistyped name of a disk.
        if folder.canonicalize()?.starts_with("/dev") {
            return Err(DiskError::NoDevice);
        }
        fit(&rustix::fs::statfs(folder).map_err(io::Error::from)?)?;
        let mut options = OpenOptions::new();
        Ok(options.read(true).write(true).create_new(true).mode(0o600).open(path)?)
    }

    /// Checks that swapped-out pages may be written to the device. A file is refused, because its
    /// file system allocates memory for a write (for its tree, its journal, a new block). A loop
    /// device is refused, because it has a file system below it, and so is a network block device.
    ///
    /// # Errors
    ///
    /// [`DiskError::Swap`] if they may not.
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

    /// Adopts `fd`, which an earlier process [opened](Self::open) and locked, with its flags as
    /// they are.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn inherit(fd: BorrowedFd<'_>) -> Result<Self, DiskError> {
        // No call here waits for the disk, which may not answer just now: reopening it would.
        let disk = Self::of(fd.try_clone_to_owned()?.into())?;
        let direct = rustix::fs::fcntl_getfl(&disk.file).map_err(io::Error::from)?;
        Ok(Self { direct: direct.contains(OFlags::DIRECT), ..disk })
    }

    fn of(file: File) -> Result<Self, DiskError> {
        let in_file_system = in_file_system(file.metadata()?.file_type())?;
        let rings = Rings::new();
        Ok(Self { file, direct: false, in_file_system, made: false, size: 0, rings })
    }

    /// Whether [`open`](Self::open) created the file.
    pub fn was_made(&self) -> bool {
        self.made
    }

    /// Whether a thread that waits for the disk can be killed.
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
            // File systems without direct I/O refuse.
            let _ = rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT);
        }
    }

    /// Whether direct I/O works with our block size; if not, turns it off again.
    fn try_direct(&self) -> bool {
        let Ok(flags) = rustix::fs::fcntl_getfl(&self.file) else { return false };
        if !flags.contains(OFlags::DIRECT) {
            return false;
        }
        let mut block = Box::new(Block::ZERO);
        // Any other error is the disk's, and may be temporary.
        let refused = self.file.read_at(&mut block.0, 0);
        if refused.is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) {
            let _ = rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT);
            return false;
        }
        true
    }

    /// The descriptor, to pass to the server that takes over.
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
            // This is only advice: if the kernel ignores it, the pages stay in the page cache.
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
            // A file system without holes reports EINVAL or all of the file as data.
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

/// `true` for a file, `false` for a block device.
fn in_file_system(kind: FileType) -> Result<bool, DiskError> {
    if !kind.is_file() && !kind.is_block_device() {
        return Err(DiskError::Kind);
    }
    Ok(kind.is_file())
}

/// Whether writes to files on this file system reach a disk of this machine.
fn fit(at: &StatFs) -> Result<(), DiskError> {
    let found = UNFIT.iter().find(|(number, ..)| {
        // Some kernels sign-extend the number.
        i128::from(at.f_type) & 0xffff_ffff == i128::from(*number)
    });
    match found {
        None => Ok(()),
        Some((_, name, true)) => Err(DiskError::Memory(name)),
        Some((_, name, false)) => Err(DiskError::Remote(name)),
    }
}

/// Whether the ring failed for a reason that pread or pwrite may not have.
fn is_refused(done: &io::Result<usize>) -> bool {
    let errno = done.as_ref().err().and_then(io::Error::raw_os_error).map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::AGAIN | Errno::INVAL | Errno::OPNOTSUPP | Errno::CANCELED))
}

#[expect(unsafe_code, reason = "an array of arrays of bytes is bytes")]
fn bytes_of(blocks: &[Block]) -> &[u8] {
    // SAFETY: a block is 4096 bytes at an alignment of 4096, so there is no padding between blocks.
    unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast(), blocks.len() * PAGE) }
}
