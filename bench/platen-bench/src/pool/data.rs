//! The pages to compress.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::Context;
use pages::PAGE_SIZE;

/// Memory to compress, alive until the process ends. So jobs hold plain references, and the
/// measurement has no reference counts that a relay would not have.
pub(super) struct Pages {
    pub(super) name: String,
    pub(super) bytes: &'static [u8],
}

impl Pages {
    /// The first `mib` MiB of the file (or all of it, if shorter), or synthetic pages.
    pub(super) fn load(path: Option<&Path>, mib: usize) -> anyhow::Result<Self> {
        let len = mib << 20;
        let (name, mut bytes) = match path {
            Some(path) => {
                let mut bytes = Vec::with_capacity(len);
                File::open(path)
                    .and_then(|file| file.take(len as u64).read_to_end(&mut bytes))
                    .with_context(|| format!("cannot read pages from {}", path.display()))?;
                (path.display().to_string(), bytes)
            }
            None => ("made pages".to_owned(), make(len / PAGE_SIZE)),
        };
        bytes.truncate(bytes.len() / PAGE_SIZE * PAGE_SIZE);
        anyhow::ensure!(bytes.len() >= 1 << 20, "{name} holds less than 1 MiB of whole pages");
        Ok(Self { name, bytes: bytes.leak() })
    }
}

/// Generated pages of three kinds: records of pointers and small numbers (half of them), text
/// (three tenths), random bytes (two tenths). About 2.0 to 1 with zlib 1, slightly less than guest
/// memory.
fn make(count: usize) -> Vec<u8> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let words: Vec<Vec<u8>> = (0..600)
        .map(|_| (0..2 + random.below(9)).map(|_| b'a' + random.byte() % 26).collect())
        .collect();
    let mut bytes = Vec::with_capacity(count * PAGE_SIZE);
    for number in 1..=count {
        let end = number * PAGE_SIZE;
        match random.below(10) {
            0..=4 => {
                let heap = 0x7f00_0000_0000 | u64::from(random.byte()) << 28;
                while bytes.len() < end {
                    let word = match random.below(4) {
                        0 => 0,
                        1 => random.below(100),
                        _ => heap | random.below(1 << 14) << 4,
                    };
                    bytes.extend(word.to_le_bytes());
                }
            }
            5..=7 => {
                while bytes.len() < end {
                    // The smaller of two draws: some words are common, most are rare.
                    let at = random.below(600).min(random.below(600));
                    bytes.extend(&words[usize::try_from(at).expect("below 600")]);
                    bytes.push(b' ');
                }
            }
            _ => {
                while bytes.len() < end {
                    bytes.extend(random.next().to_le_bytes());
                }
            }
        }
        bytes.truncate(end);
    }
    bytes
}

/// xorshift64*: the same pages every time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }
}
