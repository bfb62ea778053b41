//! Sizes and costs of a guest's pages, by codec.

use codec::{Codec, Settings};

/// Size of all samples with one codec and level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Codec and level.
    pub settings: Settings,
    /// Bytes of the pages in the samples that are not all zeros.
    pub pages: u64,
    /// Bytes of the frames' units.
    pub encoded: u64,
    /// CPU time, ns.
    pub cpu_ns: u64,
    /// CPU time to decode all of them, ns; 0 where that was not measured.
    pub decode_ns: u64,
}

#[expect(clippy::cast_precision_loss, reason = "bytes and ns of samples, far below 2^53")]
impl Candidate {
    /// Creates a candidate without samples.
    pub fn new(settings: Settings) -> Self {
        Self { settings, pages: 0, encoded: 0, cpu_ns: 0, decode_ns: 0 }
    }

    /// Encoded bytes for each byte of pages; 1 without samples.
    pub fn size(&self) -> f64 {
        if self.pages == 0 {
            return 1.0;
        }
        self.encoded as f64 / self.pages as f64
    }

    /// CPU time for each byte of pages, ns.
    pub fn cost(&self) -> f64 {
        if self.pages == 0 {
            return 0.0;
        }
        self.cpu_ns as f64 / self.pages as f64
    }

    /// CPU time to decode each byte of pages, ns.
    pub fn decode_cost(&self) -> f64 {
        if self.pages == 0 {
            return 0.0;
        }
        self.decode_ns as f64 / self.pages as f64
    }

    /// Adds a sample: bytes of pages, bytes of its encoding, CPU time in ns.
    pub fn add(&mut self, pages: u64, encoded: u64, cpu_ns: u64) {
        self.pages += pages;
        self.encoded += encoded;
        self.cpu_ns += cpu_ns;
    }
}

/// The candidates of the pages of one kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sizes(pub Vec<Candidate>);

impl Sizes {
    /// Whether anything was sampled.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|candidate| candidate.pages == 0)
    }

    /// The candidate zstd 1, which QEMU's own multifd compression uses.
    pub fn zstd_1(&self) -> Option<&Candidate> {
        self.named(Codec::Zstd, 1)
    }

    /// The candidate of this codec and level, made by platen's own software.
    pub fn named(&self, codec: Codec, level: i32) -> Option<&Candidate> {
        self.of(Settings::new(codec, Some(level)).ok()?)
    }

    /// The candidate of these settings.
    pub fn of(&self, settings: Settings) -> Option<&Candidate> {
        self.0.iter().find(|one| one.settings == settings)
    }
}

/// The results of all samples.
#[derive(Clone, Debug, Default)]
pub struct Sampled {
    /// Pages that QEMU sends for the first time.
    pub first: Sizes,
    /// Pages that QEMU sends again, with differences.
    pub again: Sizes,
    /// The same pages without differences; zstd 1 only.
    pub again_whole: Option<Candidate>,
}

impl Sampled {
    /// The sizes of pages sent again. A candidate that has no samples of its own gets the size and
    /// cost that it has in the first pass.
    pub fn again(&self) -> Sizes {
        let missing = self
            .first
            .0
            .iter()
            .filter(|one| self.again.0.iter().all(|known| known.settings != one.settings));
        Sizes(self.again.0.iter().chain(missing).copied().collect())
    }

    /// The figures of `first`, a candidate of the first pass, for whole pages sent again: scaled as
    /// zstd 1 differs there.
    pub fn again_whole(&self, first: &Candidate) -> Candidate {
        let zstd_1 = self.first.zstd_1().filter(|_| first.settings.codec() != Codec::Raw);
        let Some((whole, zstd_1)) = self.again_whole.as_ref().zip(zstd_1) else { return *first };
        let relation = whole.size() / zstd_1.size().max(1e-9);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "bytes of samples, far below 2^53; `as` saturates"
        )]
        let encoded = (first.encoded as f64 * relation).min(first.pages as f64) as u64;
        Candidate { encoded, ..*first }
    }

    /// zstd 1 on pages sent again, whole.
    pub fn again_zstd_1(&self) -> Option<&Candidate> {
        self.again_whole.as_ref().or_else(|| self.first.zstd_1())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_tried_on_pages_sent_again_is_as_in_the_first_pass() {
        let [none, zstd_1] = [Settings::new(Codec::Raw, None).unwrap(), Settings::default()];
        let of = |settings, encoded| Candidate {
            pages: 1000,
            encoded,
            cpu_ns: 5,
            ..Candidate::new(settings)
        };
        let first = Sizes(vec![of(none, 900), of(zstd_1, 500)]);
        let again = Sizes(vec![of(zstd_1, 100)]);
        let sampled = Sampled { first, again, again_whole: None };
        assert_eq!(sampled.again().0, [of(zstd_1, 100), of(none, 900)]);
    }
}
