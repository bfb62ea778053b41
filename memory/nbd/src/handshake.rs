//! The fixed newstyle handshake: options in, replies out. No I/O.

mod messages;

use self::messages::{
    reply, u32_of, Reader, ABORT, ACK, ALLOCATION, ERR_INVALID, ERR_UNKNOWN, ERR_UNSUP,
    EXPORT_NAME, GO, INFO, INFO_BLOCK_SIZE, INFO_NAME, INFO_REPLY, LIST, LIST_META_CONTEXT,
    META_CONTEXT, SERVER, SET_META_CONTEXT, STRUCTURED_REPLY,
};
use crate::wire::{
    Session, ALLOCATION_ID, MAX_REQUEST, NBD_MAGIC, OPTION_MAGIC, TRANSMISSION_FLAGS,
    TRANSMISSION_FLAGS_SIMPLE,
};

/// The only export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The export's name; the empty name also means this export.
    pub name: String,
    /// The export's size in bytes.
    pub size: u64,
}

/// The state of a client's negotiation.
#[derive(Debug)]
pub struct Handshake<'a> {
    export: &'a Export,
    /// Whether the client's flags have arrived.
    greeted: bool,
    /// Whether the client wants no 124 zeros after [`EXPORT_NAME`].
    no_zeroes: bool,
    structured: bool,
    /// The export name for which `base:allocation` was negotiated.
    allocation: Option<Vec<u8>>,
    options: u32,
}

/// The result of a step of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes are needed.
    More,
    /// An option was answered; more may follow.
    Again,
    /// Requests follow.
    Serve(Session),
    /// The client has ended the handshake.
    End,
}

/// Why a handshake failed; the client is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The client sent flags that the server did not offer, or does not speak fixed newstyle.
    #[error("client flags {0:08x}, expected fixed newstyle")]
    Flags(u32),
    /// An option has a wrong magic number.
    #[error("option begins with {0:016x}")]
    Magic(u64),
    /// An option is too long.
    #[error("option {option} of {len} bytes, at most {MAX_OPTION} are allowed")]
    Length {
        /// The option.
        option: u32,
        /// The option's length, bytes.
        len: u32,
    },
    /// There were too many options.
    #[error("more than {MAX_OPTIONS} options")]
    Options,
    /// `NBD_OPT_EXPORT_NAME`, which has no error reply, names an unknown export.
    #[error("no export of that name")]
    Name,
}

/// The longest accepted option: more than a name of 4096 bytes, the longest allowed.
pub(crate) const MAX_OPTION: u32 = 8192;
/// The most input bytes that are needed at a time.
pub(crate) const INPUT: usize = 16 + MAX_OPTION as usize;
const MAX_OPTIONS: u32 = 128;

impl<'a> Handshake<'a> {
    /// The state of a new connection.
    pub fn new(export: &'a Export) -> Self {
        Self {
            export,
            greeted: false,
            no_zeroes: false,
            structured: false,
            allocation: None,
            options: 0,
        }
    }

    /// The server's greeting: newstyle, fixed, zeros may be omitted.
    pub fn greeting() -> [u8; 18] {
        let mut greeting = [0; 18];
        greeting[..8].copy_from_slice(&NBD_MAGIC.to_be_bytes());
        greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        greeting[16..].copy_from_slice(&3_u16.to_be_bytes());
        greeting
    }

    /// Parses one message at the front of `input`, appends the reply to `out` (at most some hundred
    /// bytes longer than the option), and returns the number of bytes consumed.
    ///
    /// # Errors
    ///
    /// The client violates the protocol in a way that has no error reply: close the connection.
    pub fn advance(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, Progress), Refusal> {
        if !self.greeted {
            let Some(flags) = input.first_chunk() else { return Ok((0, Progress::More)) };
            let flags = u32::from_be_bytes(*flags);
            if flags & !3 != 0 || flags & 1 == 0 {
                return Err(Refusal::Flags(flags));
            }
            self.greeted = true;
            self.no_zeroes = flags & 2 != 0;
            return Ok((4, Progress::Again));
        }
        let Some((magic, rest)) = input.split_first_chunk() else { return Ok((0, Progress::More)) };
        let magic = u64::from_be_bytes(*magic);
        if magic != OPTION_MAGIC {
            return Err(Refusal::Magic(magic));
        }
        let mut rest = Reader(rest);
        let (Some(option), Some(len)) = (rest.u32(), rest.u32()) else {
            return Ok((0, Progress::More));
        };
        if len > MAX_OPTION {
            return Err(Refusal::Length { option, len });
        }
        let Some(body) = rest.bytes(len as usize) else { return Ok((0, Progress::More)) };
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Err(Refusal::Options);
        }
        let taken = 16 + len as usize;
        Ok((taken, self.option(option, body, out)?))
    }

    fn option(&mut self, option: u32, body: &[u8], out: &mut Vec<u8>) -> Result<Progress, Refusal> {
        let mut say = |kind: u32, data: &[u8]| reply(out, option, kind, data);
        match option {
            EXPORT_NAME => {
                if !self.knows(body) {
                    return Err(Refusal::Name);
                }
                out.extend_from_slice(&self.export.size.to_be_bytes());
                out.extend_from_slice(&self.flags().to_be_bytes());
                if !self.no_zeroes {
                    out.extend_from_slice(&[0; 124]);
                }
                return Ok(Progress::Serve(self.session(body)));
            }
            ABORT => {
                say(ACK, &[]);
                return Ok(Progress::End);
            }
            LIST if !body.is_empty() => say(ERR_INVALID, b"a list takes no data"),
            LIST => {
                let name = self.export.name.as_bytes();
                let mut data = u32_of(name.len()).to_vec();
                data.extend_from_slice(name);
                say(SERVER, &data);
                say(ACK, &[]);
            }
            INFO | GO => return Ok(self.info(option, body, out)),
            STRUCTURED_REPLY if !body.is_empty() => say(ERR_INVALID, b"takes no data"),
            STRUCTURED_REPLY => {
                self.structured = true;
                say(ACK, &[]);
            }
            LIST_META_CONTEXT | SET_META_CONTEXT => self.meta(option, body, out),
            _ => say(ERR_UNSUP, b"not an option of this server"),
        }
        Ok(Progress::Again)
    }

    fn info(&mut self, option: u32, body: &[u8], out: &mut Vec<u8>) -> Progress {
        let mut body = Reader(body);
        let name = body.u32().and_then(|len| body.bytes(len as usize));
        let asked = body.u16();
        let sound = asked.is_some_and(|asked| body.0.len() == usize::from(asked) * 2);
        let Some(name) = name.filter(|_| sound) else {
            reply(out, option, ERR_INVALID, b"lengths do not fit each other");
            return Progress::Again;
        };
        if !self.knows(name) {
            reply(out, option, ERR_UNKNOWN, b"no export of that name");
            return Progress::Again;
        }
        let mut info = [0; 12];
        info[2..10].copy_from_slice(&self.export.size.to_be_bytes());
        info[10..].copy_from_slice(&self.flags().to_be_bytes());
        reply(out, option, INFO_REPLY, &info);
        for kind in body.0.chunks_exact(2) {
            if *kind == INFO_NAME.to_be_bytes() {
                let mut data = INFO_NAME.to_be_bytes().to_vec();
                data.extend_from_slice(self.export.name.as_bytes());
                reply(out, option, INFO_REPLY, &data);
                break;
            }
        }
        // Any alignment works. Whole pages are best.
        let mut sizes = [0; 14];
        sizes[..2].copy_from_slice(&INFO_BLOCK_SIZE.to_be_bytes());
        sizes[2..6].copy_from_slice(&1_u32.to_be_bytes());
        sizes[6..10].copy_from_slice(&4096_u32.to_be_bytes());
        sizes[10..].copy_from_slice(&MAX_REQUEST.to_be_bytes());
        reply(out, option, INFO_REPLY, &sizes);
        reply(out, option, ACK, &[]);
        if option == GO {
            Progress::Serve(self.session(name))
        } else {
            Progress::Again
        }
    }

    fn meta(&mut self, option: u32, body: &[u8], out: &mut Vec<u8>) {
        if option == SET_META_CONTEXT {
            self.allocation = None;
        }
        if !self.structured {
            reply(out, option, ERR_INVALID, b"structured replies come first");
            return;
        }
        let mut body = Reader(body);
        let name = body.u32().and_then(|len| body.bytes(len as usize));
        let (Some(name), Some(number)) = (name, body.u32()) else {
            reply(out, option, ERR_INVALID, b"lengths do not fit each other");
            return;
        };
        let mut found = option == LIST_META_CONTEXT && number == 0;
        for _ in 0..number {
            // Never more queries than the option has bytes for.
            let Some(query) = body.u32().and_then(|len| body.bytes(len as usize)) else {
                reply(out, option, ERR_INVALID, b"fewer queries than stated");
                return;
            };
            found |= query == ALLOCATION || option == LIST_META_CONTEXT && query == b"base:";
        }
        if !body.0.is_empty() {
            reply(out, option, ERR_INVALID, b"more queries than stated");
            return;
        }
        if !self.knows(name) {
            reply(out, option, ERR_UNKNOWN, b"no export of that name");
            return;
        }
        if found {
            let mut data = ALLOCATION_ID.to_be_bytes().to_vec();
            data.extend_from_slice(ALLOCATION);
            reply(out, option, META_CONTEXT, &data);
            if option == SET_META_CONTEXT {
                self.allocation = Some(name.to_vec());
            }
        }
        reply(out, option, ACK, &[]);
    }

    fn knows(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.export.name.as_bytes()
    }

    fn flags(&self) -> u16 {
        if self.structured {
            TRANSMISSION_FLAGS
        } else {
            TRANSMISSION_FLAGS_SIMPLE
        }
    }

    fn session(&self, name: &[u8]) -> Session {
        Session {
            size: self.export.size,
            structured: self.structured,
            allocation: self.allocation.as_deref() == Some(name),
        }
    }
}

#[cfg(test)]
mod tests;
