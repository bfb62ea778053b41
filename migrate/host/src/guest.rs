//! Finds the name of the VM behind a socket on the command line of the QEMU that has the socket.
//!
//! The result is for messages and may be missing: a service that is not root sees no other user's
//! descriptors.

use crate::peer_user::{connection_owner, listener_owner, Owner};
use crate::unix_diag::unix_listeners;
use crate::wanted::wanted;
use relay::QemuSocket;
use rustix::net::sockopt::socket_peercred;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The most characters of a name that are returned.
const MAX_NAME: usize = 255;
/// How long the read of a command line may take.
const READ: Duration = Duration::from_secs(1);
/// The most command lines that are read at once: a user can keep every reader.
const READERS: usize = 8;
static READING: AtomicUsize = AtomicUsize::new(0);

/// The name of the VM whose QEMU has made this connection, or has got it from libvirt.
pub fn of_connection(socket: &QemuSocket) -> Option<String> {
    match socket {
        QemuSocket::Tcp(socket) => {
            let (own, other) = (socket.peer_addr().ok()?, wanted(socket).ok()?);
            of_socket(Path::new("/proc"), connection_owner(own, other).ok()??)
        }
        // The process that has connected is libvirt, unless QEMU needs further connections.
        QemuSocket::Unix(socket) => of_process(socket_peercred(socket).ok()?.pid.as_raw_pid()),
    }
}

/// The name of the VM whose QEMU alone listens at this path.
pub fn of_path(path: &Path) -> Option<String> {
    let [inode] = unix_listeners(path).ok()?[..] else { return None };
    of_socket(Path::new("/proc"), Owner { uid: fs::symlink_metadata(path).ok()?.uid(), inode })
}

/// The name of the VM of this process, if the process is a QEMU.
pub fn of_process(pid: i32) -> Option<String> {
    of_process_in(Path::new("/proc"), pid)
}

fn of_process_in(proc: &Path, pid: i32) -> Option<String> {
    let process = proc.join(pid.to_string());
    is_qemu(&process).then(|| name(&command_line(&process)?))?
}

/// The name of the VM whose QEMU listens at this address.
pub fn of_listener(address: SocketAddr) -> Option<String> {
    of_socket(Path::new("/proc"), listener_owner(address).ok()??)
}

fn of_socket(proc: &Path, owner: Owner) -> Option<String> {
    let socket = format!("socket:[{}]", owner.inode);
    // Other users may call any number of processes QEMU, with any number of descriptors. libvirt
    // connects as root and gives the socket to QEMU.
    let is_theirs = |process: &Path| {
        owner.uid == 0 || fs::metadata(process).is_ok_and(|it| it.uid() == owner.uid)
    };
    let processes = fs::read_dir(proc).ok()?.flatten();
    processes
        .map(|process| process.path())
        .filter(|process| is_theirs(process))
        .filter(|process| is_qemu(process))
        // Before the command line, which may never be answered. The descriptors always are.
        .filter(|process| has_socket(process, &socket))
        .find_map(|process| name(&command_line(&process)?))
}

/// The command line of this process. The kernel reads it from the process's memory, on which its
/// user can hold a lock for ever. So a thread of its own reads it, and no answer in time is none.
fn command_line(process: &Path) -> Option<Vec<u8>> {
    if READING.fetch_add(1, Ordering::AcqRel) >= READERS {
        READING.fetch_sub(1, Ordering::AcqRel);
        return None;
    }
    let (told, command) = mpsc::channel();
    let path = process.join("cmdline");
    let read = move || {
        let read = fs::read(path);
        READING.fetch_sub(1, Ordering::AcqRel);
        let _ = told.send(read);
    };
    if thread::Builder::new().name("name".into()).spawn(read).is_err() {
        READING.fetch_sub(1, Ordering::AcqRel);
        return None;
    }
    command.recv_timeout(READ).ok()?.ok()
}

fn is_qemu(process: &Path) -> bool {
    let comm = fs::read_to_string(process.join("comm")).unwrap_or_default();
    // The kernel cuts names to 15 bytes; distributions also say qemu-kvm and kvm.
    comm.starts_with("qemu") || comm.starts_with("kvm")
}

fn has_socket(process: &Path, socket: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(process.join("fd")) else { return false };
    descriptors
        .flatten()
        .any(|fd| fs::read_link(fd.path()).is_ok_and(|link| link.as_os_str() == socket))
}

/// Parses the VM's name from a command line of QEMU: `-name NAME` or `-name guest=NAME,...`.
fn name(command: &[u8]) -> Option<String> {
    let mut words = command.split(|byte| *byte == 0);
    words.find(|word| *word == b"-name")?;
    let given = String::from_utf8_lossy(words.next()?).into_owned();
    let first = given.split(',').next()?;
    let name = first.strip_prefix("guest=").unwrap_or(first);
    // Any local user can call a process QEMU, and give it a name of 128 KiB.
    (!name.is_empty()).then(|| name.chars().take(MAX_NAME).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{mkfifoat, CWD};
    use std::path::PathBuf;

    /// A /proc with one process, 4711. A read of its command line waits for a writer.
    fn made_proc() -> (tempfile::TempDir, PathBuf) {
        let proc = tempfile::tempdir().unwrap();
        let process = proc.path().join("4711");
        fs::create_dir(&process).unwrap();
        fs::write(process.join("comm"), "qemu\n").unwrap();
        mkfifoat(CWD, process.join("cmdline"), 0o600.into()).unwrap();
        (proc, process)
    }

    /// The name that `look` finds, unless it waits for that writer.
    fn found(look: impl FnOnce() -> Option<String> + Send + 'static) -> Option<String> {
        let (told, name) = mpsc::channel();
        thread::spawn(move || told.send(look()));
        name.recv_timeout(Duration::from_secs(60)).expect("it waits")
    }

    #[test]
    fn the_command_line_of_a_process_without_the_socket_is_not_waited_for() {
        let (proc, process) = made_proc();
        let uid = fs::metadata(&process).unwrap().uid();
        let proc = proc.path().to_owned();
        assert_eq!(found(move || of_socket(&proc, Owner { uid, inode: 1 })), None);
    }

    #[test]
    fn a_command_line_that_is_never_answered_costs_only_the_name() {
        let (proc, _process) = made_proc();
        let look = || {
            let proc = proc.path().to_owned();
            thread::spawn(move || found(move || of_process_in(&proc, 4711)))
        };
        let looks: Vec<_> = (0..2 * READERS).map(|_| look()).collect();
        looks.into_iter().for_each(|name| assert_eq!(name.join().unwrap(), None));
        assert_eq!(READING.load(Ordering::Acquire), READERS);
    }

    #[test]
    fn the_name_is_that_of_the_command_line() {
        let of = |command: &str| name(command.replace(' ', "\0").as_bytes());
        assert_eq!(of("qemu -name guest=g1,debug-threads=on -S"), Some("g1".into()));
        assert_eq!(of("qemu -S -name web"), Some("web".into()));
        assert_eq!(of("qemu -S"), None);
        assert_eq!(of("qemu -name"), None);
        let long = "x".repeat(9000);
        assert_eq!(of(&format!("qemu -name {long}")).map(|name| name.len()), Some(MAX_NAME));
    }
}
