//! A probe of a chunk that costs two microseconds: it classifies the bytes.
//!
//! The probe counts the distinct byte values in each of [`BLOCKS`] blocks of 64 bytes, spread over
//! the chunk. 64 random bytes hold 56.6 on average, prose about 22, most pages of a Linux guest 16
//! to 30, a zero page one. The mean over the blocks predicts the size under zstd 1. On guest
//! memory's chunks: below a mean of 14, 4 to 17 %; from 14 to 33, 16 to 51 %; from 33 to 45, 61 to
//! 64 %; at 49, 92 %. Random bytes (56) do not shrink.

/// Blocks probed.
const BLOCKS: usize = 32;
/// Bytes of a block.
const BLOCK: usize = 64;

/// The kind of a chunk, found before encoding. Each class has its own estimates.
///
/// A class is a guess that only has to be right most of the time: the controller relies on what the
/// codecs achieve on a class's chunks, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Class {
    /// Mostly zeros or few values: shrinks to a tenth, at little cost.
    Sparse = 0,
    /// Ordinary memory and text.
    Plain = 1,
    /// Many values: numbers, packed structures, some of it compressed.
    Rich = 2,
    /// Looks random: encrypted or compressed before.
    Dense = 3,
}

impl Class {
    /// The number of classes.
    pub const COUNT: usize = 4;
    /// All classes, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] = [Self::Sparse, Self::Plain, Self::Rich, Self::Dense];

    /// Probes `chunk`. Allocates nothing; reads 2 KiB at most.
    pub fn of(chunk: &[u8]) -> Self {
        let (values, blocks) = values(chunk);
        match values.checked_div(blocks) {
            // Too short for a block, so short that the class does not matter.
            None | Some(14..=32) => Self::Plain,
            Some(0..=13) => Self::Sparse,
            Some(33..=45) => Self::Rich,
            Some(_) => Self::Dense,
        }
    }
}

/// The distinct values of each probed block of `chunk`, summed, and the number of blocks.
fn values(chunk: &[u8]) -> (u32, u32) {
    let all = chunk.len() / BLOCK;
    let blocks = all.min(BLOCKS);
    let mut sum = 0;
    for number in 0..blocks {
        // At a different offset in each stretch, since data may be periodic.
        let (start, end) = (number * all / blocks, (number + 1) * all / blocks);
        let at = start + number * 37 % (end - start);
        sum += chunk.get(at * BLOCK..(at + 1) * BLOCK).map_or(0, distinct);
    }
    (sum, u32::try_from(blocks).unwrap_or(0))
}

/// How many distinct values `block` holds.
fn distinct(block: &[u8]) -> u32 {
    let mut seen = [0_u64; 4];
    for byte in block {
        seen[usize::from(byte >> 6)] |= 1 << (byte & 63);
    }
    seen.iter().map(|word| word.count_ones()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_prose_and_noise_are_distinguished() {
        assert_eq!(Class::of(&[0; 1 << 19]), Class::Sparse);
        let prose =
            b"It was the best of times, it was the worst of times, it was the age of wisdom. ";
        let prose: Vec<u8> = prose.iter().copied().cycle().take(1 << 19).collect();
        assert_eq!(Class::of(&prose), Class::Plain);
        let mut state = 1_u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state.to_be_bytes()[0]
        })
        .take(1 << 19)
        .collect();
        assert_eq!(Class::of(&noise), Class::Dense);
        // Every other page is random: the mean shows it.
        let mixed: Vec<u8> = prose
            .chunks(4096)
            .zip(noise.chunks(4096))
            .enumerate()
            .flat_map(|(at, (prose, noise))| if at % 2 == 0 { noise } else { prose })
            .copied()
            .collect();
        assert_eq!(Class::of(&mixed), Class::Rich);
    }

    #[test]
    fn any_length_has_a_class() {
        for len in (0..300).chain([4095, 4096, 65535, 131_071]) {
            let _ = Class::of(&vec![7; len]);
        }
        assert_eq!(Class::of(&[1; 10]), Class::Plain);
    }
}
