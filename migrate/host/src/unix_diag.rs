//! The unix sockets that listen at a path, and those with an abstract name (`sock_diag`, as
//! `ss -lx` asks it).
//!
//! A QEMU that listens at the path of another QEMU first removes that path, and a connection then
//! reaches the second QEMU. Only the kernel's list shows that the first one is still waiting.
//! /proc/net/unix contains the same, but as lines of text, into which any user can write through
//! the name of a socket.

use crate::sock_diag::{ask, cut, BY_FAMILY, ERROR, HEADER};
use rustix::net::{recv, AddressFamily, RecvFlags, SocketType};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// `NLMSG_DONE`.
const DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`.
const DUMP: u16 = 0x301;
/// The sockets in state `TCP_LISTEN`.
const LISTENING: u32 = 1 << 10;
/// Those in state `TCP_CLOSE`: bound, but not listening.
const BOUND: u32 = 1 << 7;
/// `UDIAG_SHOW_NAME | UDIAG_SHOW_VFS | UDIAG_SHOW_RQLEN | UDIAG_SHOW_UID`, and the types of the
/// attributes that they request.
const SHOW: u32 = 0x53;
const NAME: u16 = 0;
const VFS: u16 = 1;
const QUEUES: u16 = 4;
const USER: u16 = 7;
/// Bytes of the question, and of the fixed part of an answer.
const QUESTION: usize = HEADER + 24;
const ANSWER: usize = HEADER + 16;
/// The most sockets of one path that are listed.
const MOST: usize = 64;

/// A socket that listens at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listening {
    pub(crate) inode: u64,
    /// How many connections may wait at the socket.
    pub(crate) backlog: Option<u32>,
}

/// The inodes of the sockets that listen at this path, whatever the folder is called, in the
/// caller's network namespace.
///
/// # Errors
/// The kernel does not tell.
pub fn unix_listeners(path: &Path) -> io::Result<Vec<u64>> {
    Ok(listeners(path)?.into_iter().map(|found| found.inode).collect())
}

/// The sockets that listen at this path, as for [`unix_listeners`].
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn listeners(path: &Path) -> io::Result<Vec<Listening>> {
    // The path may be a symbolic link to the path at which the process listens.
    let real = path.canonicalize();
    let path = real.as_deref().unwrap_or(path);
    let kernel = ask(&question(LISTENING))?;
    // The name is what its owner says, who may have mounted something else there for himself. The
    // kernel tells the file system that the socket is in, though not all name it as stat does.
    let folder = path.parent().unwrap_or(path).metadata().map(|folder| folder.dev());
    let Ok(device) = folder.map(kernels_number) else { return Ok(Vec::new()) };
    let (mut found, mut named) = (Vec::new(), Vec::new());
    let mut bytes = vec![0; 64 << 10];
    loop {
        let (got, _) = recv(&kernel, &mut bytes[..], RecvFlags::empty())?;
        let is_over = each(&bytes[..got], |name, place, listening| {
            if place == Some(device) && found.len() < MOST && is_same(name, path) {
                found.push(listening);
            } else if place != Some(device) && named.len() < MOST && name == path {
                named.push(listening);
            }
        })?;
        if is_over {
            return Ok(if found.is_empty() { named } else { found });
        }
    }
}

/// The user whose stream socket has this abstract name, whether it listens or not, in the caller's
/// network namespace; `None` if there is no such socket, or before Linux 5.3.
///
/// # Errors
/// The kernel does not tell.
pub fn abstract_owner(name: &[u8]) -> io::Result<Option<u32>> {
    let kernel = ask(&question(LISTENING | BOUND))?;
    let stream = u8::try_from(SocketType::STREAM.as_raw()).ok();
    let (mut found, mut bytes) = (None, vec![0; 64 << 10]);
    loop {
        let (got, _) = recv(&kernel, &mut bytes[..], RecvFlags::empty())?;
        let is_over = each_answer(&bytes[..got], |fixed, attributes| {
            let is_it = attribute(attributes, NAME).and_then(|it| it.strip_prefix(b"\0"));
            if fixed.get(1).copied() == stream && is_it == Some(name) {
                found = attribute(attributes, USER).and_then(|it| u32_at(it, 0));
            }
        })?;
        if is_over {
            return Ok(found);
        }
    }
}

/// A device as the kernel numbers it: 12 bits of major and 20 bits of minor number.
fn kernels_number(device: u64) -> u32 {
    rustix::fs::major(device) << 20 | rustix::fs::minor(device)
}

fn is_same(name: &Path, path: &Path) -> bool {
    if name.file_name() != path.file_name() {
        return false;
    }
    let folder = |path: &Path| path.parent().and_then(|folder| folder.canonicalize().ok());
    name == path || folder(name).is_some_and(|there| Some(there) == folder(path))
}

/// The question for the sockets in these states.
fn question(states: u32) -> [u8; QUESTION] {
    let mut bytes = [0; QUESTION];
    let mut at = 0;
    let mut put = |field: &[u8]| {
        bytes[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    };
    put(&u32::try_from(QUESTION).expect("40 bytes").to_ne_bytes());
    put(&BY_FAMILY.to_ne_bytes());
    put(&DUMP.to_ne_bytes());
    // Sequence number and port: the kernel sets the latter.
    put(&[0; 8]);
    // Family, protocol, padding.
    put(&[AddressFamily::UNIX.as_raw().to_ne_bytes()[0], 0, 0, 0]);
    put(&states.to_ne_bytes());
    // Any inode.
    put(&[0; 4]);
    put(&SHOW.to_ne_bytes());
    // No cookie.
    put(&[0xff; 8]);
    bytes
}

/// Calls `socket` for each socket with a path in a packet of the kernel. Returns true at the end of
/// the list.
pub(crate) fn each(
    bytes: &[u8],
    mut socket: impl FnMut(&Path, Option<u32>, Listening),
) -> io::Result<bool> {
    each_answer(bytes, |fixed, attributes| {
        let inode = u32_at(fixed, 4);
        let name = attribute(attributes, NAME).and_then(path);
        if let (Some(inode), Some(name)) = (inode, name) {
            let second = |kind| attribute(attributes, kind).and_then(|it| u32_at(it, 4));
            let (device, backlog) = (second(VFS), second(QUEUES));
            socket(&name, device, Listening { inode: inode.into(), backlog });
        }
    })
}

/// Calls `socket` with the fixed part and the attributes of each answer in a packet of the kernel.
/// Returns true at the end of the list.
fn each_answer(mut bytes: &[u8], mut socket: impl FnMut(&[u8], &[u8])) -> io::Result<bool> {
    while !bytes.is_empty() {
        let len = u32_at(bytes, 0).ok_or_else(cut)? as usize;
        let message = bytes.get(..len).filter(|_| len >= HEADER).ok_or_else(cut)?;
        match u16_at(message, 4).ok_or_else(cut)? {
            DONE => return Ok(true),
            ERROR => {
                let errno = u32_at(message, HEADER).ok_or_else(cut)?.cast_signed().wrapping_neg();
                return Err(io::Error::from_raw_os_error(errno));
            }
            BY_FAMILY => {
                let (fixed, attributes) = message.split_at_checked(ANSWER).ok_or_else(cut)?;
                socket(&fixed[HEADER..], attributes);
            }
            _ => {}
        }
        bytes = bytes.get(aligned(len)..).unwrap_or_default();
    }
    Ok(false)
}

/// The value of the attribute of this kind.
fn attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16_at(attributes, 0)?);
        let value = attributes.get(4..len)?;
        if u16_at(attributes, 2)? == kind {
            return Some(value);
        }
        attributes = attributes.get(aligned(len)..)?;
    }
}

/// The path of a socket; `None` for a socket with an abstract name.
fn path(name: &[u8]) -> Option<PathBuf> {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    (end > 0).then(|| PathBuf::from(OsStr::from_bytes(&name[..end])))
}

fn aligned(len: usize) -> usize {
    len.next_multiple_of(4)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|it| u16::from_ne_bytes([it[0], it[1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).map(|it| u32::from_ne_bytes([it[0], it[1], it[2], it[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::SocketAddrUnix;
    use std::io::ErrorKind;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_listener_whose_path_another_has_taken_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("1");
        assert!(unix_listeners(&path).unwrap().is_empty());
        let first = UnixListener::bind(&path).unwrap();
        assert_eq!(unix_listeners(&path).unwrap().len(), 1);
        // A connection is no listener, nor is a socket of another name or in another folder.
        let _client = UnixStream::connect(&path).unwrap();
        let _accepted = first.accept().unwrap();
        let _other = UnixListener::bind(folder.path().join("2")).unwrap();
        std::os::unix::fs::symlink("2", folder.path().join("3")).unwrap();
        assert_eq!(unix_listeners(&folder.path().join("3")).unwrap().len(), 1);
        assert_eq!(unix_listeners(&path).unwrap().len(), 1);
        // As a second QEMU does, by another name of the folder.
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _second = UnixListener::bind(link.join("1")).unwrap();
        assert_eq!(unix_listeners(&path).unwrap().len(), 2);
        drop(first);
        assert_eq!(unix_listeners(&path).unwrap().len(), 1);
    }

    /// Another socket may have the same name as a datagram socket.
    #[test]
    fn the_owner_of_an_abstract_name_is_known_whether_the_socket_listens_or_not() {
        let name = format!("a name of test {}", std::process::id());
        let bound = |kind| {
            let socket = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
            let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
            rustix::net::bind(&socket, &address).unwrap();
            socket
        };
        let owner = || abstract_owner(name.as_bytes()).unwrap();
        let _other = bound(SocketType::DGRAM);
        assert_eq!(owner(), None);
        let socket = bound(SocketType::STREAM);
        let me = std::fs::metadata("/proc/self").unwrap().uid();
        assert_eq!(owner(), Some(me));
        rustix::net::listen(&socket, 0).unwrap();
        assert_eq!(owner(), Some(me));
        assert_eq!(abstract_owner(&name.as_bytes()[1..]).unwrap(), None);
    }

    #[test]
    fn an_answer_that_is_cut_or_bent_is_an_error_or_holds_less() {
        let mut whole = vec![0; ANSWER];
        whole[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        whole[HEADER + 4..HEADER + 8].copy_from_slice(&77_u32.to_ne_bytes());
        whole.extend(6_u16.to_ne_bytes());
        whole.extend(NAME.to_ne_bytes());
        whole.extend(b"/x\0\0");
        whole.extend([12_u16.to_ne_bytes(), VFS.to_ne_bytes()].concat());
        whole.extend([5_u32.to_ne_bytes(), 9_u32.to_ne_bytes()].concat());
        whole.extend([12_u16.to_ne_bytes(), QUEUES.to_ne_bytes()].concat());
        whole.extend([0_u32.to_ne_bytes(), 16_u32.to_ne_bytes()].concat());
        let len = u32::try_from(whole.len()).unwrap();
        whole[..4].copy_from_slice(&len.to_ne_bytes());
        let found = |bytes: &[u8]| {
            let mut found = Vec::new();
            each(bytes, |path, device, socket| found.push((path.to_owned(), device, socket)))
                .map(|_| found)
        };
        let socket = Listening { inode: 77, backlog: Some(16) };
        assert_eq!(found(&whole).unwrap(), [(PathBuf::from("/x"), Some(9), socket)]);
        for len in 1..whole.len() {
            assert_eq!(found(&whole[..len]).unwrap_err().kind(), ErrorKind::InvalidData, "{len}");
        }
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bent = whole.clone();
                bent[at] ^= 1 << bit;
                // It ends, without a panic.
                let _ = found(&bent);
            }
        }
    }
}
