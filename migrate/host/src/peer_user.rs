//! The user behind a connection on this host.
//!
//! The kernel reports the user at the other end of a unix socket. TCP has no `SO_PEERCRED`: there
//! the kernel reports, for each socket, the user who created it.

use crate::sock_diag::{tcp_socket, Found};
use crate::wanted::wanted;
use relay::QemuSocket;
use rustix::net::sockopt::socket_peercred;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};

/// The state of a listening socket.
const LISTEN: u8 = 10;
/// The states of a connection whose own end is not shut down: established, and shut down by the
/// other end alone.
const WRITES: [u8; 2] = [1, 8];

/// The owner of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The user who made it.
    pub uid: u32,
    /// The socket's inode, never 0.
    pub inode: u64,
}

/// The users who may connect to a door.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedUsers(pub Vec<u32>);

impl AllowedUsers {
    /// Checks that an allowed user is at the other end of a connection on this host.
    ///
    /// # Errors
    /// The message names the user at the other end.
    pub fn check(&self, socket: &QemuSocket) -> Result<(), String> {
        let untold =
            |error: &dyn ToString| format!("its user cannot be told: {}", error.to_string());
        match socket {
            QemuSocket::Tcp(socket) => self.check_tcp(socket, untold),
            QemuSocket::Unix(socket) => {
                let user = socket_peercred(socket).map_err(|error| untold(&error))?;
                self.judge(user.uid.as_raw())
            }
        }
    }

    fn judge(&self, uid: u32) -> Result<(), String> {
        if self.0.contains(&uid) {
            return Ok(());
        }
        Err(format!(
            "user {uid} may not migrate: allow_users in the configuration names those who may"
        ))
    }

    fn check_tcp(
        &self,
        socket: &TcpStream,
        untold: impl Fn(&dyn ToString) -> String,
    ) -> Result<(), String> {
        let here = socket.local_addr().map_err(|error| untold(&error))?;
        let there = socket.peer_addr().map_err(|error| untold(&error))?;
        // The other end does not know of a redirection.
        let wanted = wanted(socket).map_err(|error| untold(&error))?;
        match connection_owner(there, wanted) {
            Ok(Some(Owner { uid, .. })) => self.judge(uid),
            // The door itself is a socket that the kernel has to know.
            Ok(None) if !matches!(listener_owner(here), Ok(Some(_))) => {
                Err("its user cannot be told: the kernel tells nothing about sockets \
                     (`modprobe tcp_diag`)"
                    .into())
            }
            // A closed socket has no owner any more, and the kernel then reports root.
            Ok(None) => {
                Err("its user cannot be told: the connection was closed at once, or comes from \
                     another network namespace"
                    .into())
            }
            Err(error) => Err(untold(&error)),
        }
    }
}

/// The owner of the socket with the address `own`, connected to `other`; `None` if no process has
/// it.
///
/// # Errors
/// The kernel does not tell.
pub fn connection_owner(own: SocketAddr, other: SocketAddr) -> io::Result<Option<Owner>> {
    Ok(connection(own, other)?.and_then(Owner::of))
}

/// Whether a process has the socket with the address `own`, connected to `other`, and has not shut
/// it down.
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn may_write(own: SocketAddr, other: SocketAddr) -> io::Result<bool> {
    let writes = |found: Found| found.inode > 0 && WRITES.contains(&found.state);
    Ok(connection(own, other)?.is_some_and(writes))
}

fn connection(own: SocketAddr, other: SocketAddr) -> io::Result<Option<Found>> {
    let is_it = |found: &Found| found.own == own && found.other == other;
    Ok(tcp_socket(own, other)?.filter(is_it))
}

/// The owner of the socket that listens at exactly this address, or at this port of all addresses.
/// Another socket at the same address has another inode.
///
/// # Errors
/// The kernel does not tell.
pub fn listener_owner(address: SocketAddr) -> io::Result<Option<Owner>> {
    Ok(listener(address)?.and_then(Owner::of))
}

/// How many connections may wait at the socket that listens there.
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn listener_backlog(address: SocketAddr) -> io::Result<Option<u32>> {
    Ok(listener(address)?.map(|found| found.to_send))
}

fn listener(address: SocketAddr) -> io::Result<Option<Found>> {
    let nobody = match address {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let is_it = |found: &Found| found.state == LISTEN && found.own.port() == address.port();
    Ok(tcp_socket(address, nobody)?.filter(is_it))
}

impl Owner {
    /// The owner of a socket; `None` if no process has the socket.
    fn of(found: Found) -> Option<Self> {
        (found.inode > 0).then_some(Self { uid: found.uid, inode: found.inode })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    fn me() -> u32 {
        std::fs::metadata("/proc/self").unwrap().uid()
    }

    #[test]
    fn the_maker_of_a_connection_is_known() {
        let listener = TcpListener::bind("127.80.77.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = TcpStream::connect(here).unwrap();
        let (server, there) = listener.accept().unwrap();
        let owner = connection_owner(there, here).unwrap().unwrap();
        assert_eq!(owner.uid, me());
        let server = QemuSocket::from(server);
        AllowedUsers(vec![me()]).check(&server).unwrap();
        let error = AllowedUsers(vec![me() + 1]).check(&server).unwrap_err();
        assert!(error.contains(&format!("user {}", me())), "{error}");
        assert_eq!(listener_owner(here).unwrap().unwrap().uid, me());
        let first = listener_owner(here).unwrap().unwrap();
        assert_eq!(listener_owner(here).unwrap(), Some(first));
        drop((listener, server, client));
        assert_eq!(listener_owner(here).unwrap(), None);
        let _second = TcpListener::bind(here).unwrap();
        assert!(listener_owner(here).unwrap().is_some_and(|second| second != first));
    }

    /// The kernel says that a socket without a process is root's.
    #[test]
    fn one_who_has_closed_is_not_taken_for_root() {
        let listener = TcpListener::bind("127.80.77.2:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = TcpStream::connect(here).unwrap();
        let server = QemuSocket::from(listener.accept().unwrap().0);
        drop(client);
        let error = AllowedUsers(vec![0, me()]).check(&server).unwrap_err();
        assert!(error.contains("cannot be told"), "{error}");
    }

    #[test]
    fn a_connection_by_way_of_ipv6_is_known_by_its_ipv4_address() {
        let listener = TcpListener::bind("127.80.77.4:0").unwrap();
        let here = listener.local_addr().unwrap();
        let mapped =
            SocketAddr::from((Ipv4Addr::new(127, 80, 77, 4).to_ipv6_mapped(), here.port()));
        let client = match TcpStream::connect(mapped) {
            Ok(client) => client,
            Err(error) => return println!("skipped: this kernel has no IPv6: {error}"),
        };
        assert!(client.local_addr().unwrap().is_ipv6());
        let (_server, there) = listener.accept().unwrap();
        assert_eq!(connection_owner(there, here).unwrap().unwrap().uid, me());
        // One that listens at all addresses has the connections to each.
        let listener = TcpListener::bind("[::]:0").unwrap();
        let everywhere =
            SocketAddr::from((Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()));
        assert_eq!(listener_owner(everywhere).unwrap().unwrap().uid, me());
        // Nobody is connected to it.
        assert_eq!(connection_owner(everywhere, here).unwrap(), None);
    }

    #[test]
    fn the_user_at_the_other_end_of_a_unix_socket_is_known() {
        let (_there, here) = UnixStream::pair().unwrap();
        let here = QemuSocket::from(here);
        AllowedUsers(vec![me()]).check(&here).unwrap();
        let error = AllowedUsers(vec![me() + 1]).check(&here).unwrap_err();
        assert!(error.contains(&format!("user {}", me())), "{error}");
    }

    /// A local user may have any number of sockets: none is looked at.
    #[test]
    fn the_sockets_of_others_are_not_looked_through() {
        let listener = TcpListener::bind("127.80.77.5:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = TcpStream::connect(here).unwrap();
        let server = QemuSocket::from(listener.accept().unwrap().0);
        let read = bytes_read();
        for _ in 0..100 {
            AllowedUsers(vec![me()]).check(&server).unwrap();
        }
        // A table has 150 bytes for each socket of the host, and there are 100 answers of 124.
        assert!(bytes_read() - read < 4096, "tables are read: {} bytes", bytes_read() - read);
        drop(client);
    }

    /// The bytes that this thread has got from read(2).
    fn bytes_read() -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap();
        line.parse().unwrap()
    }
}
