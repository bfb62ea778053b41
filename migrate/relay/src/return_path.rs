//! Finds SHUT and one PONG in a return path. A message has a u16 type, a u16 length and a body.
//!
//! Type 1 is SHUT with a u32, 0 for success; type 2 is PONG with its PING's u32. Everything else is
//! parsed just far enough not to mistake other bytes for these: a postcopy that is recovered sends
//! RECV_BITMAP (type 5), followed by a bitmap without a frame.

use crate::postcopy::LOADED;

const SHUT: u16 = 1;
/// The SHUT of a destination QEMU that has loaded the VM.
pub(crate) const SHUT_LOADED: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
/// The PONG of a destination QEMU that has loaded the packaged state of postcopy and runs it.
pub(crate) const PONG_LOADED: [u8; 8] = {
    let [a, b, c, d] = LOADED.to_be_bytes();
    [0, 2, 0, 4, a, b, c, d]
};
const RECV_BITMAP: u16 = 5;
/// QEMU's own limit on a frame's body.
const MAX_BODY: usize = 512;

/// The end mark of the bitmap behind a RECV_BITMAP frame.
const BITMAP_END: u64 = 0x0123_4567_89ab_cdef;
/// Largest bitmap accepted, in bytes: one bit a page of 4 KiB for 2^51 bytes of RAM.
const MAX_BITMAP: u64 = 1 << 36;

/// Finds SHUT in the bytes of a return path. The bytes may be split anywhere.
#[derive(Debug, Default)]
pub struct ReturnPath {
    state: State,
    /// The bytes so far of the frame's header and body, or of the field.
    gathered: Vec<u8>,
    loaded: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Frame,
    /// The length of a bitmap, which follows its frame without a frame of its own.
    BitmapLength,
    Bitmap {
        left: u64,
    },
    BitmapEnd,
    /// The bytes cannot be parsed, and no further bytes are.
    Blind,
}

impl ReturnPath {
    /// Parses more bytes. If they complete a SHUT, returns its value and the number of bytes of
    /// `bytes` before its frame.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<(u32, usize)> {
        let (mut begin, mut at) = (0, 0);
        while let Some(byte) = bytes.get(at) {
            match self.state {
                State::Blind => return None,
                State::Bitmap { left } => {
                    let here = (bytes.len() - at) as u64;
                    let taken = left.min(here);
                    // At most the length of `bytes`.
                    at += usize::try_from(taken).unwrap_or(usize::MAX);
                    let left = left - taken;
                    self.state = if left == 0 { State::BitmapEnd } else { State::Bitmap { left } };
                    continue;
                }
                State::Frame | State::BitmapLength | State::BitmapEnd => {}
            }
            if self.gathered.is_empty() {
                begin = at;
            }
            self.gathered.push(*byte);
            at += 1;
            if let Some(code) = self.gathered_byte() {
                return Some((code, begin));
            }
        }
        None
    }

    /// Whether [`PONG_LOADED`] was among the bytes so far.
    pub(crate) fn has_loaded(&self) -> bool {
        self.loaded
    }

    /// Whether the bytes so far end with a whole message, so that another message may follow.
    pub(crate) fn is_between_messages(&self) -> bool {
        self.state == State::Frame && self.gathered.is_empty()
    }

    /// Evaluates the gathered bytes; returns SHUT's value if they are a SHUT.
    fn gathered_byte(&mut self) -> Option<u32> {
        if self.state != State::Frame {
            let field = u64::from_be_bytes(self.gathered[..].try_into().ok()?);
            self.gathered.clear();
            self.state = match self.state {
                State::BitmapLength if field % 8 == 0 && field <= MAX_BITMAP => {
                    State::Bitmap { left: field }
                }
                State::BitmapEnd if field == BITMAP_END => State::Frame,
                _ => State::Blind,
            };
            return None;
        }
        let [a, b, c, d, body @ ..] = &self.gathered[..] else { return None };
        let kind = u16::from_be_bytes([*a, *b]);
        let length = usize::from(u16::from_be_bytes([*c, *d]));
        if length > MAX_BODY {
            self.state = State::Blind;
        }
        if body.len() < length {
            return None;
        }
        let shut = match (kind, body) {
            (SHUT, [a, b, c, d, ..]) => Some(u32::from_be_bytes([*a, *b, *c, *d])),
            _ => None,
        };
        self.loaded |= self.gathered == PONG_LOADED;
        if kind == RECV_BITMAP {
            self.state = State::BitmapLength;
        }
        self.gathered.clear();
        shut
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];
    const SHUT_OK: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
    const SHUT_BAD: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 1];

    #[test]
    fn shut_is_found_however_the_bytes_are_cut() {
        let bytes = [PONG, SHUT_OK].concat();
        assert_eq!(ReturnPath::default().feed(&bytes), Some((0, 8)));
        assert!(ReturnPath::default().is_between_messages());
        for cut in 1..16 {
            let mut path = ReturnPath::default();
            let first = path.feed(&bytes[..cut]);
            assert_eq!(first, None);
            assert_eq!(path.is_between_messages(), cut == 8, "cut at {cut}");
            assert_eq!(path.feed(&bytes[cut..]).map(|found| found.0), Some(0), "cut at {cut}");
        }
        assert_eq!(ReturnPath::default().feed(&SHUT_BAD), Some((1, 0)));
    }

    #[test]
    fn the_pong_of_the_packaged_state_is_found_however_the_bytes_are_cut() {
        let bytes = [PONG, PONG_LOADED].concat();
        for cut in 0..=16 {
            let mut path = ReturnPath::default();
            assert_eq!(path.feed(&bytes[..cut]), None);
            assert_eq!(path.has_loaded(), cut == 16, "cut at {cut}");
            assert_eq!(path.feed(&bytes[cut..]), None);
            assert!(path.has_loaded() && path.is_between_messages());
        }
        // The same bytes inside a bitmap mean nothing.
        let mut path = ReturnPath::default();
        let mut inside = bitmap(16, 16, BITMAP_END);
        inside[15..23].copy_from_slice(&PONG_LOADED);
        path.feed(&inside);
        assert!(!path.has_loaded() && path.is_between_messages());
    }

    #[test]
    fn after_unknown_bytes_the_parser_reports_nothing() {
        let mut path = ReturnPath::default();
        assert_eq!(path.feed(&[0, 9, 0xff, 0xff]), None);
        assert_eq!(path.feed(&SHUT_OK), None);
        assert!(!path.is_between_messages());
        // A bitmap whose length is no multiple of 8, and bitmaps that do not end where they should.
        for wrong in [bitmap(7, 7, BITMAP_END), bitmap(8, 16, BITMAP_END), bitmap(8, 8, 1)] {
            let mut path = ReturnPath::default();
            assert_eq!(path.feed(&wrong), None);
            assert_eq!(path.feed(&SHUT_OK), None);
        }
    }

    /// RECV_BITMAP of block "ab", with a bitmap of `has` bytes and a stated length of `says`.
    fn bitmap(says: u64, has: usize, end: u64) -> Vec<u8> {
        let frame = [0, 5, 0, 3, 2, b'a', b'b'];
        // The bytes of SHUT, repeated: inside a bitmap they mean nothing.
        let map = SHUT_OK.iter().cycle().take(has).copied().collect::<Vec<_>>();
        [&frame[..], &says.to_be_bytes(), &map, &end.to_be_bytes()].concat()
    }

    #[test]
    fn shut_is_found_behind_bitmaps() {
        let bytes =
            [bitmap(64, 64, BITMAP_END), bitmap(0, 0, BITMAP_END), PONG.into(), SHUT_OK.into()]
                .concat();
        let before = bytes.len() - 8;
        assert_eq!(ReturnPath::default().feed(&bytes), Some((0, before)));
        for cut in 1..bytes.len() {
            let mut path = ReturnPath::default();
            assert_eq!(path.feed(&bytes[..cut]), None);
            assert_eq!(path.feed(&bytes[cut..]).map(|found| found.0), Some(0), "cut at {cut}");
        }
    }
}
