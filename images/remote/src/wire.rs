//! The bytes between client and server. Numbers are big-endian.
//!
//! ```text
//!  hello    "PLATENIM" │ version u16 │ 6 zero bytes │ session [16]
//!  request  operation u8 │ lock u8 │ length of the name u16 │ length u32 │ offset u64 │ stamp u128 │ name
//!  reply    status u8 │ 3 zero bytes │ length u32 │ so many bytes
//! ```
//!
//! A hello gets a reply without bytes. The bytes of a reply are those of the file after READ,
//! stamp and length of the file after OPEN, and a text after a refusal.

use std::io::{self, Read, Write};

/// Length of a hello.
pub(crate) const HELLO: usize = 32;
/// Length of a request without its name.
const REQUEST: usize = 32;
/// Length of a reply without its bytes.
pub(crate) const REPLY: usize = 8;
/// Length of the reply to OPEN.
pub(crate) const OPENED: usize = 24;
/// Maximum length of a name.
pub(crate) const MAX_NAME: usize = 512;
/// Maximum length of a refusal's text.
const MAX_TEXT: usize = 1024;
/// Maximum number of bytes of one READ.
pub const MAX_READ: usize = 1 << 20;

const MAGIC: &[u8; 8] = b"PLATENIM";
const VERSION: u16 = 1;
const OPEN: u8 = 1;
const READ: u8 = 2;
const END: u8 = 3;

/// Identifies a session.
pub type Token = [u8; 16];

/// The lock of a file that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// None.
    None,
    /// Other sessions may hold a shared one, too.
    Shared,
    /// No other session or process has one.
    Exclusive,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Open the file of this name.
    Open {
        /// Name in the server's folder.
        name: String,
        /// Its lock.
        lock: Lock,
    },
    /// Read `len` bytes from `offset` on of the open file with this stamp.
    Read {
        /// Identifies the file.
        stamp: u128,
        /// First byte.
        offset: u64,
        /// Number of bytes, at most [`MAX_READ`].
        len: u32,
    },
    /// The client's process needs the session no more.
    End,
}

/// The kind of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request was carried out.
    Ok,
    /// There is no file of this name that the server would serve.
    NotFound,
    /// Another restore has a lock of the file.
    InUse,
    /// The session has no open file with this stamp. The client opens it again.
    NotOpen,
    /// The server cannot read the file.
    Io,
    /// The request violates the protocol or a limit.
    Refused,
}

impl Status {
    const ALL: [Self; 6] =
        [Self::Ok, Self::NotFound, Self::InUse, Self::NotOpen, Self::Io, Self::Refused];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

/// An error of the peer, who violates the protocol.
pub(crate) fn broken(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

pub(crate) fn hello(session: &Token) -> [u8; HELLO] {
    let mut hello = [0; HELLO];
    hello[..8].copy_from_slice(MAGIC);
    hello[8..10].copy_from_slice(&VERSION.to_be_bytes());
    hello[16..].copy_from_slice(session);
    hello
}

/// The session that a hello names.
pub(crate) fn read_hello(hello: &[u8; HELLO]) -> Result<Token, String> {
    if &hello[..8] != MAGIC {
        return Err("this is platen serve-images, and the peer is no restore".into());
    }
    let version = u16::from_be_bytes([hello[8], hello[9]]);
    if version != VERSION {
        return Err(format!("the peer has protocol version {version}, and this host {VERSION}"));
    }
    Ok(hello[16..].try_into().expect("16 bytes"))
}

impl Request {
    fn to_bytes(&self) -> Vec<u8> {
        let (operation, lock, name, len, offset, stamp) = match self {
            Self::Open { name, lock } => (OPEN, *lock as u8, name.as_str(), 0, 0, 0),
            Self::Read { stamp, offset, len } => (READ, 0, "", *len, *offset, *stamp),
            Self::End => (END, 0, "", 0, 0, 0),
        };
        let mut bytes = vec![operation, lock];
        // A longer name is refused by the server, by its length.
        bytes.extend(u16::try_from(name.len()).unwrap_or(u16::MAX).to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(stamp.to_be_bytes());
        bytes.extend(name.as_bytes());
        bytes
    }

    /// Reads a request. `None`: the connection has ended between two requests.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut head = [0; REQUEST];
        match from.read_exact(&mut head[..1]) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        from.read_exact(&mut head[1..])?;
        let name_len = usize::from(u16::from_be_bytes([head[2], head[3]]));
        if name_len > MAX_NAME {
            return Err(broken(&format!("a name of {name_len} bytes, limit {MAX_NAME}")));
        }
        let mut name = vec![0; name_len];
        from.read_exact(&mut name)?;
        let len = u32::from_be_bytes(head[4..8].try_into().expect("4 bytes"));
        let offset = u64::from_be_bytes(head[8..16].try_into().expect("8 bytes"));
        let stamp = u128::from_be_bytes(head[16..].try_into().expect("16 bytes"));
        let request = match head[0] {
            OPEN => {
                let lock = [Lock::None, Lock::Shared, Lock::Exclusive];
                let lock = lock.get(usize::from(head[1])).ok_or_else(|| broken("unknown lock"))?;
                let name = String::from_utf8(name).map_err(|_| broken("a name is no UTF-8"))?;
                Self::Open { name, lock: *lock }
            }
            READ if len as usize > MAX_READ => {
                return Err(broken(&format!("a read of {len} bytes, limit {MAX_READ}")));
            }
            READ => Self::Read { stamp, offset, len },
            END => Self::End,
            other => return Err(broken(&format!("unknown operation {other}"))),
        };
        Ok(Some(request))
    }
}

/// Begins a reply with `len` bytes in `out`, and returns the room for them.
pub(crate) fn begin_reply(out: &mut Vec<u8>, status: Status, len: usize) -> &mut [u8] {
    out.clear();
    out.resize(REPLY + len, 0);
    out[0] = status as u8;
    out[4..8].copy_from_slice(&u32::try_from(len).expect("at most 1 MiB").to_be_bytes());
    &mut out[REPLY..]
}

/// Puts a refusal into `out`.
pub(crate) fn put_refusal(out: &mut Vec<u8>, status: Status, text: &str) {
    let mut len = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    begin_reply(out, status, len).copy_from_slice(&text.as_bytes()[..len]);
}

/// Sends a request, and reads the reply into `out`, which has the length that the reply has if the
/// server carries the request out.
///
/// # Errors
///
/// Outer: the connection's, or the peer violates the protocol. Inner: the server's refusal.
pub fn ask(
    peer: &mut (impl Read + Write),
    request: &Request,
    out: &mut [u8],
) -> io::Result<Result<(), (Status, String)>> {
    peer.write_all(&request.to_bytes())?;
    read_reply(peer, out)
}

pub(crate) fn read_reply(
    peer: &mut impl Read,
    out: &mut [u8],
) -> io::Result<Result<(), (Status, String)>> {
    let mut head = [0; REPLY];
    peer.read_exact(&mut head)?;
    let len = u32::from_be_bytes(head[4..].try_into().expect("4 bytes")) as usize;
    match Status::from_byte(head[0]) {
        None => Err(broken("the reply is not of this protocol")),
        Some(Status::Ok) if len == out.len() => peer.read_exact(out).map(Ok),
        Some(Status::Ok) => {
            Err(broken(&format!("a reply of {len} bytes in place of {}", out.len())))
        }
        Some(_) if len > MAX_TEXT => Err(broken(&format!("a refusal of {len} bytes"))),
        Some(status) => {
            let mut text = vec![0; len];
            peer.read_exact(&mut text)?;
            // It goes to a terminal.
            let text: String = String::from_utf8_lossy(&text)
                .chars()
                .map(|char| if char.is_control() { '?' } else { char })
                .collect();
            Ok(Err((status, text)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> [Request; 4] {
        [
            Request::Open { name: "store/vm".into(), lock: Lock::Exclusive },
            Request::Open { name: String::new(), lock: Lock::None },
            Request::Read { stamp: u128::MAX - 5, offset: 1 << 40, len: 9 },
            Request::End,
        ]
    }

    #[test]
    fn requests_come_back_and_cut_ones_are_refused() {
        for request in requests() {
            let bytes = request.to_bytes();
            assert_eq!(Request::read(&mut &bytes[..]).unwrap(), Some(request));
            assert_eq!(Request::read(&mut &bytes[..0]).unwrap(), None);
            for len in 1..bytes.len() {
                let error = Request::read(&mut &bytes[..len]).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            }
        }
    }

    #[test]
    fn numbers_beyond_the_limits_are_refused_by_name() {
        let refused = |at: usize, value: u8| {
            let mut bytes = Request::Read { stamp: 1, offset: 2, len: 3 }.to_bytes();
            bytes[at] = value;
            bytes.extend([0; 600]);
            Request::read(&mut &bytes[..]).unwrap_err().to_string()
        };
        assert!(refused(0, 9).contains("unknown operation 9"));
        assert!(refused(2, 3).contains("a name of 768 bytes"));
        assert!(refused(4, 1).contains("a read of 16777219 bytes"));
        let mut open = requests()[0].to_bytes();
        open[1] = 3;
        assert!(Request::read(&mut &open[..]).unwrap_err().to_string().contains("lock"));
        (open[1], open[33]) = (0, 0xff);
        assert!(Request::read(&mut &open[..]).unwrap_err().to_string().contains("UTF-8"));
    }

    #[test]
    fn a_hello_names_its_session_or_is_refused() {
        let session = [7; 16];
        assert_eq!(read_hello(&hello(&session)), Ok(session));
        let mut other = hello(&session);
        other[9] = 2;
        assert!(read_hello(&other).unwrap_err().contains("version 2"));
        other[0] = b'G';
        assert!(read_hello(&other).unwrap_err().contains("no restore"));
    }

    #[test]
    fn a_reply_has_the_length_that_was_asked_for_or_is_refused() {
        let mut reply = Vec::new();
        begin_reply(&mut reply, Status::Ok, 3).copy_from_slice(b"abc");
        let mut out = [0; 3];
        assert_eq!(read_reply(&mut &reply[..], &mut out).unwrap(), Ok(()));
        assert_eq!(&out, b"abc");
        assert!(read_reply(&mut &reply[..], &mut [0; 4]).is_err());
        assert!(read_reply(&mut &reply[..9], &mut out).is_err());
        put_refusal(&mut reply, Status::InUse, "in use\x1b");
        let refused = read_reply(&mut &reply[..], &mut out).unwrap();
        assert_eq!(refused, Err((Status::InUse, "in use?".into())));
        put_refusal(&mut reply, Status::Io, &"ü".repeat(MAX_TEXT));
        let refused = read_reply(&mut &reply[..], &mut out).unwrap().unwrap_err();
        assert_eq!((refused.0, refused.1.len()), (Status::Io, MAX_TEXT));
        reply[6] = 9;
        assert!(read_reply(&mut &reply[..], &mut out).is_err());
        reply[0] = 77;
        assert!(read_reply(&mut &reply[..], &mut out).is_err());
    }
}
