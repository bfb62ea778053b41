//! The return path, of which only SHUT matters here (section 1.7 of the stream's description: u16 type, u16 length,
//! body; type 1 is SHUT with a u32, 0 for success).

const SHUT: u16 = 1;
const RECV_BITMAP: u16 = 5;
/// QEMU's own limit of a frame's body.
const MAX_BODY: usize = 512;

/// Finds SHUT in the bytes of a return path, cut anywhere.
#[derive(Debug, Default)]
pub struct ReturnPath {
    /// The frame header and body gathered so far.
    frame: Vec<u8>,
    /// Type 5 is followed by unframed bytes, and unknown lengths cannot be followed: no more is looked at.
    blind: bool,
}

impl ReturnPath {
    /// Looks at more bytes. Gives SHUT's value and the number of bytes of `bytes` before the frame that holds it, if one
    /// ends here.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<(u32, usize)> {
        let mut begin = 0;
        for (at, byte) in bytes.iter().enumerate() {
            if self.blind {
                return None;
            }
            if self.frame.is_empty() {
                begin = at;
            }
            self.frame.push(*byte);
            if self.frame.len() < 4 {
                continue;
            }
            let kind = u16::from_be_bytes([self.frame[0], self.frame[1]]);
            let length = usize::from(u16::from_be_bytes([self.frame[2], self.frame[3]]));
            if length > MAX_BODY || kind == RECV_BITMAP {
                self.blind = true;
                return None;
            }
            if self.frame.len() == 4 + length {
                let body = self.frame.split_off(4);
                self.frame.clear();
                if let (SHUT, [a, b, c, d]) = (kind, body[..].get(..4).unwrap_or(&[])) {
                    return Some((u32::from_be_bytes([*a, *b, *c, *d]), begin));
                }
            }
        }
        None
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
        for cut in 1..16 {
            let mut path = ReturnPath::default();
            let first = path.feed(&bytes[..cut]);
            assert_eq!(first, None);
            assert_eq!(path.feed(&bytes[cut..]).map(|found| found.0), Some(0), "cut at {cut}");
        }
        assert_eq!(ReturnPath::default().feed(&SHUT_BAD), Some((1, 0)));
    }

    #[test]
    fn it_goes_blind_rather_than_wrong() {
        let mut path = ReturnPath::default();
        assert_eq!(path.feed(&[0, 5, 0, 3, 1, b'a', b'b']), None);
        assert_eq!(path.feed(&SHUT_OK), None);
        assert_eq!(ReturnPath::default().feed(&[0, 9, 0xff, 0xff]), None);
    }
}
