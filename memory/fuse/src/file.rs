//! The file system, with its one file, for fuser.

use crate::disk::Disk;
use device::{Op, Queue, PAGE};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyOpen, ReplyWrite,
    Request, TimeOrNow, WriteFlags,
};
use std::io;
use std::process;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Validity of attributes: they never change.
const ALWAYS: Duration = Duration::from_secs(3600);
/// Maximum request size: that of a loop device, and small enough for a buffer per thread.
const LARGEST: u32 = 1 << 20;
/// fallocate(2).
const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 16;

/// Aborts the process when a request panics, because the request would be half done and its disk
/// lost.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            process::abort();
        }
    }
}

/// The file, with as many disks as threads, so that one is always free.
pub(crate) struct File<Q> {
    bytes: u64,
    disks: Mutex<Vec<Disk<Q>>>,
}

impl<Q: Queue> File<Q> {
    pub(crate) fn new(pages: u64, queues: Vec<Q>) -> Self {
        let disks = Mutex::new(queues.into_iter().map(Disk::new).collect());
        Self { bytes: pages * PAGE as u64, disks }
    }

    /// Lends a disk to `work`.
    fn with<T>(
        &self,
        work: impl FnOnce(&mut Disk<Q>) -> Result<T, device::Errno>,
    ) -> Result<T, Errno> {
        let _abort = AbortOnPanic;
        let lock = || self.disks.lock().unwrap_or_else(PoisonError::into_inner);
        let disk = lock().pop();
        let mut disk = disk.ok_or(Errno::EIO)?;
        let done = work(&mut disk);
        lock().push(disk);
        done.map_err(|error| Errno::from_i32(error.raw()))
    }

    fn attributes(&self) -> FileAttr {
        FileAttr {
            ino: INodeNo::ROOT,
            size: self.bytes,
            blocks: self.bytes / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: FileType::RegularFile,
            perm: 0o600,
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl<Q: Queue> Filesystem for File<Q> {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // The kernel may set a smaller limit.
        let _ = config.set_max_write(LARGEST);
        Ok(())
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&ALWAYS, &self.attributes());
    }

    /// Size, mode and owner are fixed: a change would have no effect. Times are accepted and
    /// ignored.
    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let own = self.attributes();
        let differs = |asked: Option<u32>, is: u32| asked.is_some_and(|asked| asked != is);
        // A mode has the file's type in its upper bits.
        let mode = mode.map(|mode| mode & 0o7777);
        if size.is_some_and(|size| size != self.bytes) {
            reply.error(Errno::EINVAL);
        } else if differs(mode, own.perm.into()) || differs(uid, own.uid) || differs(gid, own.gid) {
            reply.error(Errno::EPERM);
        } else {
            reply.attr(&ALWAYS, &own);
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let left = self.bytes.saturating_sub(offset);
        let len = usize::try_from(left.min(u64::from(size))).unwrap_or(0);
        if len == 0 {
            return reply.data(&[]);
        }
        let mut reply = Some(reply);
        let done = self.with(|disk| {
            let bytes = disk.read(offset, len)?;
            if let Some(reply) = reply.take() {
                reply.data(bytes);
            }
            Ok(())
        });
        if let (Err(error), Some(reply)) = (done, reply) {
            reply.error(error);
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let left = self.bytes.saturating_sub(offset);
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(data.len());
        if len == 0 && !data.is_empty() {
            return reply.error(Errno::EFBIG);
        }
        match self.with(|disk| disk.write(offset, &data[..len])) {
            // A request's length has 32 bits.
            Ok(()) => reply.written(u32::try_from(len).unwrap_or(0)),
            Err(error) => reply.error(error),
        }
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let op = match mode & !KEEP_SIZE {
            PUNCH_HOLE => Op::Discard,
            ZERO_RANGE => Op::WriteZeroes { keep: true },
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        let end = offset.checked_add(length).filter(|end| *end <= self.bytes);
        // Beyond the end there is a hole already.
        let length = match end {
            Some(_) => length,
            None if op == Op::Discard => self.bytes.saturating_sub(offset),
            None => return reply.error(Errno::EFBIG),
        };
        match self.with(|disk| disk.zero(op, offset, length)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    /// Does nothing: a completed write is already stored.
    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }
}
