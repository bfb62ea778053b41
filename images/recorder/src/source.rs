//! The stream's bytes: a window over the reader, which also feeds the tokeniser.

use std::io::{ErrorKind, Read};

use stream::{Facts, Kind, Token, Tokeniser};

use crate::RecordError;

/// Length of the window. QEMU writes about 130 KB at a time.
const WINDOW: usize = 1 << 20;

pub(crate) struct Source<R> {
    reader: R,
    window: Box<[u8]>,
    /// `window[begin..end]` is read and not consumed.
    begin: usize,
    end: usize,
    /// Bytes consumed so far.
    at: u64,
    judge: Tokeniser,
    tokens: Vec<Token>,
    /// The part of the stream that the grammar is reading, for the error of a stream that ends
    /// there.
    pub(crate) during: &'static str,
}

impl<R: Read> Source<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self {
            reader,
            window: vec![0; WINDOW].into_boxed_slice(),
            begin: 0,
            end: 0,
            at: 0,
            judge: Tokeniser::new(Kind::Main, 4096),
            tokens: Vec::new(),
            during: "in its header",
        }
    }

    /// Offset of the next byte in the stream.
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

    /// Reads once from the reader; false at the end.
    fn fill<E>(&mut self) -> Result<bool, RecordError<E>> {
        if self.begin > 0 {
            self.window.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        loop {
            match self.reader.read(&mut self.window[self.end..]) {
                Ok(len) => {
                    self.tokens.clear();
                    let new = &self.window[self.end..self.end + len];
                    self.judge.feed(new, &mut self.tokens);
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
