//! The process that listens on a socket, also if the socket's file is gone.
//!
//! A cleaner of /run may remove a device's sockets and the lock on its name. Then no file tells
//! that the device lives, but the kernel lists its socket with the path to which it was bound.

use super::place::{place, Place};
use std::fs;
use std::path::{Path, PathBuf};

/// The process that listens on a socket that it has bound to `path`. `None` if there is none, or if
/// this user may not look at that process: for one of its own user or for root this is the answer.
pub(super) fn listener(path: &Path) -> Option<u32> {
    let table = fs::read("/proc/net/unix").ok()?;
    let inodes = bound(&String::from_utf8_lossy(&table), &path.to_string_lossy());
    if inodes.is_empty() {
        return None;
    }
    let folder = place(path.parent()?)?;
    let entries = fs::read_dir("/proc").ok()?.filter_map(Result::ok);
    let mut processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.find(|&pid| has_one_of(pid, &inodes) && calls_by(pid, path) == Some(folder))
}

/// The links of descriptors to the listening sockets at `path` in the kernel's table.
fn bound(table: &str, path: &str) -> Vec<PathBuf> {
    /// `__SO_ACCEPTCON`: the socket listens.
    const LISTENS: &str = "00010000";
    let of = |line: &str| {
        // Num, RefCount, Protocol, Flags, Type, St, Inode, Path. The path may have spaces in it.
        let (fields, bound) = line.split_once(" /").map(|(fields, rest)| (fields, Some(rest)))?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let [_, _, _, LISTENS, _, _, inode] = fields[..] else { return None };
        (bound == path.strip_prefix('/')).then(|| format!("socket:[{inode}]").into())
    };
    table.lines().filter_map(of).collect()
}

fn has_one_of(pid: u32, inodes: &[PathBuf]) -> bool {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().filter_map(Result::ok);
    fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|link| inodes.contains(&link))
}

/// The folder that this process calls by the name of `path`'s folder: in a container of its own it
/// is another one.
fn calls_by(pid: u32, path: &Path) -> Option<Place> {
    let folder = path.parent()?.strip_prefix("/").ok()?;
    place(&Path::new(&format!("/proc/{pid}/root")).join(folder))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
    use std::time::{Duration, Instant};

    /// A process that another test starts has copies of all descriptors until its `execve`.
    pub(in crate::device::claims) fn wait_until_none_listens(path: &Path) {
        let deadline = Instant::now() + Duration::from_secs(300);
        while let Some(pid) = listener(path) {
            assert!(Instant::now() < deadline, "process {pid} listens on {}", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_listening_socket_is_found_without_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("of a device.sock");
        assert_eq!(listener(&path), None);
        let listening = UnixListener::bind(&path).unwrap();
        // A connection has the path, too.
        let _connected = UnixStream::connect(&path).unwrap();
        assert_eq!(listener(&path), Some(std::process::id()));
        fs::remove_file(&path).unwrap();
        assert_eq!(listener(&path), Some(std::process::id()));
        assert_eq!(listener(&folder.path().join("of a device.soc")), None);
        drop(listening);
        wait_until_none_listens(&path);
        let _datagrams = UnixDatagram::bind(&path).unwrap();
        assert_eq!(listener(&path), None);
    }

    /// As in a container that shares the host's network.
    #[test]
    fn a_folder_of_the_same_name_is_not_the_same_folder() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("run");
        fs::create_dir(&folder).unwrap();
        let own = Path::new("/proc/self/root");
        let there = place(&own.join(folder.strip_prefix("/").unwrap()));
        assert_eq!(calls_by(std::process::id(), &folder.join("x.sock")), there);
        assert_eq!(there, place(&folder));
        assert_eq!(calls_by(std::process::id(), Path::new("x.sock")), None);
    }

    #[test]
    fn the_kernels_lines_are_read() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
             000000001b8a3b06: 00000002 00000000 00010000 0001 01 17 /run/platen/a b.sock\n\
             000000001b8a3b06: 00000003 00000000 00000000 0001 03 18 /run/platen/a b.sock\n\
             000000001b8a3b06: 00000002 00000000 00010000 0001 01 19 @/run/platen/a b.sock\n\
             000000001b8a3b06: 00000002 00000000 00010000 0001 01 20 /run/platen/a b.sock2\n\
             000000001b8a3b06: 00000003 00000000 00000000 0001 03 21\n";
        assert_eq!(bound(table, "/run/platen/a b.sock"), [PathBuf::from("socket:[17]")]);
        assert!(bound("", "/x").is_empty());
    }
}
