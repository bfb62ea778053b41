//! Whether the holder of an abstract socket may hold it: any user may bind such a socket, and its
//! name is in /proc/net/unix as soon as one platen has used it.

use relay::UnixAddress;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{connect, socket_with, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::SocketAddr;

/// The user who holds this claim on a VM, if it is neither root, nor this process's user, nor the
/// owner of the VM's monitor.
pub(crate) fn stranger(claim: &SocketAddr, monitor: Option<&UnixAddress>) -> Option<u32> {
    let user = holder(claim.as_abstract_name()?)?;
    let owner = monitor.and_then(|monitor| Some(std::fs::metadata(monitor.path()).ok()?.uid()));
    let own = rustix::process::geteuid().as_raw();
    (![Some(0), Some(own), owner].contains(&Some(user))).then_some(user)
}

/// The user who holds the socket with this name, if that can be told.
fn holder(name: &[u8]) -> Option<u32> {
    // A holder accepts no connection. A blocking socket would wait for ever for one with as many
    // waiting as it takes.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    match connect(&socket, &SocketAddrUnix::new_abstract_name(name).ok()?) {
        Ok(()) => Some(socket_peercred(&socket).ok()?.uid.as_raw()),
        Err(_) => host::abstract_owner(name).ok()?,
    }
}
