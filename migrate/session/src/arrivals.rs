//! Which frames have come off the links (W11).

/// Which frames of one stream and direction have come off the links (W11): each is taken once,
/// whichever link brings it first in full.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// Everything below has arrived.
    base: u64,
    /// Bit i of the whole: `base + i` has arrived.
    ahead: [u64; WORDS],
}

/// Frames that may be ahead of what was written to QEMU (W11).
pub(crate) const WINDOW: u64 = 64 * WORDS as u64;
const WORDS: usize = 16;

impl Arrivals {
    /// Whether `seq` has not arrived yet.
    pub(crate) fn expects(&self, seq: u64) -> bool {
        match seq.checked_sub(self.base) {
            None => false,
            Some(ahead) => ahead >= WINDOW || self.ahead[word(ahead)] & bit(ahead) == 0,
        }
    }

    /// Takes note of `seq`, which is less than [`WINDOW`] beyond the base; false when it has
    /// arrived before.
    pub(crate) fn take(&mut self, seq: u64) -> bool {
        if !self.expects(seq) {
            return false;
        }
        let ahead = seq - self.base;
        if ahead >= WINDOW {
            return false;
        }
        self.ahead[word(ahead)] |= bit(ahead);
        while self.ahead[0] & 1 == 1 {
            let mut carry = 0;
            for word in self.ahead.iter_mut().rev() {
                let low = *word & 1;
                *word = *word >> 1 | carry << 63;
                carry = low;
            }
            self.base += 1;
        }
        true
    }
}

fn word(ahead: u64) -> usize {
    // Below 16, as `ahead` is below the window.
    usize::try_from(ahead / 64).unwrap_or(0)
}

fn bit(ahead: u64) -> u64 {
    1 << (ahead % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_frame_is_taken_once_in_whatever_order_it_comes() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut arrivals = Arrivals::default();
        let mut model = HashSet::new();
        let mut base = 0;
        for _ in 0..40_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let seq = (base + state % WINDOW).saturating_sub(state >> 60);
            assert_eq!(arrivals.expects(seq), !model.contains(&seq), "{seq}");
            assert_eq!(arrivals.take(seq), model.insert(seq), "{seq}");
            while model.contains(&base) {
                base += 1;
            }
            assert_eq!(arrivals.base, base);
        }
        assert!(base > 1000, "{base}");
        assert!(!arrivals.take(base + WINDOW), "beyond the window");
    }
}
