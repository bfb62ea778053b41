//! The reading position in one feed, and a buffer for fields that feeds may split.

use crate::token::Token;

/// The bytes of one feed, the reading position, and the position up to which tokens cover them.
pub(crate) struct Feed<'a> {
    bytes: &'a [u8],
    pos: usize,
    covered: usize,
    tokens: &'a mut Vec<Token>,
}

impl<'a> Feed<'a> {
    pub(crate) fn new(bytes: &'a [u8], tokens: &'a mut Vec<Token>) -> Self {
        Feed { bytes, pos: 0, covered: 0, tokens }
    }

    /// The bytes not read yet.
    pub(crate) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.pos..]
    }

    pub(crate) fn pos(&self) -> usize {
        self.pos
    }

    /// Skips `n` bytes, which must be present; they become `Raw` unless a token covers them.
    pub(crate) fn advance(&mut self, n: usize) {
        debug_assert!(n <= self.rest().len());
        self.pos += n;
    }

    /// Skips up to `left` bytes and subtracts them from `left`. Returns true when it is zero.
    pub(crate) fn skip(&mut self, left: &mut u64) -> bool {
        let n = usize::try_from(*left).unwrap_or(usize::MAX).min(self.rest().len());
        self.pos += n;
        *left -= n as u64;
        *left == 0
    }

    /// Covers the next `n` bytes, which must be present, by `token`, and skips them.
    pub(crate) fn take(&mut self, token: Token, n: usize) {
        self.cut();
        self.advance(n);
        self.tokens.push(token);
        self.covered = self.pos;
    }

    /// Covers the last `n` bytes read, none of which belong to a token yet, by `token`.
    pub(crate) fn take_back(&mut self, token: Token, n: usize) {
        self.raw_up_to(self.pos - n);
        self.tokens.push(token);
        self.covered = self.pos;
    }

    /// Makes a token boundary at the reading position.
    pub(crate) fn cut(&mut self) {
        self.raw_up_to(self.pos);
    }

    fn raw_up_to(&mut self, end: usize) {
        while self.covered < end {
            let len = u32::try_from(end - self.covered).unwrap_or(u32::MAX);
            self.tokens.push(Token::Raw { len });
            self.covered += len as usize;
        }
    }
}

/// Collects a field of known length, which feeds may split anywhere.
#[derive(Clone, Debug)]
pub(crate) struct Gather {
    // Invariant: `len <= buf.len()`; the bytes before `len` are the stream's last `len` bytes.
    buf: [u8; Gather::ROOM],
    len: usize,
}

impl Gather {
    /// Longest field: a device-state packet header (276 bytes).
    pub(crate) const ROOM: usize = 288;

    pub(crate) fn new() -> Self {
        Gather { buf: [0; Self::ROOM], len: 0 }
    }

    /// Whether a field is under way.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads until the field has `want` bytes (at most `ROOM`) and returns them; `None` while some
    /// are missing. May be called with a larger `want` for the same field until [`Gather::done`].
    pub(crate) fn field(&mut self, feed: &mut Feed<'_>, want: usize) -> Option<&[u8]> {
        let missing = want.saturating_sub(self.len);
        let n = missing.min(feed.rest().len());
        self.buf[self.len..self.len + n].copy_from_slice(&feed.rest()[..n]);
        self.len += n;
        feed.advance(n);
        (n == missing).then(|| &self.buf[..want])
    }

    /// Ends the field; the next one starts.
    pub(crate) fn done(&mut self) {
        self.len = 0;
    }
}

/// The big-endian `u64` at the start of `bytes`, which must be present.
pub(crate) fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().expect("8 bytes"))
}

/// The big-endian `u32` at `at`, which must be present.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}
