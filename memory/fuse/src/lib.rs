//! A block device as a single file: FUSE, mounted over a regular file.
//!
//! With `losetup` that file becomes a disk on kernels that have neither ublk nor NBD's client. It
//! is **not for swap**: the kernel takes memory for each FUSE request, and waits for it.
//!
//! ```text
//!  read, write, fallocate of PATH ─► kernel ─► /dev/fuse ─► session threads (fuser), a disk queue each ─► device
//! ```
//!
//! The mount point is a regular file, and so is what is mounted: it has the device's size and no
//! directory around it. Nothing is cached on this side of it (`FOPEN_DIRECT_IO`). Holes punched and
//! ranges zeroed are discard and write-zeroes, which loop devices send as well. Bytes that are no
//! whole pages are patched into them. The wire is fuser's (FUSE 7.6 on, Linux 4.5 for a descriptor
//! each thread).
//!
//! # What fails
//! A read of a damaged page is EIO, a write without memory ENOSPC, beyond the end EFBIG or nothing;
//! another size of the file, EINVAL. When the process is killed the file answers ENOTCONN until it
//! is served again, which takes the dead mount away first; whoever had it open has to open it
//! again. A panic in a request ends the process: a thread less, and what it had in its hands, would
//! not be seen by anybody.
//!
//! # Limits
//! [`THREADS`] requests at a time at most. fuser allocates for requests, so that a debug build's guard of I/O threads
//! is not on here.

mod disk;
mod file;
mod mounts;

use crate::mounts::Watched;
use device::Backend;
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::io::Errno;
use rustix::mount::{unmount, UnmountFlags};
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The most session threads: what loop devices have under way is seldom more.
pub const THREADS: usize = 8;

/// How long who has the file open is waited for when it is unmounted.
const LETTING_GO: Duration = Duration::from_secs(1);

/// Why it cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The mount point is something else.
    #[error("{path} is no regular file, and FUSE is to serve one")]
    NotAFile {
        /// The mount point.
        path: PathBuf,
    },
    /// It is not empty: mounting would hide what it holds.
    #[error("{path} holds {bytes} bytes, which serving there would hide")]
    NotEmpty {
        /// The mount point.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// A mount that is dead cannot be taken away, or the file not be made.
    #[error("cannot prepare {path}")]
    Prepare {
        /// The mount point.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The device has no more queues.
    #[error("cannot open a queue of the device")]
    Queue(#[source] io::Error),
    /// The kernel does not mount it.
    #[error("cannot mount {path} by FUSE (it takes root, or fusermount3, and /dev/fuse)")]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A file that is served, until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    session: BackgroundSession,
    path: PathBuf,
    mount: Option<Watched>,
}

impl Server {
    /// Serves `backend` as the file `path`, which is made if it is not there, by `threads` threads
    /// (1 to [`THREADS`]).
    ///
    /// # Errors
    /// See [`MountError`]. A file that was made is removed again.
    pub fn mount<B: Backend>(backend: &B, path: &Path, threads: usize) -> Result<Self, MountError> {
        let made = prepare(path)?;
        let mounted = Self::mount_on(backend, path, threads);
        if made && mounted.is_err() {
            // Nobody has had it; somebody may have removed it.
            let _ = fs::remove_file(path);
        }
        mounted
    }

    fn mount_on<B: Backend>(backend: &B, path: &Path, threads: usize) -> Result<Self, MountError> {
        let path = path.canonicalize().map_err(|source| {
            let path = path.into();
            MountError::Prepare { path, source }
        })?;
        let threads = threads.clamp(1, THREADS);
        let queues: io::Result<Vec<_>> = (0..threads).map(|_| backend.open()).collect();
        let file = file::File::new(backend.pages(), queues.map_err(MountError::Queue)?);
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("platen".into()),
            MountOption::Subtype("platen".into()),
            MountOption::DefaultPermissions,
            MountOption::NoExec,
        ];
        config.acl = SessionACL::Owner;
        config.n_threads = Some(threads);
        config.clone_fd = true;
        let session = Session::new(file, &path, &config).and_then(Session::spawn);
        let session = session.map_err(|source| MountError::Mount { path: path.clone(), source })?;
        let mount = Watched::new(&path);
        Ok(Self { session, path, mount })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is served no more: somebody has unmounted it, or its threads have failed.
    /// [`Server::stop`] says which.
    pub fn has_ended(&self) -> bool {
        self.session.guard.is_finished()
    }

    /// Waits for so long, or until mounts have changed: whether it is still mounted. One that was
    /// unmounted while somebody has it open (`umount -l`) is served on for those; its path is the
    /// empty file beneath it. True where the kernel does not say.
    pub fn is_mounted(&mut self, wait: Duration) -> bool {
        match &mut self.mount {
            Some(mount) => mount.is_there(wait),
            None => {
                thread::sleep(wait);
                true
            }
        }
    }

    /// Leaves one that is mounted no more to those who still have it open: they are served until
    /// they close it, or this process ends.
    pub fn leave(self) {
        std::mem::forget(self.session);
    }

    /// Unmounts it, unless somebody has. True if somebody still had it open, who gets errors from
    /// when this process ends.
    ///
    /// # Errors
    /// The kernel's, of unmounting; those of the threads that have served it.
    pub fn stop(self) -> io::Result<bool> {
        if !self.has_ended() {
            match take_away(&self.path) {
                // Nothing is mounted there: somebody has just unmounted it, or did while others had
                // it open.
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
                done => done?,
            }
            let start = Instant::now();
            while !self.has_ended() {
                if start.elapsed() > LETTING_GO {
                    // Its threads go on for who has it open, perhaps by a copy of the mount in
                    // another namespace.
                    std::mem::forget(self.session);
                    return Ok(true);
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
        self.session.join().map(|()| false)
    }
}

/// Unmounts `path` even if somebody has it open; by fusermount3, which mounted it, for those who
/// are not root.
fn take_away(path: &Path) -> io::Result<()> {
    match unmount(path, UnmountFlags::DETACH) {
        Err(Errno::PERM) => {
            let done = Command::new("fusermount3").args(["-u", "-z", "--"]).arg(path).output()?;
            if done.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
            Err(io::Error::new(io::ErrorKind::PermissionDenied, said))
        }
        done => Ok(done?),
    }
}

/// Sees to it that there is an empty regular file. True if it was made.
fn prepare(path: &Path) -> Result<bool, MountError> {
    let failed = |source| MountError::Prepare { path: path.into(), source };
    let found = match fs::metadata(path) {
        Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {
            // Of a server that was killed.
            take_away(path).map_err(failed)?;
            fs::metadata(path)
        }
        found => found,
    };
    match found {
        Ok(found) if !found.is_file() => Err(MountError::NotAFile { path: path.into() }),
        Ok(found) if found.len() > 0 => {
            Err(MountError::NotEmpty { path: path.into(), bytes: found.len() })
        }
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let new = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            new.map(|_| true).map_err(failed)
        }
        Err(error) => Err(failed(error)),
    }
}
