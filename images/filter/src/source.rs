//! Input with as many bytes in memory as a frame needs.

use std::io::{self, BufRead, Read};

/// Bytes read at a time.
const PIECE: usize = 1 << 20;

/// A buffered input that can hold a whole frame.
pub(crate) struct Source<'a> {
    input: &'a mut dyn Read,
    buffer: Vec<u8>,
    /// Consumed bytes of the buffer.
    start: usize,
    ended: bool,
    /// Consumed bytes of the stream.
    pub(crate) offset: u64,
}

impl<'a> Source<'a> {
    pub(crate) fn new(input: &'a mut dyn Read) -> Self {
        Self { input, buffer: Vec::new(), start: 0, ended: false, offset: 0 }
    }

    /// The bytes in memory.
    pub(crate) fn held(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    /// Reads until `wanted` bytes are in memory. Returns `false` if the stream ends before.
    pub(crate) fn want(&mut self, wanted: usize) -> io::Result<bool> {
        while self.held().len() < wanted && !self.ended {
            if self.start > 0 {
                self.buffer.drain(..self.start);
                self.start = 0;
            }
            let most = (wanted - self.buffer.len()).max(PIECE) as u64;
            let read = (&mut *self.input).take(most).read_to_end(&mut self.buffer)?;
            self.ended = (read as u64) < most;
        }
        Ok(self.held().len() >= wanted)
    }
}

impl Read for Source<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.fill_buf()?.read(out)?;
        self.consume(count);
        Ok(count)
    }
}

impl BufRead for Source<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.held().is_empty() {
            self.want(1)?;
        }
        Ok(self.held())
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        self.offset += count as u64;
        debug_assert!(self.start <= self.buffer.len());
    }
}
