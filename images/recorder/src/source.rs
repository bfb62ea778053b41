//! The stream's bytes: a window over the reader, which also feeds the tokeniser.

use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use stream::{Facts, Kind, Token, Tokeniser};

use crate::RecordError;

/// Length of the window of a main channel. QEMU writes about 130 KB at a time.
const WINDOW: usize = 1 << 20;
/// Length of the window of a multifd channel: the pages of one packet, and some headers.
const CHANNEL_WINDOW: usize = (512 + 8) << 10;

/// Moves a reader to an offset, or to its end if the end is before it. Returns the new position.
type Jump<R> = fn(&mut R, u64) -> io::Result<u64>;

pub(crate) struct Source<R> {
    reader: R,
    /// `None` if the reader cannot seek.
    jump: Option<Jump<R>>,
    window: Box<[u8]>,
    /// `window[begin..end]` is read and not consumed.
    begin: usize,
    end: usize,
    /// Offset of the next byte.
    at: u64,
    judge: Tokeniser,
    /// Whether the tokeniser gets the bytes. It cannot follow a jump.
    judged: bool,
    tokens: Vec<Token>,
    /// The part of the stream that the grammar is reading, for the error of a stream that ends
    /// there.
    pub(crate) during: &'static str,
}

impl<R: Read> Source<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self::with(reader, Tokeniser::new(Kind::Main, 4096), WINDOW)
    }

    /// Creates a source over a multifd channel whose first packet, `init`, was read.
    pub(crate) fn of_channel(reader: R, init: &[u8], page_size: usize) -> Self {
        let mut this = Self::with(reader, Tokeniser::new(Kind::Multifd, page_size), CHANNEL_WINDOW);
        this.judge.feed(init, &mut this.tokens);
        this.at = init.len() as u64;
        this
    }

    fn with(reader: R, judge: Tokeniser, window: usize) -> Self {
        Self {
            reader,
            jump: None,
            window: vec![0; window].into_boxed_slice(),
            begin: 0,
            end: 0,
            at: 0,
            judge,
            judged: true,
            tokens: Vec::new(),
            during: "in its header",
        }
    }

    /// Creates a source over a file. Offsets are those of the file.
    pub(crate) fn of_file<E>(mut file: R) -> Result<Self, RecordError<E>>
    where
        R: Seek,
    {
        let at = file.stream_position().map_err(|source| RecordError::Io { at: 0, source })?;
        let jump: Jump<R> = |file, to| {
            let end = file.seek(SeekFrom::End(0))?;
            file.seek(SeekFrom::Start(to.min(end)))
        };
        Ok(Self { jump: Some(jump), at, ..Self::new(file) })
    }

    pub(crate) fn into_reader(self) -> R {
        self.reader
    }

    /// Whether [`Source::jump`] works.
    pub(crate) fn can_jump(&self) -> bool {
        self.jump.is_some()
    }

    /// Continues at offset `to`, which must not lie before the next byte.
    pub(crate) fn jump<E>(&mut self, to: u64) -> Result<(), RecordError<E>> {
        self.judged = false;
        let left = to - self.at;
        if left <= (self.end - self.begin) as u64 {
            self.begin += usize::try_from(left).expect("in the window");
        } else {
            let jump = self.jump.ok_or(RecordError::NoFile)?;
            let found = jump(&mut self.reader, to);
            let found = found.map_err(|source| RecordError::Io { at: to, source })?;
            if found < to {
                return Err(RecordError::Ends { at: found, during: self.during });
            }
            (self.begin, self.end) = (0, 0);
        }
        self.at = to;
        Ok(())
    }

    /// Offset of the next byte in the stream, or in the file.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// The tokeniser's counts of all bytes read.
    pub(crate) fn judge(&self) -> &Facts {
        self.judge.facts()
    }

    /// Returns the next `len` bytes without consuming them; `len` must not exceed the window.
    pub(crate) fn peek<E>(&mut self, len: usize) -> Result<&[u8], RecordError<E>> {
        while self.end - self.begin < len {
            if !self.fill()? {
                let at = self.at + (self.end - self.begin) as u64;
                return Err(RecordError::Ends { at, during: self.during });
            }
        }
        Ok(&self.window[self.begin..self.begin + len])
    }

    /// Consumes the next `len` bytes.
    pub(crate) fn take<E>(&mut self, len: usize) -> Result<&[u8], RecordError<E>> {
        self.peek(len)?;
        let begin = self.begin;
        self.begin += len;
        self.at += len as u64;
        Ok(&self.window[begin..begin + len])
    }

    pub(crate) fn array<const N: usize, E>(&mut self) -> Result<[u8; N], RecordError<E>> {
        Ok(self.take(N)?.try_into().expect("as long as asked for"))
    }

    pub(crate) fn u8<E>(&mut self) -> Result<u8, RecordError<E>> {
        Ok(self.array::<1, E>()?[0])
    }

    pub(crate) fn u16<E>(&mut self) -> Result<u16, RecordError<E>> {
        Ok(u16::from_be_bytes(self.array()?))
    }

    pub(crate) fn u32<E>(&mut self) -> Result<u32, RecordError<E>> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(crate) fn u64<E>(&mut self) -> Result<u64, RecordError<E>> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// Consumes a name behind its length in one byte. QEMU's names are ASCII.
    pub(crate) fn name<E>(&mut self) -> Result<String, RecordError<E>> {
        let len = usize::from(self.u8()?);
        let at = self.at;
        let bytes = self.take(len)?.to_vec();
        String::from_utf8(bytes).map_err(|_| unknown(at, "a name that is not UTF-8"))
    }

    /// Consumes all bytes in the window, at least one; `None` at the end of the stream.
    pub(crate) fn rest<E>(&mut self) -> Result<Option<&[u8]>, RecordError<E>> {
        if self.begin == self.end && !self.fill()? {
            return Ok(None);
        }
        let begin = self.begin;
        self.at += (self.end - begin) as u64;
        self.begin = self.end;
        Ok(Some(&self.window[begin..self.end]))
    }

    /// Whether the stream has ended at the next byte.
    pub(crate) fn has_ended<E>(&mut self) -> Result<bool, RecordError<E>> {
        Ok(self.begin == self.end && !self.fill()?)
    }

    /// Reads once from the reader; false at the end.
    fn fill<E>(&mut self) -> Result<bool, RecordError<E>> {
        if self.begin > 0 {
            self.window.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        loop {
            match self.reader.read(&mut self.window[self.end..]) {
                Ok(len) => {
                    if self.judged {
                        self.tokens.clear();
                        let new = &self.window[self.end..self.end + len];
                        self.judge.feed(new, &mut self.tokens);
                    }
                    self.end += len;
                    return Ok(len > 0);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => return Err(RecordError::Io { at: self.at, source }),
            }
        }
    }
}

pub(crate) fn unknown<E>(at: u64, what: impl Into<String>) -> RecordError<E> {
    RecordError::Unknown { at, what: what.into() }
}

pub(crate) fn refused<E>(what: impl Into<String>) -> RecordError<E> {
    RecordError::Refused { what: what.into() }
}
