//! Parses QEMU's messages on the return path.

use crate::PlayError;

/// A message on the return path.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message {
    /// SHUT, the end of the migration: 0 if everything was loaded.
    Shut(u32),
    /// PONG, the answer to a PING, with its number.
    Pong(u32),
    /// REQ_PAGES: a thread of QEMU waits for these bytes.
    Pages {
        /// Name of the block; `None`: the block of the previous request.
        block: Option<String>,
        /// Offset of the first byte in the block.
        start: u64,
        /// Number of bytes.
        len: u32,
    },
    /// RECV_BITMAP: the received bitmap of a block.
    Received {
        /// Name of the block.
        block: String,
        /// One bit per page, lowest bit first; set if the page has arrived.
        bits: Vec<u8>,
    },
    /// RESUME_ACK, the answer to RESUME: 1 if the migration continues.
    Resumed(u32),
    /// SWITCHOVER_ACK: QEMU permits the switchover. No answer is needed.
    SwitchoverAck,
}

const SHUT: u16 = 1;
const PONG: u16 = 2;
const REQUEST_OF_BLOCK: u16 = 3;
const REQUEST: u16 = 4;
const RECV_BITMAP: u16 = 5;
const RESUME_ACK: u16 = 6;
const SWITCHOVER_ACK: u16 = 7;

/// QEMU's limit for the body of a message, bytes.
const MAX_BODY: usize = 512;
/// End mark of a received bitmap.
const BITMAP_END: u64 = 0x0123_4567_89ab_cdef;

/// Parses messages from bytes in pieces of any size. It buffers the pushed bytes that are not yet
/// parsed, and accepts a bitmap only of the expected length.
#[derive(Debug, Default)]
pub struct ReturnPath {
    bytes: Vec<u8>,
    /// Offset of the next message in `bytes`.
    at: usize,
    /// Length of the expected bitmap, bytes.
    bitmap: Option<usize>,
}

impl ReturnPath {
    /// Expects one received bitmap of `pages` bits. Any other bitmap is refused.
    pub fn expect_bitmap(&mut self, pages: u64) {
        // QEMU rounds up to 64-bit words.
        self.bitmap = usize::try_from(pages.div_ceil(64) * 8).ok();
    }

    /// Adds bytes from QEMU.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.at);
        self.at = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next message; `None` if it is not complete yet.
    ///
    /// # Errors
    ///
    /// The message violates the protocol.
    pub fn message(&mut self) -> Result<Option<Message>, PlayError> {
        let rest = &self.bytes[self.at..];
        let Some(head) = rest.first_chunk::<4>() else { return Ok(None) };
        let (kind, len) = (u16::from_be_bytes([head[0], head[1]]), [head[2], head[3]]);
        let len = usize::from(u16::from_be_bytes(len));
        let bad = |what: &str| PlayError::Back(format!("{what} (message {kind} of {len} bytes)"));
        if len > MAX_BODY || !(SHUT..=SWITCHOVER_ACK).contains(&kind) {
            return Err(bad("it sends what is no message"));
        }
        let Some(body) = rest.get(4..4 + len) else { return Ok(None) };
        let mut taken = 4 + len;
        let message = match (kind, body) {
            (SHUT, &[a, b, c, d]) => Message::Shut(u32::from_be_bytes([a, b, c, d])),
            (PONG, &[a, b, c, d]) => Message::Pong(u32::from_be_bytes([a, b, c, d])),
            (RESUME_ACK, &[a, b, c, d]) => Message::Resumed(u32::from_be_bytes([a, b, c, d])),
            (SWITCHOVER_ACK, []) => Message::SwitchoverAck,
            (REQUEST | REQUEST_OF_BLOCK, body) if body.len() >= 12 => {
                let (place, name) = body.split_at(12);
                let start = u64::from_be_bytes(place[..8].try_into().expect("8 bytes"));
                let len = u32::from_be_bytes(place[8..].try_into().expect("4 bytes"));
                let block = match (kind, name) {
                    (REQUEST, []) => None,
                    (REQUEST_OF_BLOCK, name) => Some(block(name).ok_or_else(|| bad("no block"))?),
                    _ => return Err(bad("a request of another length than it has")),
                };
                Message::Pages { block, start, len }
            }
            (RECV_BITMAP, name) => {
                let block = block(name).ok_or_else(|| bad("no block"))?;
                let expected = self.bitmap.ok_or_else(|| bad("nobody asked for it"))?;
                let Some(size) = rest.get(taken..taken + 8) else { return Ok(None) };
                let size = u64::from_be_bytes(size.try_into().expect("8 bytes"));
                if size != expected as u64 {
                    return Err(bad("a bitmap of another length than the block's"));
                }
                let Some(bits) = rest.get(taken + 8..taken + 16 + expected) else {
                    return Ok(None);
                };
                let (bits, end) = bits.split_at(expected);
                if end != BITMAP_END.to_be_bytes() {
                    return Err(bad("a bitmap without its end mark"));
                }
                taken += 16 + expected;
                self.bitmap = None;
                Message::Received { block, bits: bits.to_vec() }
            }
            _ => return Err(bad("another length than it has")),
        };
        self.at += taken;
        Ok(Some(message))
    }
}

/// Parses a name behind its length in one byte.
fn block(bytes: &[u8]) -> Option<String> {
    let (len, name) = bytes.split_first()?;
    let name = Some(name).filter(|name| name.len() == usize::from(*len))?;
    String::from_utf8(name.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(bytes: &[u8], size: usize, pages: u64) -> Result<Vec<Message>, PlayError> {
        let mut back = ReturnPath::default();
        back.expect_bitmap(pages);
        let mut all = Vec::new();
        for piece in bytes.chunks(size) {
            back.push(piece);
            while let Some(message) = back.message()? {
                all.push(message);
            }
        }
        Ok(all)
    }

    #[test]
    fn messages_are_found_however_they_are_cut() {
        let mut bytes = vec![0, 2, 0, 4, 0, 0, 0, 3];
        bytes.extend([0, 3, 0, 15, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0x10, 0, 2, b'a', b'b']);
        bytes.extend([0, 4, 0, 12, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0x10, 0]);
        bytes.extend([0, 5, 0, 2, 1, b'a', 0, 0, 0, 0, 0, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]);
        bytes.extend(BITMAP_END.to_be_bytes());
        bytes.extend([0, 6, 0, 4, 0, 0, 0, 1, 0, 7, 0, 0, 0, 1, 0, 4, 0, 0, 0, 0]);
        let expected = [
            Message::Pong(3),
            Message::Pages { block: Some("ab".into()), start: 0x2000, len: 0x1000 },
            Message::Pages { block: None, start: 0x3000, len: 0x1000 },
            Message::Received { block: "a".into(), bits: vec![1, 2, 3, 4, 5, 6, 7, 8] },
            Message::Resumed(1),
            Message::SwitchoverAck,
            Message::Shut(0),
        ];
        for size in 1..=bytes.len() {
            assert_eq!(messages(&bytes, size, 40).unwrap(), expected, "pieces of {size}");
        }
    }

    #[test]
    fn messages_that_no_qemu_sends_are_refused() {
        for (bytes, what) in [
            (&[0, 9, 0, 0][..], "no message"),
            (&[0, 0, 0, 0], "no message"),
            (&[0, 2, 2, 1], "no message"),
            (&[0, 1, 0, 2, 0, 0], "another length"),
            (&[0, 4, 0, 13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], "another length"),
            (&[0, 3, 0, 14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5, b'a'], "no block"),
            (&[0, 5, 0, 2, 1, b'a', 1, 0, 0, 0, 0, 0, 0, 0], "another length"),
        ] {
            let said = messages(bytes, 100, 64).unwrap_err().to_string();
            assert!(said.contains(what), "{bytes:?}: {said}");
        }
        let mut back = ReturnPath::default();
        back.push(&[0, 5, 0, 2, 1, b'a']);
        assert!(back.message().unwrap_err().to_string().contains("nobody asked"));
    }
}
