//! Where a connection wanted to go.
//!
//! A rule of the kernel's may have led it to a door. Its other end knows nothing of that.

use relay::QemuSocket;
use rustix::net::sockopt::ip_original_dst;
use std::io;
use std::net::{SocketAddr, SocketAddrV4, TcpStream};

/// Where a TCP connection wanted to go, before a rule of the kernel's has redirected it.
pub(crate) fn wanted(socket: &TcpStream) -> io::Result<SocketAddr> {
    let here = socket.local_addr()?;
    // An error: no rule has.
    Ok(if here.is_ipv4() { ip_original_dst(socket).map_or(here, SocketAddr::V4) } else { here })
}

/// Where a connection wanted to go, if a rule has led it to a door.
pub fn intercepted(socket: &QemuSocket) -> Option<SocketAddrV4> {
    let QemuSocket::Tcp(socket) = socket else { return None };
    match wanted(socket).ok()? {
        SocketAddr::V4(wanted) if socket.local_addr().ok()? != SocketAddr::V4(wanted) => {
            Some(wanted)
        }
        _ => None,
    }
}

/// Where a connection wanted to go; a unix socket has no other place.
pub(crate) fn place_of(socket: &QemuSocket) -> Option<SocketAddr> {
    match socket {
        QemuSocket::Tcp(socket) => wanted(socket).ok(),
        QemuSocket::Unix(_) => None,
    }
}
