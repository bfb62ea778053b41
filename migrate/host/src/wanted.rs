//! The original destination of a connection.
//!
//! A rule of the kernel may have redirected the connection to a door. The other end does not know
//! that.

use relay::QemuSocket;
use rustix::net::sockopt::ip_original_dst;
use std::io;
use std::net::{SocketAddr, SocketAddrV4, TcpStream};

/// The destination of a TCP connection before a rule of the kernel redirected it.
pub(crate) fn wanted(socket: &TcpStream) -> io::Result<SocketAddr> {
    let here = socket.local_addr()?;
    // An error shows that no rule has redirected it.
    Ok(if here.is_ipv4() { ip_original_dst(socket).map_or(here, SocketAddr::V4) } else { here })
}

/// The original destination of a connection, if a rule has redirected it to a door.
pub fn intercepted(socket: &QemuSocket) -> Option<SocketAddrV4> {
    let QemuSocket::Tcp(socket) = socket else { return None };
    match wanted(socket).ok()? {
        SocketAddr::V4(wanted) if socket.local_addr().ok()? != SocketAddr::V4(wanted) => {
            Some(wanted)
        }
        _ => None,
    }
}

/// The original destination of a connection; `None` for a unix socket, which has no other
/// destination.
pub(crate) fn place_of(socket: &QemuSocket) -> Option<SocketAddr> {
    match socket {
        QemuSocket::Tcp(socket) => wanted(socket).ok(),
        QemuSocket::Unix(_) => None,
    }
}
