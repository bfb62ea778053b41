//! The kernel's generic netlink interface of the module nbd: requests and their answers.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::netlink::{SocketAddrNetlink, GENERIC};
use rustix::net::{
    bind, recv, send, socket_with, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
};

pub(super) const CONNECT: u8 = 1;
pub(super) const DISCONNECT: u8 = 2;
pub(super) const RECONFIGURE: u8 = 3;
pub(super) const ATTR_INDEX: u16 = 1;
pub(super) const ATTR_SIZE: u16 = 2;
pub(super) const ATTR_BLOCK_SIZE: u16 = 3;
pub(super) const ATTR_TIMEOUT: u16 = 4;
pub(super) const ATTR_SERVER_FLAGS: u16 = 5;
pub(super) const ATTR_SOCKETS: u16 = 7;
pub(super) const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
/// `NBD_ATTR_BACKEND_IDENTIFIER`: `NBD_ATTR_DEVICE_LIST` is 9.
pub(super) const ATTR_BACKEND: u16 = 10;
/// How long an answer of the kernel may take. The kernel works on a request inside of the call that
/// sends it, which has no limit.
const ANSWER: Duration = Duration::from_secs(30);
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;

const NESTED: u16 = 0x8000;
pub(super) const ENOSPC: i32 = 28;

/// Bytes of a netlink header and a generic netlink header.
pub(super) const HEAD: usize = 16 + 4;

/// A request to a generic netlink family.
pub(super) struct Message(pub(super) Vec<u8>);

impl Message {
    pub(super) fn new(family: u16, command: u8) -> Self {
        const REQUEST_AND_ACK: u16 = 1 | 4;
        let mut bytes = Vec::with_capacity(256);
        // Length (filled in last); type, flags, sequence number, port.
        bytes.extend([0; 4]);
        bytes.extend(family.to_ne_bytes());
        bytes.extend(REQUEST_AND_ACK.to_ne_bytes());
        bytes.extend([0; 8]);
        bytes.extend([command, 1, 0, 0]);
        Self(bytes)
    }

    fn attribute(&mut self, kind: u16, payload: &[u8]) {
        let len = u16::try_from(payload.len() + 4).expect("attributes are short");
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(payload);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    pub(super) fn u32(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    pub(super) fn u64(&mut self, kind: u16, value: u64) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    pub(super) fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, value.as_bytes());
    }

    pub(super) fn sockets<'a>(&mut self, sockets: impl IntoIterator<Item = &'a UnixStream>) {
        let mut items = Self(Vec::new());
        for socket in sockets {
            let mut item = Self(Vec::new());
            // A descriptor is not negative.
            item.attribute(SOCK_FD, &socket.as_raw_fd().to_ne_bytes());
            items.attribute(SOCK_ITEM | NESTED, &item.0);
        }
        self.attribute(ATTR_SOCKETS | NESTED, &items.0);
    }

    fn finished(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        let len = u32::try_from(bytes.len()).expect("messages are short");
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        bytes
    }
}

/// A socket to the kernel, and the family number of the nbd module.
pub(super) struct Netlink {
    socket: OwnedFd,
    pub(super) family: u16,
}

impl Netlink {
    pub(super) fn open() -> io::Result<Self> {
        let kind = SocketType::RAW;
        let socket =
            socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, Some(GENERIC))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        let timeout = Some(ANSWER);
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            timeout,
        )?;
        const CONTROLLER: u16 = 0x10;
        const GET_FAMILY: u8 = 3;
        const FAMILY_ID: u16 = 1;
        const FAMILY_NAME: u16 = 2;
        let mut netlink = Self { socket, family: 0 };
        let mut ask = Message::new(CONTROLLER, GET_FAMILY);
        ask.attribute(FAMILY_NAME, b"nbd\0");
        let answer = netlink.exchange(&ask, FAMILY_ID);
        let found = answer.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::other("the kernel's module nbd is not loaded"),
            _ => unanswered(error, "name the number of nbd"),
        })?;
        let found = found.as_deref().and_then(|id| id.try_into().ok()).map(u16::from_ne_bytes);
        netlink.family = found.ok_or_else(|| invalid("netlink has no number for nbd".into()))?;
        Ok(netlink)
    }

    /// Sends a request to the module and waits for its acknowledgement or error. `request` names
    /// it, and its disk, in the error of a kernel that does not answer.
    pub(super) fn ask(&mut self, message: &Message, request: &str) -> io::Result<()> {
        self.exchange(message, ATTR_INDEX).map(drop).map_err(|error| unanswered(error, request))
    }

    /// Sends a request and reads answers until the acknowledgement; returns the attribute `wanted`
    /// of one of them.
    fn exchange(&mut self, message: &Message, wanted: u16) -> io::Result<Option<Vec<u8>>> {
        send(&self.socket, &message.finished(), SendFlags::empty())?;
        let mut found = None;
        let mut buffer = vec![0; 16384];
        loop {
            let (got, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            if parse(&buffer[..got], wanted, &mut found)? {
                return Ok(found);
            }
        }
    }
}

/// The error of a request; names the request if the kernel has not answered it in time.
fn unanswered(error: io::Error, request: &str) -> io::Error {
    if error.kind() != io::ErrorKind::WouldBlock {
        return error;
    }
    let limit = ANSWER.as_secs();
    let why = format!("the kernel has not answered the request to {request} for {limit} s");
    io::Error::new(io::ErrorKind::TimedOut, why)
}

/// Parses one datagram; returns whether it has the acknowledgement.
pub(super) fn parse(
    mut bytes: &[u8],
    wanted: u16,
    found: &mut Option<Vec<u8>>,
) -> io::Result<bool> {
    const ERROR: u16 = 2;
    let short = || invalid("netlink's answer is cut short".into());
    while bytes.len() >= 16 {
        let len = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        let message = bytes.get(..len).filter(|message| message.len() >= 16).ok_or_else(short)?;
        if u16::from_ne_bytes([bytes[4], bytes[5]]) == ERROR {
            let code = message.get(16..20).ok_or_else(short)?;
            return match i32::from_ne_bytes([code[0], code[1], code[2], code[3]]) {
                0 => Ok(true),
                code => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
            };
        }
        if let Some(value) = message.get(HEAD..).and_then(|rest| attribute(rest, wanted)) {
            *found = Some(value.to_vec());
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// The payload of the first attribute of a kind.
pub(super) fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    while bytes.len() >= 4 {
        let len = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        let kind = u16::from_ne_bytes([bytes[2], bytes[3]]) & !NESTED;
        let payload = bytes.get(4..len)?;
        if kind == wanted {
            return Some(payload);
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

pub(super) fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn a_kernel_that_does_not_answer_is_an_error_that_names_the_request() {
        let (ours, kernel) = UnixDatagram::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut netlink = Netlink { socket: ours.into(), family: 27 };
        let message = Message::new(27, DISCONNECT);
        let error = netlink.ask(&message, "detach /dev/nbd3").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("the request to detach /dev/nbd3"), "{error}");
        // It was asked.
        assert_eq!(kernel.recv(&mut [0; 64]).unwrap(), message.finished().len());
    }
}
