//! The kernel's NBD client, attached by generic netlink to a server on a unix socket, without
//! `nbd-client`.
//!
//! This module does the handshake of each connection, and then passes the socket to the kernel.
//! After a server's death the same disk gets new sockets ([`reconnect`]): requests wait for them
//! for up to [`PATIENCE`]. Requests that were in flight are sent again [`TIMEOUT`] after they were
//! first sent, so a server's death delays them by that long; ublk has no such wait.
//!
//! Every answer of server and kernel is checked for its length and contents.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::netlink::{SocketAddrNetlink, GENERIC};
use rustix::net::{
    bind, recv, send, socket_with, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
};

/// How long a request waits for its answer before the kernel sends it again on another socket.
///
/// The kernel also drops a connection whose peer reads nothing for this long, and a server that
/// waits for memory may read nothing for seconds.
pub const TIMEOUT: Duration = Duration::from_secs(15);

/// How long requests wait for a new server.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// A server's description of its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Export {
    size: u64,
    flags: u16,
}

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

/// Attaches `connections` connections to the server at `socket` as `disk`.
///
/// # Errors
///
/// No server, one with an invalid answer, no module `nbd`, a disk in use.
pub fn attach(socket: &Path, disk: &Path, connections: usize) -> io::Result<()> {
    let (sockets, export) = dial(socket, connections)?;
    let mut netlink = Netlink::open()?;
    let mut message = connect(netlink.family, index(disk)?, export);
    message.sockets(&sockets);
    netlink.ask(&message)
}

/// The request to attach a disk, without its sockets.
fn connect(family: u16, index: u32, export: Export) -> Message {
    let mut message = Message::new(family, CONNECT);
    message.u32(ATTR_INDEX, index);
    message.u64(ATTR_SIZE, export.size);
    message.u64(ATTR_BLOCK_SIZE, 4096);
    message.u64(ATTR_SERVER_FLAGS, u64::from(export.flags & !CACHE));
    timeouts(&mut message);
    message
}

/// Gives a disk whose server has died connections to the new server at `socket`.
///
/// # Errors
///
/// Those of [`attach`]; a disk that is not attached.
pub fn reconnect(socket: &Path, disk: &Path, connections: usize) -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let (mut sockets, _) = dial(socket, connections)?;
    let index = index(disk)?;
    let mut netlink = Netlink::open()?;
    // One at a time: each replaces a connection that the kernel has found dead, which may take a
    // moment.
    while let Some(socket) = sockets.pop() {
        let mut message = Message::new(netlink.family, RECONFIGURE);
        message.u32(ATTR_INDEX, index);
        timeouts(&mut message);
        let socket = [socket];
        message.sockets(&socket);
        loop {
            match netlink.ask(&message) {
                Err(error) if error.raw_os_error() == Some(ENOSPC) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                result => break result?,
            }
        }
    }
    Ok(())
}

/// Detaches a disk.
///
/// # Errors
///
/// The kernel's.
pub fn detach(disk: &Path) -> io::Result<()> {
    let mut netlink = Netlink::open()?;
    let mut message = Message::new(netlink.family, DISCONNECT);
    message.u32(ATTR_INDEX, index(disk)?);
    netlink.ask(&message)
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

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Connections to the server, after the handshake.
fn dial(socket: &Path, connections: usize) -> io::Result<(Vec<UnixStream>, Export)> {
    const MULTI_CONN: u16 = 1 << 8;
    let mut sockets = Vec::new();
    let mut first = None;
    while sockets.len() < connections.max(1) {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let export = handshake(&mut stream)?;
        stream.set_read_timeout(None)?;
        let before = *first.get_or_insert(export);
        if before != export {
            return Err(invalid(format!(
                "the server's disk was {before:?}, and now is {export:?}"
            )));
        }
        sockets.push(stream);
        if export.flags & MULTI_CONN == 0 {
            break;
        }
    }
    let export = first.ok_or(io::ErrorKind::InvalidInput)?;
    if export.size == 0 || export.size % 4096 != 0 {
        return Err(invalid(format!(
            "the server's disk has {} bytes, no whole pages",
            export.size
        )));
    }
    Ok((sockets, export))
}

/// The fixed newstyle handshake, for the server's default export.
fn handshake(stream: &mut (impl Read + Write)) -> io::Result<Export> {
    const OPTION: &[u8; 8] = b"IHAVEOPT";
    const EXPORT_NAME: u32 = 1;
    const NO_ZEROES: u16 = 2;
    let mut hello = [0; 18];
    stream.read_exact(&mut hello)?;
    if &hello[..8] != b"NBDMAGIC" || &hello[8..16] != OPTION {
        return Err(invalid("the server does not speak newstyle NBD".into()));
    }
    let offered = u16::from_be_bytes([hello[16], hello[17]]);
    let flags = u32::from(offered & 3);
    let mut ask = Vec::with_capacity(20);
    ask.extend(flags.to_be_bytes());
    ask.extend(OPTION);
    ask.extend(EXPORT_NAME.to_be_bytes());
    ask.extend(0_u32.to_be_bytes());
    stream.write_all(&ask)?;
    let mut answer = [0; 10];
    stream.read_exact(&mut answer)?;
    if offered & NO_ZEROES == 0 {
        stream.read_exact(&mut [0; 124])?;
    }
    let [size @ .., high, low] = answer;
    Ok(Export { size: u64::from_be_bytes(size), flags: u16::from_be_bytes([high, low]) })
}

// The kernel's generic netlink interface of the nbd module.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;
const ATTR_INDEX: u16 = 1;
const ATTR_SIZE: u16 = 2;
const ATTR_BLOCK_SIZE: u16 = 3;
const ATTR_TIMEOUT: u16 = 4;
const ATTR_SERVER_FLAGS: u16 = 5;
const ATTR_SOCKETS: u16 = 7;
const ATTR_DEAD_CONN_TIMEOUT: u16 = 8;
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;

/// Transmission flags by which the server offers FLUSH and FUA. A disk in memory has nothing to
/// flush; with these flags the kernel would take it for a disk with a volatile cache.
const CACHE: u16 = 1 << 2 | 1 << 3;

const NESTED: u16 = 0x8000;
const ENOSPC: i32 = 28;

/// Bytes of a netlink header and a generic netlink header.
const HEAD: usize = 16 + 4;

/// A request to a generic netlink family.
struct Message(Vec<u8>);

impl Message {
    fn new(family: u16, command: u8) -> Self {
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

    fn u32(&mut self, kind: u16, value: u32) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    fn u64(&mut self, kind: u16, value: u64) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    fn sockets(&mut self, sockets: &[UnixStream]) {
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
struct Netlink {
    socket: OwnedFd,
    family: u16,
}

impl Netlink {
    fn open() -> io::Result<Self> {
        let kind = SocketType::RAW;
        let socket =
            socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, Some(GENERIC))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        let timeout = Some(Duration::from_secs(30));
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
            _ => error,
        })?;
        let found = found.as_deref().and_then(|id| id.try_into().ok()).map(u16::from_ne_bytes);
        netlink.family = found.ok_or_else(|| invalid("netlink has no number for nbd".into()))?;
        Ok(netlink)
    }

    /// Sends a request to the module and waits for its acknowledgement or error.
    fn ask(&mut self, message: &Message) -> io::Result<()> {
        self.exchange(message, ATTR_INDEX).map(drop)
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

/// Parses one datagram; returns whether it has the acknowledgement.
fn parse(mut bytes: &[u8], wanted: u16, found: &mut Option<Vec<u8>>) -> io::Result<bool> {
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
fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
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

/// Entry points of the fuzz targets.
#[doc(hidden)]
pub mod fuzzing {
    use super::*;

    /// Parses a netlink answer in one datagram: whether it ends the exchange, and the wanted
    /// attribute.
    ///
    /// # Errors
    ///
    /// A truncated answer, or one that is an error.
    pub fn answer(bytes: &[u8], wanted: u16) -> io::Result<(bool, Option<Vec<u8>>)> {
        let mut found = None;
        let ended = parse(bytes, wanted, &mut found)?;
        Ok((ended, found))
    }

    /// Parses a server's hello: size and flags of its disk.
    ///
    /// # Errors
    ///
    /// One that is truncated or invalid.
    pub fn hello(stream: &mut (impl Read + Write)) -> io::Result<(u64, u16)> {
        handshake(stream).map(|export| (export.size, export.flags))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server's side of a conversation, and what the client wrote.
    struct Talk {
        says: io::Cursor<Vec<u8>>,
        told: Vec<u8>,
    }

    impl Read for Talk {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.says.read(out)
        }
    }

    impl Write for Talk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.told.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn talk(flags: u16, zeroes: usize) -> Talk {
        let mut says = b"NBDMAGICIHAVEOPT".to_vec();
        says.extend(flags.to_be_bytes());
        says.extend((1_u64 << 30).to_be_bytes());
        says.extend(0x16d_u16.to_be_bytes());
        says.extend(vec![0; zeroes]);
        Talk { says: io::Cursor::new(says), told: Vec::new() }
    }

    #[test]
    fn the_handshake_takes_the_default_export_with_and_without_zeroes() {
        for (flags, zeroes) in [(3, 0), (1, 124)] {
            let mut server = talk(flags, zeroes);
            let export = handshake(&mut server).unwrap();
            assert_eq!(export, Export { size: 1 << 30, flags: 0x16d });
            let told = [&u32::from(flags).to_be_bytes(), &b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]];
            assert_eq!(server.told, told.concat());
            assert_eq!(server.says.position(), server.says.get_ref().len() as u64);
        }
    }

    #[test]
    fn a_server_that_disconnects_or_speaks_another_protocol_is_an_error() {
        for cut in 0..28 {
            let mut server = talk(3, 0);
            server.says.get_mut().truncate(cut);
            assert!(handshake(&mut server).is_err(), "{cut}");
        }
        let mut server = talk(3, 0);
        server.says.get_mut()[9] = b'x';
        let error = handshake(&mut server).unwrap_err();
        assert!(error.to_string().contains("newstyle"), "{error}");
    }

    fn answer(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = u32::try_from(16 + payload.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn answers_are_parsed_and_truncated_answers_are_harmless() {
        let mut message = Message(vec![1, 1, 0, 0]);
        message.u64(ATTR_SIZE, 9);
        message.u32(ATTR_INDEX, 5);
        let whole = [answer(0x1b, &message.0), answer(2, &[0; 20])].concat();
        let mut found = None;
        assert!(parse(&whole, ATTR_INDEX, &mut found).unwrap());
        assert_eq!(found, Some(5_u32.to_ne_bytes().to_vec()));
        for cut in 0..whole.len() {
            let _ = parse(&whole[..cut], ATTR_INDEX, &mut found);
            let mut bent = whole.clone();
            bent[cut] ^= 0xff;
            let _ = parse(&bent, ATTR_INDEX, &mut found);
        }
        let refused = answer(2, &(-28_i32).to_ne_bytes());
        let error = parse(&refused, ATTR_INDEX, &mut found).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(ENOSPC));
    }

    #[test]
    fn the_kernel_is_offered_no_cache_to_flush() {
        let flags = |offered: u16| {
            let message = connect(0x1b, 5, Export { size: 1 << 30, flags: offered });
            let flags = attribute(&message.0[HEAD..], ATTR_SERVER_FLAGS).unwrap();
            u64::from_ne_bytes(flags.try_into().unwrap())
        };
        // The flags of our server: discard, write-zeroes and multi-conn stay.
        assert_eq!(flags(0x16d), 0x161);
        assert_eq!(flags(u16::MAX), 0xfff3);
        assert_eq!(flags(1), 1);
    }

    #[test]
    fn a_disk_s_number_is_in_its_name() {
        assert_eq!(index(Path::new("/dev/nbd12")).unwrap(), 12);
        assert!(index(Path::new("/dev/ublkb1")).is_err());
        assert!(index(Path::new("/dev/nbd")).is_err());
    }
}
