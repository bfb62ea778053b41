//! Pages for measurements without a guest's pages. Every figure that is measured on them is
//! labelled as such: they shrink about as much as a Linux guest's memory, but do not have its
//! structure.

const PAGE: usize = 4096;
/// Pages in all: 8 MiB.
const PAGES: usize = 2048;

/// The built-in pages: the same on every host.
pub(crate) fn built_in() -> Vec<u8> {
    let mut random = Random(0x706c_6174_656e);
    let mut bytes = Vec::with_capacity(PAGES * PAGE);
    while bytes.len() < PAGES * PAGE {
        let end = (bytes.len() + PAGE * (1 + random.below(16))).min(PAGES * PAGE);
        match random.below(8) {
            0..=3 => heap(&mut random, &mut bytes, end),
            4..=5 => text(&mut random, &mut bytes, end),
            6 => code(&mut random, &mut bytes, end),
            _ => {
                while bytes.len() < end {
                    bytes.extend_from_slice(&random.next().to_le_bytes());
                }
            }
        }
        bytes.truncate(end);
    }
    bytes
}

/// Objects: pointers into a few regions, counts, short strings, zeros.
fn heap(random: &mut Random, bytes: &mut Vec<u8>, end: usize) {
    let regions = [0x7f3a_1c00_0000_u64, 0x55d0_0a00_0000];
    while bytes.len() < end {
        match random.below(8) {
            0 | 1 => {
                let pointer = regions[random.below(2)] + (random.next() & 0xf_fff0);
                bytes.extend_from_slice(&pointer.to_le_bytes());
            }
            2 => bytes.extend_from_slice(&(random.next() & 0x1ff).to_le_bytes()),
            3 => word(random, bytes),
            4 | 5 => bytes.extend_from_slice(&[0; 24]),
            _ => bytes.extend_from_slice(&(random.next() & 0xff_ffff).to_le_bytes()),
        }
    }
}

fn text(random: &mut Random, bytes: &mut Vec<u8>, end: usize) {
    while bytes.len() < end {
        word(random, bytes);
        bytes.extend_from_slice(if random.below(9) == 0 { b".\n" } else { b" " });
    }
}

/// Instructions: few forms, each with an operand.
fn code(random: &mut Random, bytes: &mut Vec<u8>, end: usize) {
    const FORMS: [[u8; 3]; 8] = [
        [0x48, 0x89, 0xe5],
        [0x48, 0x8b, 0x45],
        [0xe8, 0x00, 0x10],
        [0x0f, 0xb6, 0xc0],
        [0x74, 0x05, 0x48],
        [0x83, 0xec, 0x20],
        [0x31, 0xc0, 0x5b],
        [0xc3, 0x66, 0x90],
    ];
    while bytes.len() < end {
        bytes.extend_from_slice(&FORMS[random.below(8)]);
        bytes.extend_from_slice(&random.next().to_le_bytes()[..1 + random.below(2)]);
    }
}

/// A word of a language: short ones often.
fn word(random: &mut Random, bytes: &mut Vec<u8>) {
    const SYLLABLES: [&[u8]; 16] = [
        b"ra", b"en", b"ti", b"lo", b"mus", b"ke", b"var", b"is", b"do", b"pel", b"na", b"sho",
        b"qui", b"ber", b"al", b"tor",
    ];
    // A vocabulary of 1024 words, each a function of its number.
    let mut of = Random(1 + random.below(32).pow(2) as u64);
    for _ in 0..1 + of.below(3) {
        bytes.extend_from_slice(SYLLABLES[of.below(16)]);
    }
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_shrink_as_a_guest_s_memory_does() {
        let pages = built_in();
        assert_eq!(pages.len(), PAGES * PAGE);
        assert_eq!(pages, built_in());
        let mut encoder = codec::Encoder::new(codec::Settings::default()).unwrap();
        let mut out = vec![0; 1 << 19];
        let encoded: usize =
            pages.chunks(1 << 19).map(|chunk| encoder.encode(chunk, &mut out).len).sum();
        #[expect(clippy::cast_precision_loss, reason = "8 MiB")]
        let ratio = pages.len() as f64 / encoded as f64;
        assert!((2.4..2.9).contains(&ratio), "{ratio}");
    }
}
