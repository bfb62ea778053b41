//! Unix sockets by QEMU's notation, `unix:PATH`.

use crate::error::RelayError;
use rustix::fs::{fchmod, Mode};
use rustix::net::{
    bind, listen, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType,
};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// Linux keeps 108 bytes for the path, the closing NUL included.
const MAX_PATH: usize = 107;
/// How often a connect is tried again while the destination QEMU is not listening yet.
const RETRY: Duration = Duration::from_millis(50);

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
    /// The path alone.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Refuses a path where something other than a socket lives. Nothing there is fine: QEMU may not be up yet.
    ///
    /// # Errors
    /// The path names a file, a directory, ... .
    pub fn check_target(&self) -> Result<(), RelayError> {
        match fs::metadata(&self.0) {
            Ok(found) if !found.file_type().is_socket() => {
                Err(RelayError::NotASocket { address: self.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// Listens, for the owner alone (mode 0600). A socket that a dead process left behind is replaced.
    ///
    /// # Errors
    /// Somebody listens there, something other than a socket lives there, or the path cannot be made.
    pub fn listen(&self) -> Result<Listening, RelayError> {
        self.check_target()?;
        let failed = |source| RelayError::Listen { address: self.to_string(), source };
        if fs::symlink_metadata(&self.0).is_ok() {
            match UnixStream::connect(&self.0) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    fs::remove_file(&self.0).map_err(failed)?;
                }
                Ok(_) => {
                    return Err(failed(io::Error::new(
                        ErrorKind::AddrInUse,
                        "another process listens there",
                    )))
                }
                Err(error) => return Err(failed(error)),
            }
        }
        let listener = bind_private(&self.0).map_err(failed)?;
        Ok(Listening { listener, path: self.0.clone() })
    }

    /// Connects, trying again for `patience` while nobody listens.
    ///
    /// # Errors
    /// Nobody listens in time, or the path is no socket.
    pub fn connect(
        &self,
        patience: Duration,
        stop: impl Fn() -> bool,
    ) -> Result<UnixStream, RelayError> {
        self.check_target()?;
        let until = Instant::now() + patience;
        loop {
            match UnixStream::connect(&self.0) {
                Ok(stream) => return Ok(stream),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::ConnectionRefused
                    ) && Instant::now() < until
                        && !stop() =>
                {
                    std::thread::sleep(RETRY);
                }
                Err(source) => {
                    return Err(RelayError::Deliver { address: self.to_string(), source })
                }
            }
        }
    }
}

/// Binds and listens, for the owner alone from the first moment: the path gets its mode from the socket's own, which is
/// set before there is a path (unix(7) has Linux's rule; a mode set behind `bind` would come too late for somebody).
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    // QEMU opens up to 257 connections in a row.
    listen(&socket, 512)?;
    Ok(socket.into())
}

/// A listening socket; its path goes when it does.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub listener: UnixListener,
    path: PathBuf,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Somebody else may have removed it; nothing is lost either way.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_unix_paths_that_fit_are_taken() {
        assert!("unix:/run/x.sock".parse::<UnixAddress>().is_ok());
        assert!("/run/x.sock".parse::<UnixAddress>().unwrap_err().contains("unix:PATH"));
        assert!("unix:".parse::<UnixAddress>().is_err());
        assert!(format!("unix:/{}", "x".repeat(107))
            .parse::<UnixAddress>()
            .unwrap_err()
            .contains("108"));
    }

    #[test]
    fn a_file_is_refused_a_stale_socket_replaced_and_a_live_one_left() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        let file = UnixAddress::from(file);
        assert!(matches!(file.listen(), Err(RelayError::NotASocket { .. })));
        assert!(matches!(
            file.connect(Duration::ZERO, || false),
            Err(RelayError::NotASocket { .. })
        ));

        let path = dir.path().join("sock");
        drop(UnixListener::bind(&path).unwrap());
        let address = UnixAddress::from(path.clone());
        let live = address.listen().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(address.listen().unwrap_err().to_string().contains("listen"));
        drop(live);
        assert!(!path.exists());
    }
}
