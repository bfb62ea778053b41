//! Reads a settings file named by the user: it may be any kind of file.

use super::args::ServeArgs;
use super::inherited::{descriptor, Inherited};
use anyhow::{ensure, Context};
use rustix::fs::{fcntl_get_seals, open, Mode, OFlags};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Maximum size in bytes, a hundred times the size of all keys.
const MOST: usize = 64 << 10;

/// The text of a regular file of at most 64 KiB. Does not wait for a pipe's writer, and allocates
/// no more than that.
///
/// # Errors
/// The file is not a regular file, is larger, is not text, or cannot be read.
pub(crate) fn read(path: &Path) -> anyhow::Result<String> {
    text(path).with_context(|| format!("cannot read {}", path.display()))
}

/// The text of the policy's settings from the file, for a supervisor or a server without one.
pub(super) fn of(args: &ServeArgs) -> anyhow::Result<Option<String>> {
    args.policy.as_deref().map(read).transpose()
}

/// The text of the policy's settings, inherited from the supervisor.
pub(super) fn inherited(inherited: &Inherited) -> anyhow::Result<Option<String>> {
    let Some(number) = inherited.policy else { return Ok(None) };
    let file = File::from(descriptor(number)?);
    bounded(file).context("cannot read the policy's settings").map(Some)
}

/// The text in a file of [`share`]. Any other descriptor is refused: a pipe or a file of a network
/// would block the supervisor.
pub(super) fn shared(file: BorrowedFd<'_>) -> anyhow::Result<String> {
    // The kernel has seals for files in memory alone.
    let is_in_memory = fcntl_get_seals(file).is_ok();
    ensure!(is_in_memory, "the policy's settings are not in a file in memory (memfd)");
    // Opened once more, to read from the beginning.
    bounded(File::from(descriptor(file.as_raw_fd())?)).context("cannot read the policy's settings")
}

/// A file of this process with the text of a client's, and the text. The client's memory may lie on
/// the very disk whose servers read the text before they serve, and the client can still change it.
pub(super) fn keep(clients: OwnedFd) -> anyhow::Result<(OwnedFd, String)> {
    let text = shared(clients.as_fd())?;
    Ok((share(&text)?, text))
}

/// Creates a memfd with the settings, for servers.
pub(super) fn share(text: &str) -> anyhow::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("policy", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = File::from(fd);
    file.write_all(text.as_bytes())?;
    Ok(file.into())
}

fn text(path: &Path) -> anyhow::Result<String> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open(path, flags, Mode::empty())?);
    ensure!(file.metadata()?.is_file(), "it is not a regular file");
    bounded(file)
}

/// Reads from the file's present offset, up to the maximum size.
fn bounded(file: File) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    file.take(MOST as u64 + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() <= MOST, "it has more than {MOST} bytes");
    String::from_utf8(bytes).context("it is not text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let said = |path: &Path| format!("{:#}", read(path).unwrap_err());
        std::fs::write(&path, "[policy]\n".repeat(100)).unwrap();
        assert_eq!(read(&path).unwrap().len(), 900);
        std::fs::write(&path, vec![b'\n'; MOST]).unwrap();
        assert_eq!(read(&path).unwrap().len(), MOST);
        std::fs::write(&path, vec![b'\n'; MOST + 1]).unwrap();
        assert!(said(&path).contains("it has more than 65536 bytes"), "{}", said(&path));
        std::fs::write(&path, [0xff]).unwrap();
        assert!(said(&path).contains("it is not text"), "{}", said(&path));
        // A pipe without a writer, an endless file, a folder.
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        for path in [&pipe, Path::new("/dev/zero"), folder.path()] {
            assert!(said(path).ends_with("it is not a regular file"), "{}", said(path));
        }
        assert!(said(&folder.path().join("none")).contains("No such file"));
    }

    /// A supervisor that read from such a descriptor would wait for its writer.
    #[test]
    fn a_supervisor_takes_no_descriptor_that_may_block() {
        let (pipe, _writer) = std::io::pipe().unwrap();
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let on_disk = File::open(folder.path()).unwrap();
        for fd in [pipe.as_fd(), socket.as_fd(), on_disk.as_fd()] {
            let said = format!("{:#}", shared(fd).unwrap_err());
            assert!(said.contains("not in a file in memory"), "{said}");
        }
        assert_eq!(shared(share("[policy]\n").unwrap().as_fd()).unwrap(), "[policy]\n");
    }

    #[test]
    fn a_supervisor_keeps_its_own_copy_of_a_client_s_settings() {
        let clients = share("[policy]\n").unwrap();
        let mut writer = File::from(clients.try_clone().unwrap());
        let (kept, text) = keep(clients).unwrap();
        // Text written after the check reaches no server.
        writer.write_all(b"period = \"x\"\n").unwrap();
        assert_eq!(text, "[policy]\n");
        assert_eq!(shared(kept.as_fd()).unwrap(), "[policy]\n");
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        assert_ne!(inode(&kept), inode(&writer.into()));
    }
}
