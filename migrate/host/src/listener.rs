//! The listening socket of a door, TCP or unix, and the connections there.

use crate::acl;
use crate::peer_user::AllowedUsers;
use relay::{QemuSocket, UnixAddress};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::chmod;
use rustix::net::sockopt::{set_socket_recv_buffer_size, socket_domain};
use rustix::net::AddressFamily;
use std::error::Error;
use std::fs::DirBuilder;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Connections that the kernel holds until they are accepted: QEMU opens up to 257 in a row.
pub(crate) const BACKLOG: i32 = 512;
/// Receive buffer of a TCP connection, bytes. QEMU counts bytes that the kernel has accepted as
/// sent, and bytes in the buffer when the VM stops add to its downtime. With the kernel's own sizes
/// 18 MiB were under way between two processes. With this size it is 5 MiB, which is QEMU's own
/// send buffer (`tcp_wmem`).
pub(crate) const BUFFER: usize = 256 << 10;
/// Mode of a folder that other users may pass through, but not list.
const PASS: u32 = 0o711;
/// Mode of a folder in which each user may remove only his own files. The group's place is the mask
/// of the access control list.
const OWN_FILES: u32 = 0o1770;

#[cfg(test)]
thread_local! {
    /// How often this thread has called [`DoorListener::accept`].
    pub(crate) static ACCEPTS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// The address of a door.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DoorAddress {
    /// A port of a loopback address.
    Tcp(SocketAddr),
    /// The path of a unix socket.
    Unix(PathBuf),
}

impl std::fmt::Display for DoorAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The listening socket of a door. Its calls do not wait.
#[derive(Debug)]
pub enum DoorListener {
    /// TCP.
    Tcp(TcpListener),
    /// A unix socket.
    Unix(UnixListener),
}

impl DoorListener {
    /// Opens a door. Only `allowed` may connect to a unix socket.
    pub(crate) fn open(address: &DoorAddress, allowed: &AllowedUsers) -> io::Result<Self> {
        match address {
            DoorAddress::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                // Its connections inherit the size.
                set_socket_recv_buffer_size(&listener, BUFFER)?;
                rustix::net::listen(&listener, BACKLOG)?;
                Ok(Self::Tcp(listener))
            }
            DoorAddress::Unix(path) => {
                if let Some(folder) = path.parent() {
                    make_folder(folder)?;
                }
                // Only this user may connect until the other users get their rights.
                let listening = UnixAddress::from(path.clone()).listen().map_err(cause)?;
                let listener = listening.into_socket()?;
                listener.set_nonblocking(true)?;
                admit(path, allowed)?;
                Ok(Self::Unix(listener))
            }
        }
    }

    /// Accepts the next connection.
    pub(crate) fn accept(&self) -> io::Result<QemuSocket> {
        #[cfg(test)]
        ACCEPTS.set(ACCEPTS.get() + 1);
        match self {
            Self::Tcp(listener) => Ok(listener.accept()?.0.into()),
            Self::Unix(listener) => Ok(listener.accept()?.0.into()),
        }
    }

    /// The address at which the socket listens.
    pub(crate) fn address(&self) -> io::Result<DoorAddress> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(DoorAddress::Tcp),
            Self::Unix(listener) => {
                let path = listener.local_addr()?.as_pathname().map(Path::to_owned);
                path.map(DoorAddress::Unix).ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
            }
        }
    }

    /// Duplicates the descriptor of the socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Tcp(listener) => listener.try_clone().map(Self::Tcp),
            Self::Unix(listener) => listener.try_clone().map(Self::Unix),
        }
    }

    pub(crate) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => listener.set_nonblocking(true),
            Self::Unix(listener) => listener.set_nonblocking(true),
        }
    }
}

impl From<OwnedFd> for DoorListener {
    fn from(fd: OwnedFd) -> Self {
        if is_unix(&fd) {
            Self::Unix(fd.into())
        } else {
            Self::Tcp(fd.into())
        }
    }
}

impl AsFd for DoorListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

fn is_unix(fd: &OwnedFd) -> bool {
    matches!(socket_domain(fd), Ok(AddressFamily::UNIX))
}

/// Wraps a connection that another process has accepted.
pub fn connection(fd: OwnedFd) -> QemuSocket {
    if is_unix(&fd) {
        UnixStream::from(fd).into()
    } else {
        TcpStream::from(fd).into()
    }
}

/// Lets these users connect to a unix socket.
pub(crate) fn admit(path: &Path, allowed: &AllowedUsers) -> io::Result<()> {
    acl::grant(path, acl::List::Own, &allowed.0, acl::READ_WRITE)
}

/// Makes a folder, and those above it, through which all users may pass, whatever the umask is. One
/// that exists stays as it is.
pub(crate) fn make_passage(folder: &Path) -> io::Result<()> {
    // The folder above a relative path of one part is named by no bytes.
    if folder.is_dir() || folder.as_os_str().is_empty() {
        return Ok(());
    }
    if let Some(above) = folder.parent() {
        make_passage(above)?;
    }
    match DirBuilder::new().mode(PASS).create(folder) {
        // Another process has made it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.and_then(|()| Ok(chmod(folder, PASS.into())?)),
    }
}

/// Makes a folder of unix sockets, and the folder above it, so that all users may pass through
/// both.
fn make_folder(folder: &Path) -> io::Result<()> {
    let above = folder.parent().unwrap_or(folder);
    DirBuilder::new().recursive(true).mode(PASS).create(folder)?;
    let me = rustix::process::geteuid().as_raw();
    for folder in [above, folder] {
        let found = folder.symlink_metadata()?;
        if !found.is_dir() || ![0, me].contains(&found.uid()) || found.mode() & 0o002 != 0 {
            return Err(io::Error::other(format!(
                "{} is no folder that only root and the service may change (user {}, mode {:o}): \
                 give another socket_dir",
                folder.display(),
                found.uid(),
                found.mode() & 0o7777
            )));
        }
        // The service manager makes the first one for the service alone.
        if found.uid() == me && found.mode() & 0o777 == 0o700 {
            chmod(folder, PASS.into())?;
        }
    }
    Ok(())
}

/// Makes the folder in which this host's own QEMUs listen. `allowed` may make sockets there, and
/// the service may connect to them. A QEMU cannot replace a link of root, which leads to another
/// QEMU.
///
/// # Errors
/// The folder cannot be made, or belongs to another user.
pub fn make_own_folder(folder: &Path, allowed: &AllowedUsers) -> io::Result<()> {
    make_folder(folder)?;
    let me = rustix::process::geteuid().as_raw();
    acl::grant(folder, acl::List::Own, &allowed.0, acl::ALL)?;
    chmod(folder, OWN_FILES.into())?;
    acl::grant(folder, acl::List::OfNewFiles, &[me], acl::ALL)
}

/// Turns an error with its causes into an error of the system.
fn cause(error: impl Error) -> io::Error {
    let text = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    io::Error::other(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unix_door_is_for_the_allowed_and_takes_the_place_of_a_dead_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sockets/b/1");
        let address = DoorAddress::Unix(path.clone());
        let allowed = AllowedUsers(vec![0, 64055]);
        for _ in 0..2 {
            let door = DoorListener::open(&address, &allowed).unwrap();
            assert_eq!(door.address().unwrap(), address);
            let found = path.metadata().unwrap();
            // The group's place in the mode is the mask of the list; others have no right.
            assert_eq!(found.mode() & 0o777, 0o660);
            assert_eq!(path.parent().unwrap().metadata().unwrap().mode() & 0o777, 0o711);
            let second = DoorListener::open(&address, &allowed).unwrap_err();
            assert!(second.to_string().contains("another process listens"), "{second}");
            drop(door);
            // Until the next service has it, its path leads to nobody.
            assert!(path.exists());
        }
    }

    #[test]
    fn a_qemu_makes_sockets_in_the_folder_of_its_host_and_replaces_no_link_of_root() {
        let folder = tempfile::tempdir().unwrap();
        chmod(folder.path(), PASS.into()).unwrap();
        let own = folder.path().join("a");
        let qemu = 64055;
        for _ in 0..2 {
            make_own_folder(&own, &AllowedUsers(vec![0, qemu])).unwrap();
            assert_eq!(own.metadata().unwrap().mode() & 0o7777, 0o1770);
        }
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can act as another user");
        }
        let (link, socket) = (own.join("1"), own.join("2"));
        std::os::unix::fs::symlink("/nonexistent", &link).unwrap();
        let as_qemu = || {
            let user = rustix::thread::Uid::from_raw(qemu);
            // Of this thread only.
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            let replaced = std::fs::remove_file(&link).map_err(|error| error.kind());
            drop(UnixListener::bind(&socket).unwrap());
            (replaced, std::fs::remove_file(&socket))
        };
        let (replaced, removed) = std::thread::scope(|scope| scope.spawn(as_qemu).join().unwrap());
        assert_eq!(replaced, Err(io::ErrorKind::PermissionDenied));
        removed.unwrap();
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let error = make_own_folder(Path::new("/proc/self"), &AllowedUsers(vec![0])).unwrap_err();
        assert!(error.to_string().contains("is no folder"), "{error}");
        // A folder of all is not made one of the service.
        let folder = tempfile::tempdir().unwrap();
        chmod(folder.path(), 0o1777.into()).unwrap();
        let error = make_own_folder(&folder.path().join("a"), &AllowedUsers(vec![0])).unwrap_err();
        assert!(error.to_string().contains("mode 1777"), "{error}");
        assert_eq!(folder.path().metadata().unwrap().mode() & 0o7777, 0o1777);
    }
}
