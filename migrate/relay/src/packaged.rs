//! The end of the packaged state of postcopy, which shows how the source QEMU switches to postcopy.
//!
//! Up to QEMU 10.1 the source is in postcopy for good once it has written the packaged state and a
//! PING behind it. From 10.2 on, with a return path, the packaged state itself ends with PING 0x42
//! and POSTCOPY_RUN ([`Switchover`](crate::postcopy::Switchover)). Both relays look at these bytes.

/// PING 0x42, then POSTCOPY_RUN, at the end of the packaged state.
const ACKNOWLEDGED: [u8; 14] =
    [0x08, 0x00, 0x02, 0x00, 0x04, 0x00, 0x00, 0x00, 0x42, 0x08, 0x00, 0x05, 0x00, 0x00];

/// Collects the last bytes of the packaged state.
#[derive(Clone, Debug, Default)]
pub(crate) struct PackagedEnd {
    last: Vec<u8>,
    done: bool,
}

impl PackagedEnd {
    /// Adds `bytes` of the main stream, which end at offset `fed`. `end` is the offset at which the
    /// packaged state ends. Returns true once the packaged state has ended like that of a source
    /// that waits for a PONG.
    pub(crate) fn feed(&mut self, bytes: &[u8], fed: u64, end: u64) -> bool {
        if self.done {
            return false;
        }
        let behind = usize::try_from(fed.saturating_sub(end)).unwrap_or(usize::MAX);
        let inside = &bytes[..bytes.len().saturating_sub(behind)];
        let most = ACKNOWLEDGED.len();
        self.last.extend_from_slice(&inside[inside.len().saturating_sub(most)..]);
        self.last.drain(..self.last.len().saturating_sub(most));
        self.done = fed >= end;
        self.done && self.last == ACKNOWLEDGED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(stream: &[u8], end: usize, piece: usize) -> bool {
        let mut packaged = PackagedEnd::default();
        let mut fed = 0;
        stream.chunks(piece).any(|bytes| {
            fed += bytes.len() as u64;
            packaged.feed(bytes, fed, end as u64)
        })
    }

    #[test]
    fn a_source_that_awaits_a_pong_is_known_however_its_bytes_are_cut() {
        let state = [&[7; 100][..], &ACKNOWLEDGED].concat();
        let behind = [&state[..], &[8, 0, 2, 0, 4, 0, 0, 0, 3]].concat();
        for piece in 1..=behind.len() {
            assert!(found(&behind, state.len(), piece), "in pieces of {piece}");
            assert!(!found(&behind, state.len() - 1, piece), "in pieces of {piece}");
        }
        let older = [&[7; 100][..], &ACKNOWLEDGED[9..]].concat();
        assert!(!found(&older, older.len(), 7));
    }
}
