//! More bytes than the corpus has, without repeated pages.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::PAGE;

/// The distinct pages over and over, each round with every byte XORed with another constant.
///
/// All bytes of a round use one constant byte, and not an 8-byte word: such a word breaks matches
/// whose distance is no multiple of eight, and text would lose half its ratio. A constant byte
/// renames the bytes: a codec finds the same matches and the same statistics, but neither a page
/// nor any longer stretch of one round recurs in another. The first round is renamed too, so that
/// it has none of the corpus's own pages, which the receiver might already know.
#[derive(Clone, Debug)]
pub struct Rounds {
    unique: Vec<u8>,
}

impl Rounds {
    /// Rounds over `unique`.
    ///
    /// # Panics
    ///
    /// If the length of `unique` is zero or no multiple of [`PAGE`].
    pub fn new(unique: Vec<u8>) -> Self {
        assert!(!unique.is_empty() && unique.len().is_multiple_of(PAGE), "{} bytes", unique.len());
        Self { unique }
    }

    /// Bytes of one round.
    pub fn round_len(&self) -> usize {
        self.unique.len()
    }

    /// The constant of `round`: never zero, and different for each round.
    ///
    /// # Panics
    ///
    /// From round 255 on: no constant is left.
    pub fn constant(round: usize) -> u8 {
        assert!(round < 255, "round {round}: there are only 255 constants");
        // 101 is odd, so this steps through all 256 values, with distant neighbours. Zero would be
        // the constant of round -1.
        u8::try_from((round + 1) * 101 % 256).expect("below 256")
    }

    /// Bytes `offset` to `offset + out.len()` of the endless sequence of rounds.
    ///
    /// # Panics
    ///
    /// Beyond round 254.
    pub fn read_at(&self, mut offset: usize, mut out: &mut [u8]) {
        while !out.is_empty() {
            let (round, at) = (offset / self.unique.len(), offset % self.unique.len());
            let len = out.len().min(self.unique.len() - at);
            let (now, rest) = out.split_at_mut(len);
            let constant = Self::constant(round);
            for (to, from) in now.iter_mut().zip(&self.unique[at..at + len]) {
                *to = from ^ constant;
            }
            out = rest;
            offset += len;
        }
    }

    /// The first `len` bytes, in memory.
    ///
    /// # Panics
    ///
    /// As for [`Rounds::read_at`].
    pub fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read_at(0, &mut bytes);
        bytes
    }

    /// Writes the first `len` bytes to a file.
    ///
    /// # Errors
    ///
    /// The error from creating or writing the file.
    ///
    /// # Panics
    ///
    /// As for [`Rounds::read_at`].
    pub fn write_to(&self, path: &Path, len: u64) -> io::Result<()> {
        let mut file = BufWriter::with_capacity(CHUNK, File::create(path)?);
        let mut chunk = vec![0; CHUNK];
        let mut offset = 0;
        while offset < len {
            let now = usize::try_from(len - offset).map_or(CHUNK, |left| left.min(CHUNK));
            let at = usize::try_from(offset).map_err(io::Error::other)?;
            self.read_at(at, &mut chunk[..now]);
            file.write_all(&chunk[..now])?;
            offset += now as u64;
        }
        file.into_inner()?.sync_data()
    }
}

const CHUNK: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn constants_are_never_zero_and_never_the_same() {
        let all: HashSet<u8> = (0..255).map(Rounds::constant).collect();
        assert!(all.len() == 255 && !all.contains(&0));
    }

    #[test]
    fn a_piece_equals_the_same_range_of_the_whole() {
        let unique: Vec<u8> = (0..3 * PAGE).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
        let rounds = Rounds::new(unique.clone());
        let whole = rounds.bytes(10 * PAGE + 100);
        for (at, byte) in whole.iter().enumerate() {
            let constant = Rounds::constant(at / unique.len());
            assert_eq!(byte ^ constant, unique[at % unique.len()]);
        }
        for (offset, len) in [(0, 1), (PAGE - 1, 2), (3 * PAGE - 5, 4 * PAGE), (5, 0)] {
            let mut piece = vec![0; len];
            rounds.read_at(offset, &mut piece);
            assert_eq!(piece, whole[offset..offset + len]);
        }
    }
}
