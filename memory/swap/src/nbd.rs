//! The kernel's NBD client, attached by generic netlink to a server on a unix socket, without
//! `nbd-client`.
//!
//! This module does the handshake of each connection, and then passes the socket to the kernel.
//! After a server's death the same disk gets new sockets ([`reconnect`]): requests wait for them
//! for up to [`PATIENCE`]. Requests that were in flight are sent again [`TIMEOUT`] after they were
//! first sent, so a server's death delays them by that long; ublk has no such wait.
//!
//! Every answer of server and kernel is checked for its length and contents.

mod handshake;
mod netlink;
mod reconnection;

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::handshake::{dial, handshake, Export};
use self::netlink::{
    invalid, parse, Message, Netlink, ATTR_BACKEND, ATTR_BLOCK_SIZE, ATTR_DEAD_CONN_TIMEOUT,
    ATTR_INDEX, ATTR_SERVER_FLAGS, ATTR_SIZE, ATTR_TIMEOUT, CONNECT, DISCONNECT, RECONFIGURE,
};
pub use self::reconnection::PATIENCE;
use self::reconnection::{Reconnection, AGAIN};

/// How long a request waits for its answer before the kernel sends it again on another socket. The
/// kernel's timers have steps of a second, so a server that dies is replaced within 10 s.
///
/// The kernel looks at the requests of a dead connection only when this time is over
/// (`nbd_xmit_timeout`), and it drops the connection of a living server then, too. It gives no
/// error: it sends the request again.
///
/// The kernel also drops a connection whose peer reads nothing for this long, and a server that
/// waits for memory may read nothing for seconds.
pub const TIMEOUT: Duration = Duration::from_secs(8);

/// Transmission flags by which the server offers FLUSH and FUA. A disk in memory has nothing to
/// flush; with these flags the kernel would take it for a disk with a volatile cache.
const CACHE: u16 = 1 << 2 | 1 << 3;

/// Finds a disk of the module `nbd` that is not in use.
///
/// # Errors
///
/// The module is not loaded, or all its disks are in use.
pub fn free_disk() -> io::Result<PathBuf> {
    let free = (0..256).find(|number| {
        let disk = PathBuf::from(format!("/sys/class/block/nbd{number}"));
        // While a disk is attached, its `pid` file names the process that attached it.
        disk.exists() && !disk.join("pid").exists()
    });
    let number =
        free.ok_or_else(|| io::Error::other("no free disk of the module nbd: is it loaded?"))?;
    Ok(PathBuf::from(format!("/dev/nbd{number}")))
}

/// Limits the kernel's requests to a disk to `most` bytes, unless they are limited to less. Call
/// this before the disk is attached: a change of the limit waits for all requests of the disk.
///
/// The kernel keeps the limit of a disk that was detached.
///
/// # Errors
///
/// The kernel's error.
pub fn limit_requests(disk: &Path, most: usize) -> io::Result<()> {
    let name = disk.file_name().unwrap_or_default();
    limit_in(&Path::new("/sys/class/block").join(name).join("queue"), most)
}

/// As [`limit_requests`], in the folder of the disk's queue.
fn limit_in(queue: &Path, most: usize) -> io::Result<()> {
    let (file, most) = (queue.join("max_sectors_kb"), most >> 10);
    let text = fs::read_to_string(&file)?;
    let now = text.trim().parse::<usize>();
    if now.map_err(|_| invalid(format!("{} has {text:?}", file.display())))? > most {
        fs::write(&file, most.to_string())?;
    }
    Ok(())
}

/// Attaches `connections` connections to the server at `socket` as `disk`. The process `listener`
/// has made the server's listening socket: the path may lead to the server of another disk by now.
///
/// # Errors
///
/// No server answers at `socket`, or its answer is invalid; another process listens there; the
/// module `nbd` is missing. [`io::ErrorKind::ResourceBusy`] if the disk is attached already.
pub fn attach(socket: &Path, listener: u32, disk: &Path, connections: usize) -> io::Result<()> {
    let (sockets, export) = dial(socket, listener, connections)?;
    let mut netlink = Netlink::open()?;
    let mut message = connect(netlink.family, index(disk)?, export, &backend(listener)?);
    message.sockets(&sockets);
    netlink.ask(&message, &format!("attach {}", disk.display()))
}

/// The request to attach a disk, without its sockets.
fn connect(family: u16, index: u32, export: Export, backend: &str) -> Message {
    let mut message = Message::new(family, CONNECT);
    message.u32(ATTR_INDEX, index);
    message.text(ATTR_BACKEND, backend);
    message.u64(ATTR_SIZE, export.size);
    message.u64(ATTR_BLOCK_SIZE, 4096);
    message.u64(ATTR_SERVER_FLAGS, u64::from(export.flags & !CACHE));
    timeouts(&mut message);
    message
}

/// The request to replace dead connections of a disk, without its sockets.
fn reconfigure(family: u16, index: u32, backend: &str) -> Message {
    let mut message = Message::new(family, RECONFIGURE);
    message.u32(ATTR_INDEX, index);
    message.text(ATTR_BACKEND, backend);
    timeouts(&mut message);
    message
}

/// The name by which the kernel (5.14 or later) tells disks of one number apart: the number of a
/// detached disk may be another device's, whose swap must not read pages of this one. A disk takes
/// connections only with the name that it was attached with. Earlier kernels ignore the name.
///
/// `listener` is the process that has made the listening socket, as in [`attach`]. It lives as long
/// as the device's servers do, and each PID namespace has its own process of a number. Call this
/// before the disk's requests wait for this process: it reads a link, for which the kernel needs
/// memory.
///
/// # Errors
/// /proc cannot be read.
pub fn backend(listener: u32) -> io::Result<String> {
    let namespace = fs::read_link("/proc/self/ns/pid")?;
    Ok(format!("platen {listener} {}", namespace.display()))
}

/// Gives connections to the new server, made by `connect`, to a disk whose server has died. Tries
/// until the kernel has taken them all, or until `stop` returns true. `notice` gets the first
/// error. Returns whether the kernel has taken any: requests of the disk then reach the new server.
/// The kernel takes none if the disk was attached with another name than `backend`: see
/// [`backend()`].
///
/// `connect` takes no path, because a path may lead to the server of another disk by now. All
/// connections are made before the kernel is offered one: they take the memory that the server has
/// for them, and the kernel may take seconds to find a connection dead.
///
/// The new server calls this on a thread of its own. It starts no process for it: while there is no
/// server, memory may be exhausted, and a new process gets none.
pub fn reconnect(
    connect: impl Fn() -> io::Result<UnixStream>,
    backend: &str,
    disk: &Path,
    connections: usize,
    stop: impl Fn() -> bool,
    notice: impl Fn(&io::Error),
) -> bool {
    let mut reconnection = Reconnection::new(&connect, connections);
    let mut told = false;
    let mut tell = |error: &io::Error| {
        if !std::mem::replace(&mut told, true) {
            notice(error);
        }
    };
    while !stop() {
        // If one cannot be made, the kernel gets those that are there.
        let dialled = reconnection.dial().inspect_err(&mut tell);
        let attempt = Kernel::of(disk, backend).and_then(|mut kernel| {
            reconnection.attempt(&stop, &mut |connection| kernel.give(connection))
        });
        if dialled.and(attempt.inspect_err(&mut tell)).is_ok() {
            break;
        }
        std::thread::sleep(AGAIN);
    }
    reconnection.some
}

/// The kernel's client of a disk.
struct Kernel<'a> {
    netlink: Netlink,
    index: u32,
    backend: &'a str,
}

impl<'a> Kernel<'a> {
    fn of(disk: &Path, backend: &'a str) -> io::Result<Self> {
        Ok(Self { index: index(disk)?, backend, netlink: Netlink::open()? })
    }

    /// Offers the kernel a connection in the place of one that it has found dead. The answer does
    /// not tell whether the kernel has taken the connection: see `is_taken` in [`reconnection`].
    fn give(&mut self, connection: &UnixStream) -> io::Result<()> {
        let mut message = reconfigure(self.netlink.family, self.index, self.backend);
        message.sockets([connection]);
        self.netlink.ask(&message, &format!("give /dev/nbd{} another connection", self.index))
    }
}

/// Whether the disk is attached and has a name: see [`backend()`].
///
/// # Errors
///
/// The kernel does not tell.
pub fn is_named(disk: &Path) -> io::Result<bool> {
    let name = disk.file_name().unwrap_or_default();
    is_named_in(&Path::new("/sys/class/block").join(name))
}

/// As [`is_named`], in the disk's folder.
fn is_named_in(folder: &Path) -> io::Result<bool> {
    let file = folder.join("backend");
    match fs::read_to_string(&file) {
        // A disk that was attached without a name has an empty line there.
        Ok(text) => Ok(!text.trim().is_empty()),
        // The disk is not attached, or the kernel is of a version before 5.14 and knows no names.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => {
            Err(io::Error::new(error.kind(), format!("cannot read {}: {error}", file.display())))
        }
    }
}

/// Detaches a disk. The kernel may not answer, and this then does not return: call it in a process
/// for which nobody waits without a limit.
///
/// # Errors
///
/// The kernel's error.
pub fn detach(disk: &Path) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    let mut message = Message::new(netlink.family, DISCONNECT);
    message.u32(ATTR_INDEX, index(disk)?);
    netlink.ask(&message, &format!("detach {}", disk.display()))
}

/// Whether the process `helper` has attached the disk: after a detach it may be another device's.
/// In another PID namespace than the first, the kernel does not tell; then the answer is yes for a
/// disk that is attached.
pub fn is_attached_by(disk: &Path, helper: u32) -> bool {
    let first = fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link == Path::new(FIRST_PIDS));
    let name = disk.file_name().unwrap_or_default();
    attacher(&Path::new("/sys/class/block").join(name)).is_some_and(|pid| pid == helper || !first)
}

/// The first PID namespace, whose numbers the kernel's modules report (`PROC_PID_INIT_INO`).
const FIRST_PIDS: &str = "pid:[4026531836]";

/// The process that has attached the disk of this folder; `None` for a disk that is not attached.
fn attacher(folder: &Path) -> Option<u32> {
    fs::read_to_string(folder.join("pid")).ok()?.trim().parse().ok()
}

fn timeouts(message: &mut Message) {
    message.u64(ATTR_TIMEOUT, TIMEOUT.as_secs());
    message.u64(ATTR_DEAD_CONN_TIMEOUT, PATIENCE.as_secs());
}

fn index(disk: &Path) -> io::Result<u32> {
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix("nbd").and_then(|number| number.parse().ok());
    number.ok_or_else(|| invalid(format!("{} is no disk of the nbd module", disk.display())))
}

/// Entry points of the fuzz targets.
#[doc(hidden)]
pub mod fuzzing {
    use super::*;

    /// Parses a netlink answer in one datagram. Returns whether it ends the exchange, and the
    /// wanted attribute.
    ///
    /// # Errors
    ///
    /// The answer is truncated, or reports an error.
    pub fn answer(bytes: &[u8], wanted: u16) -> io::Result<(bool, Option<Vec<u8>>)> {
        let mut found = None;
        let ended = parse(bytes, wanted, &mut found)?;
        Ok((ended, found))
    }

    /// Parses a server's hello. Returns the size and the flags of its disk.
    ///
    /// # Errors
    ///
    /// The hello is truncated or invalid.
    pub fn hello(stream: &mut (impl Read + Write)) -> io::Result<(u64, u16)> {
        handshake(stream).map(|export| (export.size, export.flags))
    }
}

#[cfg(test)]
mod tests;
