//! A block device as a single file: FUSE, mounted over a regular file.
//!
//! With `losetup` that file becomes a disk on kernels that have neither ublk nor the NBD client. It
//! is **not for swap**: the kernel allocates memory for each FUSE request, and waits for it.
//!
//! ```text
//!  read, write, fallocate ─► kernel ─► /dev/fuse ─► session threads (fuser), ─► device
//!  of PATH                                          a disk queue each
//! ```
//!
//! The mount point is a regular file, and so is the root of the mount: it has the device's size and
//! no directory around it. The kernel does not cache its contents (`FOPEN_DIRECT_IO`). Hole
//! punching is a discard and zeroing a range a write-zeroes request; loop devices send both. A
//! write of part of a page patches that page (`Queue::patch`). fuser implements the protocol (FUSE
//! 7.6 and later; a descriptor per thread needs Linux 4.5).
//!
//! # What fails
//!
//! A read of a damaged page fails with EIO, a write without memory with ENOSPC. A write at or
//! beyond the end fails with EFBIG; a write across the end is short. Another file size fails with
//! EINVAL. After a kill of the process the file fails with ENOTCONN until it is served again. The
//! next server removes the dead mount; processes with the file open must reopen it. A panic in a
//! request aborts the process: otherwise a lost thread and its request would go unnoticed.
//!
//! # Limits
//! At most [`THREADS`] requests at a time, those included that wait for a backing device: as many
//! reads of one that does not answer stop all others. fuser allocates for requests, so a debug
//! build's guard of I/O threads is not active here.

mod disk;
mod file;
mod mounts;

use crate::mounts::Watched;
use device::{Backend, Device};
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::fs::{statx, AtFlags, StatxFlags, CWD};
use rustix::io::Errno;
use rustix::mount::{unmount, UnmountFlags};
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// Maximum number of session threads: loop devices seldom have more requests in flight.
pub const THREADS: usize = 8;

/// How often, and at which interval, an unmount looks whether the session's threads have ended: for
/// a second, or longer on a busy machine, where these threads get no more CPU than the looks.
const LOOKS: u32 = 200;
const LOOK: Duration = Duration::from_millis(5);

/// Why the file cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The mount point is not a regular file.
    #[error("{path} is no regular file, and FUSE is to serve one")]
    NotAFile {
        /// The mount point.
        path: PathBuf,
    },
    /// The file is not empty: mounting would hide its contents.
    #[error("{path} holds {bytes} bytes, which serving there would hide")]
    NotEmpty {
        /// The mount point.
        path: PathBuf,
        /// The size of the file, bytes.
        bytes: u64,
    },
    /// A dead mount cannot be removed, or the file cannot be created.
    #[error("cannot prepare {path}")]
    Prepare {
        /// The mount point.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The device has no more queues.
    #[error("cannot open a queue of the device")]
    Queue(#[source] io::Error),
    /// The mount failed.
    #[error("cannot mount {path} by FUSE (it takes root, or fusermount3, and /dev/fuse)")]
    Mount {
        /// The mount point.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A served file, until it is stopped or dropped.
#[derive(Debug)]
pub struct Server {
    session: BackgroundSession,
    path: PathBuf,
    mount: Option<Watched>,
}

impl Server {
    /// Serves `backend` as the file `path`, created if it is missing, by `threads` threads (1 to
    /// [`THREADS`]).
    ///
    /// # Errors
    /// See [`MountError`]. A file created here is removed again.
    pub fn mount<B: Backend>(backend: &B, path: &Path, threads: usize) -> Result<Self, MountError> {
        let made = prepare(path)?;
        let mounted = Self::mount_on(backend, path, threads);
        if made && mounted.is_err() {
            // No process has used the file; one may have removed it.
            let _ = fs::remove_file(path);
        }
        mounted
    }

    /// [`mount`](Self::mount) of a device. Its code, on the path of each page, belongs to this
    /// crate, while the caller's may be compiled for size.
    ///
    /// # Errors
    /// The errors of `mount`.
    pub fn mount_device(device: &Device, path: &Path, threads: usize) -> Result<Self, MountError> {
        Self::mount(device, path, threads)
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

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether serving has ended: the file was unmounted, or its threads have failed.
    /// [`Server::stop`] tells which of these happened.
    pub fn has_ended(&self) -> bool {
        self.session.guard.is_finished()
    }

    /// Waits until mounts change, at most for `wait`. Returns whether the file is still mounted,
    /// and true if that cannot be determined. After `umount -l`, processes that have the file open
    /// are still served; its path is then the empty file beneath the mount.
    pub fn is_mounted(&mut self, wait: Duration) -> bool {
        match &mut self.mount {
            Some(mount) => mount.is_there(wait),
            None => {
                thread::sleep(wait);
                true
            }
        }
    }

    /// Gives up a file that is no longer mounted. Processes that have it open are served until they
    /// close it, or this process ends.
    pub fn abandon(self) {
        std::mem::forget(self.session);
    }

    /// Unmounts the file, if it is still mounted. Returns true if a process still had it open; that
    /// process gets errors once this process ends.
    ///
    /// # Errors
    /// The unmount failed, or a thread failed while it served.
    pub fn stop(self) -> io::Result<bool> {
        if !self.has_ended() {
            match take_away(&self.path) {
                // Nothing is mounted there: another process has just unmounted it, or did so while
                // it was open.
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
                done => done?,
            }
            let mut looks = 0;
            while !self.has_ended() {
                looks += 1;
                if looks > LOOKS {
                    // The threads continue to serve processes that have the file open, perhaps by a
                    // copy of the mount in another namespace.
                    std::mem::forget(self.session);
                    return Ok(true);
                }
                thread::sleep(LOOK);
            }
        }
        end_of_connection(self.session.join()).map(|()| false)
    }
}

/// The result of the session threads, without the errors by which the kernel ends a connection.
///
/// fuser knows ENODEV as that end. A thread that has taken a request from the queue when the
/// unmount ends the connection gets ECONNABORTED instead (`fuse_dev_do_read`); the kernel has
/// answered that request, mostly the RELEASE of a file closed just before.
fn end_of_connection(joined: io::Result<()>) -> io::Result<()> {
    match joined {
        Err(error) if error.raw_os_error() == Some(Errno::CONNABORTED.raw_os_error()) => Ok(()),
        joined => joined,
    }
}

/// Unmounts `path` even if it is open. Without root, fusermount3 unmounts it, which mounted it.
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

/// Whether the mount at `path` is that of a server that was killed.
///
/// `stat` does not tell: the kernel has the size and mode of a dead file for an hour, if a process
/// has asked for them since the last read. With `FORCE_SYNC` it asks the server (FUSE, Linux 4.20
/// and later).
fn is_dead(path: &Path) -> bool {
    let asked = statx(CWD, path, AtFlags::STATX_FORCE_SYNC, StatxFlags::SIZE);
    asked.is_err_and(|error| error == Errno::NOTCONN)
}

/// Ensures that there is an empty regular file. Returns true if it was created.
fn prepare(path: &Path) -> Result<bool, MountError> {
    let failed = |source| MountError::Prepare { path: path.into(), source };
    if is_dead(path) {
        take_away(path).map_err(failed)?;
    }
    match fs::metadata(path) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_ends_during_a_request_has_not_failed() {
        let error = |errno: Errno| Err(io::Error::from_raw_os_error(errno.raw_os_error()));
        assert!(end_of_connection(Ok(())).is_ok());
        assert!(end_of_connection(error(Errno::CONNABORTED)).is_ok());
        assert!(end_of_connection(error(Errno::IO)).is_err());
    }
}
