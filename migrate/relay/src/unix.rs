//! Unix sockets in QEMU's notation, `unix:PATH`.

use crate::error::RelayError;
use rustix::fs::{fchmod, flock, open, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    bind, connect, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType,
};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Linux has 108 bytes for the path, including the closing NUL.
const MAX_PATH: usize = 107;
/// How often a connect is retried while the destination QEMU does not listen yet.
const RETRY: Duration = Duration::from_millis(50);
/// How long to wait for the folder's lock: its holder makes only a few system calls.
const LOCKED: Duration = Duration::from_secs(2);

/// `unix:PATH`, as QEMU writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnixAddress(PathBuf);

impl FromStr for UnixAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text
            .strip_prefix("unix:")
            .ok_or_else(|| format!("'{text}' is not an address of the form unix:PATH"))?;
        if path.is_empty() || path.len() > MAX_PATH {
            return Err(format!(
                "the path in '{text}' has {} bytes, allowed are 1 to {MAX_PATH}",
                path.len()
            ));
        }
        Ok(Self(PathBuf::from(path)))
    }
}

impl std::fmt::Display for UnixAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unix:{}", self.0.display())
    }
}

impl From<PathBuf> for UnixAddress {
    fn from(path: PathBuf) -> Self {
        Self(path)
    }
}

impl UnixAddress {
    /// The path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Refuses a path at which a file other than a socket exists. A path without a file is
    /// accepted: QEMU may not be up yet.
    ///
    /// # Errors
    /// The path names a file, a directory, ... .
    pub(crate) fn check_target(&self) -> Result<(), RelayError> {
        match fs::metadata(&self.0) {
            Ok(found) if !found.file_type().is_socket() => {
                Err(RelayError::NotASocket { address: self.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// Listens, for the owner alone (mode 0600). Replaces a socket that a dead process left behind.
    /// Never waits for a process that already listens there.
    ///
    /// # Errors
    /// A process listens there, a file other than a socket exists there, or the socket cannot be
    /// created.
    pub fn listen(&self) -> Result<Listening, RelayError> {
        let failed = |source| RelayError::Listen { address: self.to_string(), source };
        let len = self.0.as_os_str().len();
        if len > MAX_PATH {
            let what = format!("its path has {len} bytes, allowed are {MAX_PATH}");
            return Err(failed(io::Error::new(ErrorKind::InvalidFilename, what)));
        }
        if self.check_target().is_err() {
            return Err(RelayError::InTheWay { address: self.to_string() });
        }
        let _lock = lock_folder_of(&self.0);
        if let Some(found) = Place::of(&self.0) {
            match self.connect_now() {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    found.remove(&self.0).map_err(|error| failed(self.foreign(error)))?;
                }
                Ok(_) => return Err(failed(in_use("another process listens there"))),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let what = "another process listens there, and takes no connections";
                    return Err(failed(in_use(what)));
                }
                // The socket's owner has removed it meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(failed(self.foreign(error))),
            }
        }
        let listener = bind_private(&self.0).map_err(failed)?;
        Ok(Listening { listener, place: Place::of(&self.0), path: self.0.clone() })
    }

    /// The error with its remedy, if it forbids this process to replace another user's socket.
    fn foreign(&self, error: io::Error) -> io::Error {
        let me = rustix::process::geteuid().as_raw();
        match fs::symlink_metadata(&self.0).map(|found| found.uid()) {
            Ok(owner) if owner != me && error.kind() == ErrorKind::PermissionDenied => {
                let what = format!(
                    "{error}: user {owner} has made the socket there, and this process is user {me}. If no \
                     process listens there any more, remove it as root or as user {owner}: rm {}",
                    self.0.display()
                );
                io::Error::new(error.kind(), what)
            }
            _ => error,
        }
    }

    /// Connects without waiting.
    ///
    /// # Errors
    /// The kernel's error; `WouldBlock` if the backlog is full.
    pub fn connect_now(&self) -> io::Result<UnixStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(&self.0)?)?;
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    /// Connects; retries for `patience` while no process listens or accepts. Does not connect once
    /// `stop` returns true.
    ///
    /// # Errors
    /// No process listens or accepts in time, or the path is not a socket.
    pub fn connect(
        &self,
        patience: Duration,
        stop: impl Fn() -> bool,
    ) -> Result<UnixStream, RelayError> {
        self.check_target()?;
        let until = Instant::now() + patience;
        let failed = |source| RelayError::Deliver { address: self.to_string(), source };
        loop {
            if stop() {
                return Err(failed(ErrorKind::Interrupted.into()));
            }
            match self.connect_now() {
                Ok(stream) => return Ok(stream),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
                    ) && Instant::now() < until =>
                {
                    std::thread::sleep(RETRY);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let what = "as many connections wait there as may, and nobody accepts them";
                    return Err(failed(io::Error::new(ErrorKind::TimedOut, what)));
                }
                Err(source) => return Err(failed(source)),
            }
        }
    }
}

/// Binds and listens, for the owner alone from the first moment: the path gets its mode from the
/// socket, whose mode is set before the path exists (unix(7) describes Linux's rule). A mode set
/// after `bind` would leave a moment in which other users could connect.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    // QEMU opens up to 257 connections in a row.
    listen(&socket, 512)?;
    Ok(socket.into())
}

fn in_use(what: &str) -> io::Error {
    io::Error::new(ErrorKind::AddrInUse, what)
}

/// Prevents other platen processes from listening in the folder of `path` and from removing files
/// there, until dropped. Without it another process could replace a socket after this one has
/// checked the socket and before it removes it. Leaves no file behind. Returns `None` if the folder
/// cannot be read, or if another process holds the lock for too long.
fn lock_folder_of(path: &Path) -> Option<OwnedFd> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = open(folder.unwrap_or(Path::new(".")), flags, Mode::empty()).ok()?;
    let until = Instant::now() + LOCKED;
    loop {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(folder),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => return None,
        }
    }
}

/// The identity of the file at a path: device and inode. While a socket is open, its inode is not
/// reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    device: u64,
    inode: u64,
}

impl Place {
    fn of(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok()?;
        Some(Self { device: found.dev(), inode: found.ino() })
    }

    /// Removes `path` if it still leads to this file.
    fn remove(self, path: &Path) -> io::Result<()> {
        if Self::of(path) == Some(self) {
            fs::remove_file(path)
        } else {
            Ok(())
        }
    }
}

/// A listening socket. Dropping it removes its path, unless the path leads to another file by then.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub listener: UnixListener,
    place: Option<Place>,
    path: PathBuf,
}

impl Listening {
    /// The address of the socket.
    pub fn address(&self) -> UnixAddress {
        UnixAddress(self.path.clone())
    }

    /// The file of the socket, by device and inode, for [`adopt`](Self::adopt).
    pub fn place(&self) -> Option<(u64, u64)> {
        self.place.map(|place| (place.device, place.inode))
    }

    /// Adopts a listener that this process inherited from the program that ran in it before.
    pub fn adopt(listener: UnixListener, address: &UnixAddress, place: Option<(u64, u64)>) -> Self {
        let place = place.map(|(device, inode)| Place { device, inode });
        Self { listener, place, path: address.0.clone() }
    }

    /// The socket alone, for passing copies to other processes. Its path stays when this is
    /// dropped.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn into_socket(mut self) -> io::Result<UnixListener> {
        self.place = None;
        self.listener.try_clone()
    }

    /// Whether the path still leads to this socket: another process may have removed or replaced
    /// it.
    pub fn is_ours(&self) -> bool {
        self.place.is_some_and(|place| Place::of(&self.path) == Some(place))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _lock = lock_folder_of(&self.path);
        // Another process may have removed it; nothing is lost either way.
        let _ = self.place.map(|place| place.remove(&self.path));
    }
}

#[cfg(test)]
mod tests;
