//! The bytes of a source in postcopy that are read on, and dropped.

use super::last::LastBytes;
use super::sections::Heads;
use rustix::fd::AsFd;
use rustix::net::{recv, RecvFlags};
use stream::{Token, Tokeniser};

/// Finds the sections of RAM that begin in these bytes, and the last one.
///
/// The parser of the stream knows them. Without one, or behind bytes that it does not understand,
/// they are found by their bytes ([`Heads`]), which a page of the guest may hold as well.
#[derive(Debug)]
pub(super) struct Follow {
    parser: Option<Tokeniser>,
    tokens: Vec<Token>,
    heads: Heads,
    last: LastBytes,
    /// The END section of RAM has begun.
    has_end: bool,
}

impl Follow {
    /// `parser` has read the stream up to here.
    pub(super) fn new(parser: Option<Tokeniser>) -> Self {
        let (heads, last) = (Heads::new(), LastBytes::default());
        Self { parser, tokens: Vec::new(), heads, last, has_end: false }
    }

    /// Reads bytes of `socket` without waiting, and drops them. Returns their number, 0 at its end,
    /// and the number of sections that begin there.
    pub(super) fn read(&mut self, socket: &impl AsFd) -> rustix::io::Result<(usize, u64)> {
        let (_, got) = recv(socket, self.heads.room(), RecvFlags::DONTWAIT)?;
        Ok((got, self.take(got)))
    }

    /// Takes the `got` bytes that were put into the room of `heads`.
    fn take(&mut self, got: usize) -> u64 {
        let fresh = self.heads.fresh(got);
        self.last.feed(fresh);
        let Some(parser) = &mut self.parser else {
            let (begun, ends) = self.heads.take(got);
            self.has_end |= ends;
            return begun;
        };
        let before = parser.facts().sections;
        parser.feed(fresh, &mut self.tokens);
        self.tokens.clear();
        let facts = parser.facts();
        let (_, ends) = self.heads.take(got);
        let is_lost = facts.opaque || facts.resyncs > 0;
        // Taken for its end without being one, a source is held, and not closed.
        self.has_end |= facts.ram_end || (is_lost && ends);
        facts.sections - before
    }

    /// Whether the END section of RAM has begun: a source that writes it has sent all, or sends the
    /// rest within that section.
    pub(super) fn has_end(&self) -> bool {
        self.has_end
    }

    /// As [`ends_stream`](Self::ends_stream), if `bytes` came next.
    pub(super) fn ends_with(&self, bytes: &[u8]) -> bool {
        let mut last = self.last.clone();
        last.feed(bytes);
        if self.has_end || last.end_stream() {
            return true;
        }
        let is_head = || self.heads.end_in(bytes);
        let Some(mut parser) = self.parser.clone() else { return is_head() };
        parser.feed(bytes, &mut Vec::new());
        let facts = parser.facts();
        facts.ram_end || ((facts.opaque || facts.resyncs > 0) && is_head())
    }

    /// Whether the bytes so far end a stream.
    pub(super) fn ends_stream(&self) -> bool {
        self.has_end || self.last.end_stream()
    }
}
