//! Whether a main stream without a return path is complete: the source QEMU closes the socket in
//! the same way when its stream is cut off.
//!
//! The end-of-stream tag is followed by the description of the device state, with its length. A
//! machine with `suppress-vmdesc=on` writes none; its stream ends with the tag itself, a zero.

use std::collections::VecDeque;

/// The end-of-stream tag, then the tag of the description.
const TAGS: [u8; 2] = [0x00, 0x06];
/// Tags, length and the first byte of the description's JSON.
const HEAD: usize = 7;
/// The most ends of descriptions that are considered: device state holds such bytes by chance.
const MAX_ENDS: usize = 64;

/// Follows the bytes of a main stream from the first possible end-of-stream tag on.
#[derive(Debug, Default)]
pub(super) struct EndOfStream {
    /// Bytes seen.
    fed: u64,
    /// The last bytes seen, fewer than [`HEAD`].
    last: Vec<u8>,
    /// The possible ends of descriptions, the nearest first.
    ends: VecDeque<u64>,
}

impl EndOfStream {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        // First the heads that began in an earlier call, then the heads in `bytes`.
        let joined: Vec<u8> =
            self.last.iter().chain(bytes.iter().take(HEAD - 1)).copied().collect();
        self.look(&joined, self.fed - self.last.len() as u64);
        self.look(bytes, self.fed);
        self.fed += bytes.len() as u64;
        while self.ends.front().is_some_and(|end| *end < self.fed) {
            self.ends.pop_front();
        }
        self.last.extend_from_slice(&bytes[bytes.len().saturating_sub(HEAD - 1)..]);
        let surplus = self.last.len().saturating_sub(HEAD - 1);
        self.last.drain(..surplus);
    }

    /// Records the heads in `bytes`, which begin at `from`.
    fn look(&mut self, bytes: &[u8], from: u64) {
        for (at, head) in (0..).zip(bytes.windows(HEAD)) {
            let [a, b, c, d] = [head[2], head[3], head[4], head[5]];
            if head[..2] != TAGS || head[6] != b'{' {
                continue;
            }
            let length = u64::from(u32::from_be_bytes([a, b, c, d]));
            let end = from + at + HEAD as u64 - 1 + length;
            let place = self.ends.partition_point(|known| *known < end);
            if self.ends.get(place) != Some(&end) {
                self.ends.insert(place, end);
                // The most distant is the least likely.
                self.ends.truncate(MAX_ENDS);
            }
        }
    }

    /// Whether the stream may end here.
    pub(super) fn is_whole(&self) -> bool {
        self.ends.front() == Some(&self.fed) || self.last.last() == Some(&0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device state with zeros and sixes in it, and a description of 300 bytes.
    fn stream() -> Vec<u8> {
        let noise = [0, 6, 0, 0, 0, 9, b'{', 0, 6, 1, 2, 3, 4, b'{'].repeat(30);
        let mut json = vec![b' '; 300];
        (json[0], json[299]) = (b'{', b'}');
        [&noise[..], &[0, 6, 0, 0, 1, 44], &json].concat()
    }

    #[test]
    fn the_end_is_found_however_the_bytes_are_cut() {
        let stream = stream();
        for piece in [1, 2, 3, 5, 6, 7, 8, 64, stream.len()] {
            let mut end = EndOfStream::default();
            stream.chunks(piece).for_each(|bytes| end.feed(bytes));
            assert!(end.is_whole(), "in pieces of {piece}");
        }
    }

    #[test]
    fn a_stream_that_breaks_off_in_its_description_is_not_whole() {
        let stream = stream();
        for cut in 1..=300 {
            let mut end = EndOfStream::default();
            end.feed(&stream[..stream.len() - cut]);
            assert!(!end.is_whole(), "{cut} bytes before its end");
        }
    }

    #[test]
    fn a_machine_without_a_description_ends_with_the_tag() {
        let mut end = EndOfStream::default();
        end.feed(&[1, 2, 3, 0]);
        assert!(end.is_whole());
    }
}
