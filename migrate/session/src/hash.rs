//! The running hash of W12.

/// Hash over all chunks of one direction of one stream, in order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunningHash(u64);

impl RunningHash {
    /// Adds a chunk by its checksum (xxh3-64 of its plain bytes).
    pub fn add(&mut self, checksum: u64) {
        let mut both = [0; 16];
        both[..8].copy_from_slice(&self.0.to_be_bytes());
        both[8..].copy_from_slice(&checksum.to_be_bytes());
        self.0 = codec::checksum(&both);
    }

    /// The value that goes on the wire.
    pub fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_cuts_matter() {
        let of = |chunks: &[&[u8]]| {
            let mut hash = RunningHash::default();
            chunks.iter().for_each(|chunk| hash.add(codec::checksum(chunk)));
            hash.value()
        };
        assert_eq!(of(&[b"ab", b"c"]), of(&[b"ab", b"c"]));
        assert_ne!(of(&[b"ab", b"c"]), of(&[b"c", b"ab"]));
        assert_ne!(of(&[b"ab", b"c"]), of(&[b"ab", b"c", b"c"]));
        assert_ne!(of(&[b"ab"]), 0);
    }
}
