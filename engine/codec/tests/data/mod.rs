//! Plain bytes of known kinds, made from a seed, and the settings to test them with.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use codec::{Codec, Settings};

/// The kind of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Zero bytes.
    Zero,
    /// One 8-byte word throughout.
    Word,
    /// Words of text.
    Text,
    /// Pointers and small integers, as on a heap.
    Heap,
    /// Random, without a pattern.
    Random,
}

/// All kinds.
pub(crate) fn kinds() -> [Kind; 5] {
    [Kind::Zero, Kind::Word, Kind::Text, Kind::Heap, Kind::Random]
}

impl Kind {
    /// `len` bytes of this kind.
    pub(crate) fn make(self, len: usize, seed: u64) -> Vec<u8> {
        let mut rng = Rng(seed);
        let mut bytes = Vec::with_capacity(len + 16);
        while bytes.len() < len {
            match self {
                Self::Zero => bytes.resize(len, 0),
                Self::Word => bytes.extend(b"platen->"),
                Self::Text => {
                    let words = ["page ", "ring ", "worker ", "of ", "the ", "guest, ", "slot\n"];
                    let pick = usize::try_from(rng.next() % 7).expect("small");
                    bytes.extend(words[pick].as_bytes());
                }
                Self::Heap => {
                    let word = match rng.next() % 4 {
                        0 => 0x7f12_0000_0000 | (rng.next() & 0x00ff_fff0),
                        1 => rng.next() & 0xff,
                        _ => 0,
                    };
                    bytes.extend(word.to_le_bytes());
                }
                Self::Random => bytes.extend(rng.next().to_le_bytes()),
            }
        }
        bytes.truncate(len);
        bytes
    }
}

/// Each codec with its interesting levels; the slowest levels only once.
pub(crate) fn every_setting() -> impl Iterator<Item = Settings> {
    let zlib = (0..=9).map(|level| (Codec::Zlib, Some(level)));
    let zstd = [-5, -1, 0, 1, 2, 3, 5, 9, 19].map(|level| (Codec::Zstd, Some(level)));
    let qatzip = [1, 2, 6, 9].map(|level| (Codec::DeflateQz, Some(level)));
    let lz4 = [1, 0, -7, -63].map(|level| (Codec::Lz4, Some(level)));
    std::iter::once((Codec::Raw, None))
        .chain(lz4)
        .chain(zlib)
        .chain(zstd)
        .chain(qatzip)
        .map(|(codec, level)| Settings::new(codec, level).expect("a level it has"))
}

/// splitmix64.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    /// The next 64 bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
