//! The expected contents of a page: a pure function of its number, its version and its count of
//! small updates.
//!
//! Version 0 is a page of the corpus with every byte XORed with the key of the round (the number of
//! times the corpus had been used up before). One key for all bytes of a page preserves every match
//! and every statistic that a compressor can use, and makes the page differ from the same corpus
//! page in any other round and from the corpus file itself, which is in the page cache with key 0:
//! no page's contents repeat in the guest.
//!
//! A rewritten page (version 1 and later) is another corpus page with another key and an 8-byte
//! stamp, so that no two versions of any page are the same. Small updates then overwrite 8 to 64
//! bytes anywhere in the page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes in a page.
pub(crate) const PAGE: usize = 4096;

/// The most small updates of a page before it is rewritten; bounds the work of verifying it.
pub(crate) const MAX_SMALL: u32 = 48;

/// One page of guest memory.
#[derive(Clone)]
#[repr(C, align(4096))]
pub(crate) struct Page(pub(crate) [u8; PAGE]);

/// The state that determines a page's contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// How often the page was rewritten.
    pub(crate) version: u32,
    /// Small updates since then.
    pub(crate) small: u32,
}

impl State {
    /// This entry's share of the table's checksum.
    pub(crate) fn weight(self, index: u64) -> u64 {
        mix(index, u64::from(self.version) << 32 | u64::from(self.small), 3)
    }
}

/// The corpus file, read through the page cache.
#[derive(Debug)]
pub(crate) struct Corpus {
    file: File,
    pages: u64,
}

impl Corpus {
    /// Opens the corpus; it must hold at least one page.
    pub(crate) fn open(path: &str) -> io::Result<Self> {
        let file = File::open(path)?;
        let pages = file.metadata()?.len() / PAGE as u64;
        if pages == 0 {
            return Err(io::Error::other("corpus is empty"));
        }
        Ok(Self { file, pages })
    }

    /// Pages in the corpus.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Writes the page of the corpus from which the `version`th rewrite of page `index` is made
    /// into `out`; returns the key.
    pub(crate) fn source(&self, index: u64, version: u32, out: &mut Page) -> io::Result<u8> {
        let (source, key) = if version == 0 {
            (index % self.pages, round_key(index / self.pages))
        } else {
            let h = mix(index, u64::from(version), 1);
            (h % self.pages, round_key(h >> 40))
        };
        self.file.read_exact_at(&mut out.0, source * PAGE as u64)?;
        Ok(key)
    }

    /// Writes the contents of page `index` right after its `version`th rewrite into `out`.
    pub(crate) fn whole(&self, index: u64, version: u32, out: &mut Page) -> io::Result<()> {
        let key = self.source(index, version, out)?;
        for byte in &mut out.0 {
            *byte ^= key;
        }
        if version > 0 {
            out.0[..8].copy_from_slice(&mix(index, u64::from(version), 2).to_le_bytes());
        }
        Ok(())
    }

    /// Writes the contents of page `index` in `state` into `out`.
    pub(crate) fn expected(&self, index: u64, state: State, out: &mut Page) -> io::Result<()> {
        self.whole(index, state.version, out)?;
        for nth in 1..=state.small {
            apply_small(index, State { version: state.version, small: nth }, out);
        }
        Ok(())
    }
}

/// Applies the small update that results in `state`.
pub(crate) fn apply_small(index: u64, state: State, page: &mut Page) {
    let seed = state.weight(index);
    let len = 8 + low(mix(seed, 0, 4), 57);
    let start = low(mix(seed, 0, 5), PAGE - len + 1);
    let target = &mut page.0[start..start + len];
    for (chunk, n) in target.chunks_mut(8).zip(1..) {
        let word = mix(seed, n, 6).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// A number below `bound`, derived from `h`.
fn low(h: u64, bound: usize) -> usize {
    usize::try_from(h % bound as u64).expect("below a usize")
}

/// The key of a round: never 0, with a period of 255 rounds.
fn round_key(round: u64) -> u8 {
    let step = u8::try_from(round % 255).expect("below 255");
    // 83 and 255 are coprime, so this visits each of 1..=255 once.
    u8::try_from(u16::from(step) * 83 % 255 + 1).expect("at most 255")
}

/// A hash of three numbers (the finaliser of splitmix64, chained).
pub(crate) fn mix(a: u64, b: u64, c: u64) -> u64 {
    let mut z = 0x9e37_79b9_7f4a_7c15_u64;
    for part in [a, b, c] {
        z = (z ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
    }
    z
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn keys_are_never_zero_and_differ_for_255_rounds() {
        let keys: HashSet<u8> = (0..255).map(round_key).collect();
        assert_eq!(keys.len(), 255);
        assert!(!keys.contains(&0));
    }

    #[test]
    fn a_small_update_changes_only_8_to_64_bytes() {
        for index in 0..200 {
            let mut page = Page([0; PAGE]);
            apply_small(index, State { version: 1, small: 1 }, &mut page);
            let first = page.0.iter().position(|&b| b != 0).expect("some byte changed");
            let last = page.0.iter().rposition(|&b| b != 0).expect("some byte changed");
            assert!(last - first < 64, "page {index}: bytes {first}..={last}");
        }
    }
}
