//! Distinguishes a socket at which a QEMU awaits a VM from the socket of a server.
//!
//! The clients of both may be silent at first: an NBD client until its server has written, and a
//! source QEMU until libvirt has passed it the connection. The check must not connect: a QEMU that
//! awaits a VM takes the first connection for the VM's, and is used up by it. So this module asks
//! the kernel how many connections may wait at the socket (`listen(2)`'s backlog). QEMU gives the
//! socket of a migration as many as the migration has channels, and that of its NBD server
//! `SOMAXCONN`.

use crate::peer_user::listener_backlog;
use crate::unix_diag::listeners;
use relay::QemuAddress;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// No migration has this many channels: QEMU allows 255 multifd channels.
const MOST_CHANNELS: u32 = 512;
/// The `SOMAXCONN` of every C library is at least this: 4096 in glibc, 128 in musl.
const LEAST_OF_SERVERS: u32 = 128;

/// How long a silent connection may still be a migration if nothing is known of its destination.
/// QEMU writes its header as soon as it has the connection.
const SILENT: Duration = Duration::from_secs(2);
/// As [`SILENT`], while the other host has not answered.
const UNANSWERED: Duration = Duration::from_secs(10);
/// As [`SILENT`], if a QEMU awaits a VM there. A source QEMU that needs longer is a fault of its
/// host.
const LATE: Duration = Duration::from_secs(60);

/// The purpose of a listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Awaits {
    /// It awaits a VM: a connection would use the QEMU up.
    Vm,
    /// It serves clients, any number of them.
    Clients,
    /// Unknown: nothing listens there, several sockets do, or the kernel does not report it.
    Unknown,
}

impl Awaits {
    /// Asks the kernel about the socket that listens at this address.
    pub fn at(address: &QemuAddress) -> Self {
        let backlog = match address {
            QemuAddress::Tcp(address) => listener_backlog(*address).ok().flatten(),
            QemuAddress::Unix(address) => match listeners(address.path()).as_deref() {
                Ok([only]) => only.backlog,
                _ => None,
            },
        };
        backlog.map_or(Self::Unknown, |backlog| Self::judge(backlog, most_allowed()))
    }

    /// Judges a socket by its backlog. `most` is the system's limit on every backlog.
    fn judge(backlog: u32, most: u32) -> Self {
        match backlog {
            0 => Self::Unknown,
            _ if backlog > MOST_CHANNELS => Self::Clients,
            _ if backlog < LEAST_OF_SERVERS.min(most) => Self::Vm,
            // A QEMU with many channels, or a server on a system that allows few connections.
            _ => Self::Unknown,
        }
    }

    /// How long a connection to a place with this purpose may stay silent before it counts as an
    /// NBD client's. `None`: the other host has not answered yet.
    pub(crate) fn patience(known: Option<Self>) -> Duration {
        match known {
            None => UNANSWERED,
            Some(Self::Vm) => LATE,
            Some(Self::Clients) => Duration::ZERO,
            Some(Self::Unknown) => SILENT,
        }
    }
}

/// `net.core.somaxconn` of this network namespace.
fn most_allowed() -> u32 {
    let text = std::fs::read_to_string("/proc/sys/net/core/somaxconn").ok();
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(LEAST_OF_SERVERS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use relay::UnixAddress;
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_qemu_that_awaits_a_vm_is_told_from_a_server() {
        for (backlog, most, awaits) in [
            (1, 4096, Awaits::Vm),
            (2, 128, Awaits::Vm),
            (16, 4096, Awaits::Vm),
            (127, 4096, Awaits::Vm),
            // A server of musl, or so many channels.
            (128, 4096, Awaits::Unknown),
            (255, 4096, Awaits::Unknown),
            (512, 4096, Awaits::Unknown),
            (4096, 4096, Awaits::Clients),
            // A system that allows no more: the socket may be a server's.
            (1, 1, Awaits::Unknown),
            (16, 16, Awaits::Unknown),
            (15, 16, Awaits::Vm),
            (0, 4096, Awaits::Unknown),
        ] {
            assert_eq!(Awaits::judge(backlog, most), awaits, "{backlog} of {most}");
        }
    }

    #[test]
    fn the_kernel_tells_without_a_connection() {
        let folder = tempfile::tempdir().unwrap();
        for (nth, backlog) in [1, 2, 16, 4096].into_iter().enumerate() {
            let tcp = TcpListener::bind("127.80.77.6:0").unwrap();
            let path = folder.path().join(nth.to_string());
            let unix = UnixListener::bind(&path).unwrap();
            rustix::net::listen(&tcp, backlog).unwrap();
            rustix::net::listen(&unix, backlog).unwrap();
            let backlog = backlog.cast_unsigned().min(most_allowed());
            let awaits = Awaits::judge(backlog, most_allowed());
            let address = QemuAddress::Tcp(tcp.local_addr().unwrap());
            assert_eq!(Awaits::at(&address), awaits, "{backlog}");
            assert_eq!(Awaits::at(&UnixAddress::from(path).into()), awaits, "{backlog}");
            tcp.set_nonblocking(true).unwrap();
            unix.set_nonblocking(true).unwrap();
            assert!(tcp.accept().is_err() && unix.accept().is_err(), "it has connected");
            drop(tcp);
            assert_eq!(Awaits::at(&address), Awaits::Unknown, "nothing listens any more");
        }
    }

    #[test]
    fn only_a_server_s_client_is_not_waited_for() {
        let [unanswered, vm, clients, unknown] =
            [None, Some(Awaits::Vm), Some(Awaits::Clients), Some(Awaits::Unknown)]
                .map(Awaits::patience);
        assert_eq!(clients, Duration::ZERO);
        assert!(clients < unknown && unknown < unanswered && unanswered < vm);
    }
}
