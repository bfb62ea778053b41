//! Synthetic pages: seeded, the same everywhere, all distinct, with the ratios of real ones.

/// The sets, in order.
pub(crate) const NAMES: [&str; 5] = ["guest", "redis", "text", "code", "random"];

/// The pages of a set; `None` for an unknown name.
pub(crate) fn pages(name: &str) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match name {
        "guest" => Maker::new(0x6775_6573).guest(&mut out),
        "redis" => Maker::new(0x7265_6469).heap(&mut out, 20 * MIB),
        "text" => Maker::new(0x7465_7874).text(&mut out, 10 * MIB),
        "code" => Maker::new(0x636f_6465).code(&mut out, 8 * MIB),
        "random" => Maker::new(0x7261_6e64).random(&mut out, MIB),
        _ => return None,
    }
    Some(out)
}

/// A source of randomness, and the tables for text and code (the same for every source).
struct Maker {
    rng: Rng,
    words: Vec<String>,
    forms: Vec<[u8; 4]>,
}

impl Maker {
    fn new(seed: u64) -> Self {
        const SYLLABLES: [&str; 24] = [
            "ra", "en", "ti", "lo", "mus", "ke", "var", "is", "do", "pel", "na", "sho", "qui",
            "ber", "al", "tor", "fe", "gan", "mi", "zu", "hol", "cre", "ant", "ys",
        ];
        let mut fixed = Rng(0x776f_7264);
        let words = (0..WORDS)
            .map(|_| (0..1 + fixed.below(4)).map(|_| SYLLABLES[fixed.below(24)]).collect())
            .collect();
        let forms = (0..FORMS)
            .map(|_| {
                let [a, b, c, d, ..] = fixed.next().to_le_bytes();
                [a, b, c, d]
            })
            .collect();
        Self { rng: Rng(seed), words, forms }
    }

    /// Runs of all the other kinds, of 64 to 512 pages each, with zero, filled and repeated pages
    /// between them.
    fn guest(&mut self, out: &mut Vec<u8>) {
        while out.len() < 24 * MIB {
            let end = out.len() + 64 * 4096 * (1 + self.rng.below(8));
            match self.rng.below(16) {
                0..=6 => self.heap(out, end),
                7..=11 => self.text(out, end),
                12..=14 => self.code(out, end),
                _ => self.random(out, out.len() + 32 * 4096),
            }
            out.resize(out.len() + 4096 * self.rng.below(12), 0);
            out.resize(out.len() + 4096 * self.rng.below(3), 0xcc);
            let again = out.len() - 4096 * (1 + self.rng.below(64));
            out.extend_from_within(again..again + 4096);
        }
        out.truncate(24 * MIB);
    }

    /// Words of a synthetic vocabulary with the frequencies of a language: few words often, many
    /// rarely.
    fn text(&mut self, out: &mut Vec<u8>, end: usize) {
        while out.len() < end {
            let pick = self.lean(WORDS);
            out.extend_from_slice(self.words[pick].as_bytes());
            let stop = [" ", " ", " ", " ", " ", " ", ", ", ". ", ".\n"][self.rng.below(9)];
            out.extend_from_slice(stop.as_bytes());
        }
        out.truncate(end);
    }

    /// Objects as an allocator lays them out: headers, pointers into a few regions, counts, short
    /// strings, tokens, zeros.
    fn heap(&mut self, out: &mut Vec<u8>, end: usize) {
        let regions = [0x7f3a_1c00_0000_u64, 0x7f3a_8e40_0000, 0x55d0_0a00_0000];
        while out.len() < end {
            let kind = self.rng.below(8);
            out.extend_from_slice(&(0x31 + 16 * kind as u64).to_le_bytes());
            for _ in 0..2 + kind {
                let word = match self.rng.below(10) {
                    0..=1 => regions[self.rng.below(3)] + 16 * (self.rng.next() & 0xffff),
                    2..=3 => self.rng.next() & 0xff,
                    4 => self.rng.next() & 0xffff,
                    _ => 0,
                };
                out.extend_from_slice(&word.to_le_bytes());
            }
            match kind {
                0..=2 => self.text(out, out.len() + 40),
                3 => out.extend(format!("session:{:016x}", self.rng.next()).bytes()),
                4 => self.random(out, out.len() + 20),
                _ => {}
            }
            out.resize(out.len().next_multiple_of(16), 0);
        }
        out.truncate(end);
    }

    /// Instructions: some hundred forms with realistic frequencies; operands, most of them small;
    /// short idioms that recur.
    fn code(&mut self, out: &mut Vec<u8>, end: usize) {
        while out.len() < end {
            if self.rng.below(4) == 0 && out.len() > 70_000 {
                let from = out.len() - 60 - self.lean(60_000);
                out.extend_from_within(from..from + 8 + self.rng.below(24));
                continue;
            }
            let pick = self.lean(FORMS);
            let form = self.forms[pick];
            out.extend_from_slice(&form[..2 + self.rng.below(3)]);
            let operand = self.rng.next().to_le_bytes();
            match self.rng.below(10) {
                0 => out.extend_from_slice(&operand[..3]),
                1..=2 => out.extend_from_slice(&[operand[0], operand[1] & 3, 0, 0]),
                3..=5 => out.push(operand[0] & 0x38),
                _ => {}
            }
        }
        out.truncate(end);
    }

    fn random(&mut self, out: &mut Vec<u8>, end: usize) {
        while out.len() < end {
            out.extend_from_slice(&self.rng.next().to_le_bytes());
        }
        out.truncate(end);
    }

    /// A number from 0 to `limit - 1` that favours small ones, as the ranks of words do.
    fn lean(&mut self, limit: usize) -> usize {
        let pick = self.rng.below(limit) * self.rng.below(limit) / limit;
        pick * self.rng.below(limit) / limit
    }
}

/// splitmix64: the same sequence everywhere, from a single word of state.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `limit - 1`.
    fn below(&mut self, limit: usize) -> usize {
        let scaled = (u128::from(self.next()) * limit as u128) >> 64;
        usize::try_from(scaled).expect("less than the limit")
    }
}

const MIB: usize = 1 << 20;
const WORDS: usize = 6000;
const FORMS: usize = 400;
