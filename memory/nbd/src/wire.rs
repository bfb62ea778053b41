//! Numbers and layouts of the NBD protocol's transmission phase, without I/O. All numbers are
//! big-endian.
//!
//! Source: the protocol document of the NetworkBlockDevice project, `doc/proto.md`.

/// The first 8 bytes of a server's greeting: `NBDMAGIC`.
pub(crate) const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The start of an option, and the second 8 bytes of the greeting: `IHAVEOPT`.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// The most bytes of a read or write: 32 MiB, which clients assume by default.
pub const MAX_REQUEST: u32 = 32 << 20;

/// The export's transmission flags: has flags, flush, FUA, trim, write-zeroes, don't-fragment,
/// multi-conn, fast-zero.
pub(crate) const TRANSMISSION_FLAGS: u16 =
    1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 11;
/// [`TRANSMISSION_FLAGS`] without don't-fragment, which needs structured replies.
pub(crate) const TRANSMISSION_FLAGS_SIMPLE: u16 = TRANSMISSION_FLAGS & !(1 << 7);

const FLAG_FUA: u16 = 1;
const FLAG_NO_HOLE: u16 = 1 << 1;
const FLAG_DF: u16 = 1 << 2;
const FLAG_REQ_ONE: u16 = 1 << 3;
const FLAG_FAST_ZERO: u16 = 1 << 4;

/// Length of a request.
pub(crate) const REQUEST: usize = 28;
/// Length of a simple reply.
pub(crate) const SIMPLE_REPLY: usize = 16;
/// Length of a chunk's header.
pub(crate) const CHUNK: usize = 20;
/// Length of everything before the data in a data chunk.
pub(crate) const DATA_CHUNK: usize = CHUNK + 8;

/// `base:allocation`: nothing is stored.
pub(crate) const STATE_HOLE: u32 = 1;
/// `base:allocation`: reads as zeros.
pub(crate) const STATE_ZERO: u32 = 2;
/// The id of the only metadata context.
pub(crate) const ALLOCATION_ID: u32 = 1;

/// An error with the protocol's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Error {
    /// A page cannot be read.
    Io = 5,
    /// The request is invalid.
    Invalid = 22,
    /// There is no room, or a write lies beyond the end.
    NoSpace = 28,
    /// The reply is too long for one chunk.
    Overflow = 75,
    /// The request is not supported.
    NotSupported = 95,
}

impl From<device::Errno> for Error {
    fn from(errno: device::Errno) -> Self {
        match errno {
            device::Errno::Io => Self::Io,
            device::Errno::Invalid => Self::Invalid,
            device::Errno::NoSpace => Self::NoSpace,
        }
    }
}

/// A client's command, checked against the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads bytes.
    Read {
        /// Whether the reply must be a single chunk.
        whole: bool,
    },
    /// Writes bytes, which follow.
    Write,
    /// Flushes: there is nothing to do, because completed writes are stored.
    Flush,
    /// Trims: the bytes are no longer needed.
    Trim,
    /// Writes zeros.
    Zero {
        /// Whether the zeros count as stored.
        keep: bool,
    },
    /// Requests block status.
    Status {
        /// Whether to report only one extent.
        one: bool,
    },
}

/// A valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// The client's id of the request.
    pub cookie: u64,
    /// The first byte.
    pub offset: u64,
    /// Length in bytes; the range is within the export.
    pub length: u32,
}

/// The result of parsing a request's 28 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// A valid request.
    Do(Request),
    /// The server has to reply with this error, after skipping `skip` bytes of payload.
    Refuse {
        /// The client's id of the request.
        cookie: u64,
        /// The error.
        error: Error,
        /// Payload that follows, at most [`MAX_REQUEST`].
        skip: u32,
        /// Whether the reply is structured, where structured replies are in use.
        structured: bool,
    },
    /// The client disconnects.
    Disconnect,
    /// The client violates the protocol: the start of the next request is unknown.
    Broken(Broken),
}

/// Why a connection cannot continue; the client is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Broken {
    /// A request has a wrong magic number.
    #[error("request begins with {0:08x}")]
    Magic(u32),
    /// A write is too long. Its payload is not read in order to be discarded.
    #[error("write of {0} bytes, at most {MAX_REQUEST} are allowed")]
    Length(u32),
}

/// The negotiated parameters, against which requests are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// The export's size in bytes.
    pub size: u64,
    /// Whether structured replies were negotiated.
    pub structured: bool,
    /// Whether `base:allocation` was negotiated.
    pub allocation: bool,
}

impl Session {
    /// Parses a request.
    pub fn parse(&self, bytes: &[u8; REQUEST]) -> Parsed {
        let [m0, m1, m2, m3, f0, f1, t0, t1, rest @ ..] = *bytes;
        let [c0, c1, c2, c3, c4, c5, c6, c7, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3] = rest;
        let magic = u32::from_be_bytes([m0, m1, m2, m3]);
        let flags = u16::from_be_bytes([f0, f1]);
        let kind = u16::from_be_bytes([t0, t1]);
        let cookie = u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]);
        let offset = u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]);
        let length = u32::from_be_bytes([l0, l1, l2, l3]);
        if magic != REQUEST_MAGIC {
            return Parsed::Broken(Broken::Magic(magic));
        }
        let within = offset.checked_add(u64::from(length)).is_some_and(|end| end <= self.size);
        // The command, its allowed flags, and the error for a range outside of the export.
        let (command, allowed, outside) = match kind {
            0 => {
                (Command::Read { whole: flags & FLAG_DF != 0 }, FLAG_FUA | FLAG_DF, Error::Invalid)
            }
            1 => (Command::Write, FLAG_FUA, Error::NoSpace),
            2 => return Parsed::Disconnect,
            3 => (Command::Flush, FLAG_FUA, Error::Invalid),
            4 => (Command::Trim, FLAG_FUA, Error::Invalid),
            6 => (
                Command::Zero { keep: flags & FLAG_NO_HOLE != 0 },
                FLAG_FUA | FLAG_NO_HOLE | FLAG_FAST_ZERO,
                Error::NoSpace,
            ),
            7 => (
                Command::Status { one: flags & FLAG_REQ_ONE != 0 },
                FLAG_FUA | FLAG_REQ_ONE,
                Error::Invalid,
            ),
            _ => {
                let error = Error::Invalid;
                return Parsed::Refuse { cookie, error, skip: 0, structured: false };
            }
        };
        let write = command == Command::Write;
        if write && length > MAX_REQUEST {
            return Parsed::Broken(Broken::Length(length));
        }
        let structured = matches!(command, Command::Read { .. } | Command::Status { .. });
        let refuse = |error| {
            let skip = if write { length } else { 0 };
            Parsed::Refuse { cookie, error, skip, structured }
        };
        if flags & !allowed != 0 || flags & FLAG_DF != 0 && !self.structured {
            return refuse(Error::Invalid);
        }
        match command {
            Command::Flush => {}
            Command::Read { .. } if length > MAX_REQUEST => return refuse(Error::Overflow),
            Command::Status { .. } if !self.allocation || length == 0 => {
                return refuse(Error::Invalid);
            }
            _ if !within => return refuse(outside),
            _ => {}
        }
        Parsed::Do(Request { command, cookie, offset, length })
    }
}

/// Encodes a simple reply. The bytes of a successful read follow it.
pub(crate) fn simple_reply(cookie: u64, error: Option<Error>) -> [u8; SIMPLE_REPLY] {
    let mut reply = [0; SIMPLE_REPLY];
    reply[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&error.map_or(0, |error| error as u32).to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}

/// Encodes the header of a chunk with `length` bytes of payload.
fn chunk(kind: u16, last: bool, cookie: u64, length: u32) -> [u8; CHUNK] {
    let mut header = [0; CHUNK];
    header[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    header[4..6].copy_from_slice(&u16::from(last).to_be_bytes());
    header[6..8].copy_from_slice(&kind.to_be_bytes());
    header[8..16].copy_from_slice(&cookie.to_be_bytes());
    header[16..].copy_from_slice(&length.to_be_bytes());
    header
}

/// Encodes the header of a chunk with `length` bytes of data at `offset`.
pub(crate) fn data_chunk(cookie: u64, last: bool, offset: u64, length: u32) -> [u8; DATA_CHUNK] {
    let mut header = [0; DATA_CHUNK];
    header[..CHUNK].copy_from_slice(&chunk(1, last, cookie, length + 8));
    header[CHUNK..].copy_from_slice(&offset.to_be_bytes());
    header
}

/// Encodes the reply to a read of no bytes.
pub(crate) fn empty_chunk(cookie: u64) -> [u8; CHUNK] {
    chunk(0, true, cookie, 0)
}

/// Encodes the last chunk of a request that failed.
pub(crate) fn error_chunk(cookie: u64, error: Error) -> [u8; CHUNK + 6] {
    let mut reply = [0; CHUNK + 6];
    reply[..CHUNK].copy_from_slice(&chunk(1 << 15 | 1, true, cookie, 6));
    reply[CHUNK..CHUNK + 4].copy_from_slice(&(error as u32).to_be_bytes());
    // No text: a length of two zero bytes.
    reply
}

/// Encodes the header of a block status reply with `extents` descriptors.
pub(crate) fn status_chunk(cookie: u64, extents: usize) -> [u8; CHUNK + 4] {
    let length = u32::try_from(4 + 8 * extents).expect("a bounded number of extents");
    let mut header = [0; CHUNK + 4];
    header[..CHUNK].copy_from_slice(&chunk(5, true, cookie, length));
    header[CHUNK..].copy_from_slice(&ALLOCATION_ID.to_be_bytes());
    header
}

#[cfg(test)]
mod tests;
