//! Sizes and costs of the samples, by codec.

use codec::{Codec, Settings};

/// What one codec and level made of all samples.
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
}

#[expect(clippy::cast_precision_loss, reason = "bytes and ns of samples, far below 2^53")]
impl Candidate {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { settings, pages: 0, encoded: 0, cpu_ns: 0 }
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

    pub(crate) fn add(&mut self, pages: u64, encoded: u64, cpu_ns: u64) {
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
        let is_it =
            |one: &&Candidate| (one.settings.codec(), one.settings.level()) == (Codec::Zstd, 1);
        self.0.iter().find(is_it)
    }
}

/// Sums of samples, each of which was encoded with zstd 1 and with one other candidate.
#[derive(Clone, Debug, Default)]
pub(crate) struct SampleSums {
    /// zstd 1 on all samples.
    level: Option<Candidate>,
    /// Each candidate on its own samples, and zstd 1 on the same.
    others: Vec<(Candidate, Candidate)>,
}

impl SampleSums {
    /// Adds a sample with `pages` bytes of pages, and (bytes, CPU ns) of its encodings.
    pub(crate) fn add(
        &mut self,
        pages: u64,
        level: (u64, u64),
        other: Option<(Settings, (u64, u64))>,
    ) {
        let zstd_1 = || Candidate::new(Settings::default());
        self.level.get_or_insert_with(zstd_1).add(pages, level.0, level.1);
        let Some((settings, seen)) = other else { return };
        let at = self.others.iter().position(|(one, _)| one.settings == settings);
        let at = at.unwrap_or_else(|| {
            self.others.push((Candidate::new(settings), zstd_1()));
            self.others.len() - 1
        });
        self.others[at].0.add(pages, seen.0, seen.1);
        self.others[at].1.add(pages, level.0, level.1);
    }

    /// The candidates on all samples: as zstd 1 is on all, times its relation to that on its own. What
    /// is not compressed varies little, and has no such relation.
    #[expect(clippy::cast_precision_loss, reason = "bytes and ns of samples, far below 2^53")]
    pub(crate) fn sizes(&self) -> Sizes {
        let Some(all) = self.level else { return Sizes::default() };
        let scaled = |own: &Candidate, level: &Candidate| {
            let pages = all.pages as f64;
            let (size, cost) = (own.size() * all.size(), own.cost() * all.cost());
            let is_raw = own.settings.codec() == Codec::Raw;
            let size = if is_raw { own.size() } else { (size / level.size()).min(1.0) };
            let cost = if is_raw { own.cost() } else { cost / level.cost().max(1e-9) };
            let encoded = whole(size * pages);
            Candidate { pages: all.pages, encoded, cpu_ns: whole(cost * pages), ..*own }
        };
        let mut sizes: Vec<_> = self.others.iter().map(|(own, level)| scaled(own, level)).collect();
        if !sizes.iter().any(|one| one.settings == all.settings) {
            sizes.push(all);
        }
        let place = |one: &Candidate| {
            controller_candidates().iter().position(|settings| *settings == one.settings)
        };
        sizes.sort_by_key(place);
        Sizes(sizes)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates, and takes a number that is none as 0"
)]
fn whole(number: f64) -> u64 {
    number.round() as u64
}

/// The candidates of `--codec auto`.
pub(crate) fn controller_candidates() -> Vec<Settings> {
    controller::Config::candidates()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_tried_on_pages_sent_again_is_as_in_the_first_pass() {
        let [none, zstd_1] = [Settings::new(Codec::Raw, None).unwrap(), Settings::default()];
        let of = |settings, encoded| Candidate { settings, pages: 1000, encoded, cpu_ns: 5 };
        let first = Sizes(vec![of(none, 900), of(zstd_1, 500)]);
        let again = Sizes(vec![of(zstd_1, 100)]);
        let sampled = crate::Sampled { first, again, again_whole: None };
        assert_eq!(sampled.again().0, [of(zstd_1, 100), of(none, 900)]);
    }

    #[test]
    fn a_candidate_is_scaled_to_all_samples() {
        let lz4 = Settings::new(Codec::Lz4, None).unwrap();
        let none = Settings::new(Codec::Raw, None).unwrap();
        let mut sums = SampleSums::default();
        assert!(sums.sizes().is_empty());
        // Half the size with zstd 1 here, a tenth there; lz4 was tried on the first only, and is twice
        // as large and costs half.
        sums.add(1000, (400, 2000), Some((lz4, (800, 1000))));
        sums.add(1000, (100, 2000), Some((none, (1000, 10))));
        let sizes = sums.sizes();
        let found: Vec<_> =
            sizes.0.iter().map(|one| (one.settings, one.encoded, one.cpu_ns)).collect();
        let zstd_1 = Settings::default();
        assert_eq!(found, [(none, 2000, 20), (lz4, 1000, 2000), (zstd_1, 500, 4000)]);
    }
}
