//! Asks the kernel about one socket, by its two addresses (`sock_diag`, as `ss` uses it).
//!
//! The kernel finds the socket in its hash table. The tables in /proc/net/tcp contain the same, but
//! list every socket of the host: a user with tens of thousands of sockets would slow each query
//! down.

use rustix::net::netlink::{SocketAddrNetlink, SOCK_DIAG};
use rustix::net::sockopt::{set_socket_timeout, Timeout};
use rustix::net::{
    connect, recv, send, socket_with, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// A limit that only catches a fault: the kernel answers at once.
const PATIENCE: Duration = Duration::from_secs(5);
/// `SOCK_DIAG_BY_FAMILY`, the type of question and answer.
pub(crate) const BY_FAMILY: u16 = 20;
/// `NLMSG_ERROR`.
pub(crate) const ERROR: u16 = 2;
/// `NLM_F_REQUEST`. Without `NLM_F_DUMP` the question is for one socket.
const REQUEST: u16 = 1;
const TCP: u8 = 6;
/// Bytes of a netlink header (`nlmsghdr`).
pub(crate) const HEADER: usize = 16;
/// Bytes of the addresses of a socket (`inet_diag_sockid`).
const ADDRESSES: usize = 48;
/// Bytes of a request: header, `inet_diag_req_v2`.
const QUESTION: usize = HEADER + 8 + ADDRESSES;
/// Bytes of an answer without its attributes: header, `inet_diag_msg`.
const ANSWER: usize = HEADER + 4 + ADDRESSES + 20;

/// The kernel's information about a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) own: SocketAddr,
    pub(crate) other: SocketAddr,
    /// The state, as in the kernel's `tcp_states.h`.
    pub(crate) state: u8,
    pub(crate) uid: u32,
    /// 0 if no process has the socket.
    pub(crate) inode: u64,
    /// For a listening socket: how many connections may wait. For another socket: bytes to be sent.
    pub(crate) to_send: u32,
}

/// Returns the TCP socket of the caller's network namespace whose own address is `own` and that is
/// connected to `other`; if there is none, the one that listens at `own`. Returns `None` if there
/// is neither, and for all sockets if the kernel has no module `tcp_diag`. An IPv4 address also
/// finds an IPv6 socket that has it.
///
/// # Errors
/// The kernel refuses a socket, or an answer.
pub(crate) fn tcp_socket(own: SocketAddr, other: SocketAddr) -> io::Result<Option<Found>> {
    let kernel = ask(&question(own, other))?;
    let mut bytes = [0; 4096];
    let (got, _) = recv(&kernel, &mut bytes[..], RecvFlags::empty())?;
    answer(&bytes[..got])
}

/// A socket at which the kernel answers this question.
pub(crate) fn ask(question: &[u8]) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let kernel = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(SOCK_DIAG))?;
    set_socket_timeout(&kernel, Timeout::Recv, Some(PATIENCE))?;
    // Accepts messages from the kernel alone.
    connect(&kernel, &SocketAddrNetlink::new(0, 0))?;
    send(&kernel, question, SendFlags::empty())?;
    Ok(kernel)
}

/// An answer that ends too early.
pub(crate) fn cut() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the kernel's answer is cut short")
}

fn question(own: SocketAddr, other: SocketAddr) -> [u8; QUESTION] {
    let family = if own.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut bytes = [0; QUESTION];
    let mut at = 0;
    let mut put = |field: &[u8]| {
        bytes[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    };
    put(&u32::try_from(QUESTION).expect("72 bytes").to_ne_bytes());
    put(&BY_FAMILY.to_ne_bytes());
    put(&REQUEST.to_ne_bytes());
    // Sequence number and port: the kernel sets the latter.
    put(&[0; 8]);
    put(&[family.as_raw().to_ne_bytes()[0], TCP, 0, 0]);
    // Every state.
    put(&u32::MAX.to_ne_bytes());
    put(&own.port().to_be_bytes());
    put(&other.port().to_be_bytes());
    for address in [own.ip(), other.ip()] {
        let mut field = [0; 16];
        match address {
            IpAddr::V4(address) => field[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => field = address.octets(),
        }
        put(&field);
    }
    // Any interface; no cookie.
    put(&[0; 4]);
    put(&[0xff; 8]);
    bytes
}

/// Parses the kernel's answer.
pub(crate) fn answer(bytes: &[u8]) -> io::Result<Option<Found>> {
    let field = |at: usize, len: usize| bytes.get(at..at + len).ok_or_else(cut);
    let u16_at = |at| field(at, 2).map(|it| u16::from_ne_bytes([it[0], it[1]]));
    let u32_at = |at| field(at, 4).map(|it| u32::from_ne_bytes([it[0], it[1], it[2], it[3]]));
    match u16_at(4)? {
        ERROR => {
            let errno = u32_at(HEADER)?.cast_signed().wrapping_neg();
            let error = io::Error::from_raw_os_error(errno);
            // There is no such socket, or no module `tcp_diag`.
            return if error.kind() == ErrorKind::NotFound { Ok(None) } else { Err(error) };
        }
        BY_FAMILY => {}
        other => {
            let text = format!("the kernel's answer is of type {other}, not {BY_FAMILY}");
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
    }
    let message = field(HEADER, ANSWER - HEADER)?;
    let is_v4 = u16::from(message[0]) == AddressFamily::INET.as_raw();
    let address = |at: usize, port: usize| {
        let octets: [u8; 16] = message[at..at + 16].try_into().expect("sixteen bytes");
        let ip = match is_v4 {
            true => IpAddr::from([octets[0], octets[1], octets[2], octets[3]]),
            false => IpAddr::from(octets).to_canonical(),
        };
        // The unspecified address is the same in both families.
        let ip = if ip.is_unspecified() { Ipv4Addr::UNSPECIFIED.into() } else { ip };
        SocketAddr::new(ip, u16::from_be_bytes([message[port], message[port + 1]]))
    };
    // Addresses are followed by interface and cookie, then timer, queues, user and inode.
    let numbers = HEADER + 4 + ADDRESSES;
    Ok(Some(Found {
        own: address(8, 4),
        other: address(24, 6),
        state: message[1],
        uid: u32_at(numbers + 12)?,
        inode: u64::from(u32_at(numbers + 16)?),
        to_send: u32_at(numbers + 8)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn an_answer_that_is_cut_short_or_of_another_type_is_an_error() {
        let listener = TcpListener::bind("127.80.77.3:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = TcpStream::connect(here).unwrap();
        let own = client.local_addr().unwrap();
        let found = tcp_socket(own, here).unwrap().unwrap();
        assert_eq!((found.own, found.other, found.state), (own, here, 1));
        let mut whole = [0; ANSWER];
        whole[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        assert!(answer(&whole).unwrap().is_some());
        for len in 0..ANSWER {
            assert!(answer(&whole[..len]).is_err(), "{len}");
        }
        whole[4] = 3;
        assert!(answer(&whole).unwrap_err().to_string().contains("type 3"));
        whole[4..6].copy_from_slice(&ERROR.to_ne_bytes());
        whole[HEADER..HEADER + 4].copy_from_slice(&(-2_i32).to_ne_bytes());
        assert_eq!(answer(&whole).unwrap(), None);
        whole[HEADER..HEADER + 4].copy_from_slice(&i32::MIN.to_ne_bytes());
        assert!(answer(&whole).is_err());
    }
}
