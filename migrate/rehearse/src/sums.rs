//! The sums of the samples, and the resulting figures of each codec.

use codec::{Codec, Settings};
use forecast::{rounded, Candidate, Sizes};

/// Sums of samples, each of which was encoded with zstd 1 and with one other candidate.
#[derive(Clone, Debug, Default)]
pub(crate) struct SampleSums {
    /// zstd 1 on all samples.
    level: Option<Candidate>,
    /// Each candidate on its own samples, and zstd 1 on the same samples.
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

    /// The figures of the candidates for all samples: those of zstd 1 for all, times the
    /// candidate's relation to zstd 1 on its own samples. The cost of other work varies little, and
    /// is not scaled.
    #[expect(clippy::cast_precision_loss, reason = "bytes and ns of samples, far below 2^53")]
    pub(crate) fn sizes(&self) -> Sizes {
        let Some(all) = self.level else { return Sizes::default() };
        let scaled = |own: &Candidate, level: &Candidate| {
            let pages = all.pages as f64;
            let (size, cost) = (own.size() * all.size(), own.cost() * all.cost());
            let is_raw = own.settings.codec() == Codec::Raw;
            let size = if is_raw { own.size() } else { (size / level.size()).min(1.0) };
            let cost = if is_raw { own.cost() } else { cost / level.cost().max(1e-9) };
            let encoded = rounded(size * pages);
            Candidate { pages: all.pages, encoded, cpu_ns: rounded(cost * pages), ..*own }
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

/// The candidates of `--codec auto`.
pub(crate) fn controller_candidates() -> Vec<Settings> {
    controller::Config::candidates()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_candidate_is_scaled_to_all_samples() {
        let lz4 = Settings::new(Codec::Lz4, None).unwrap();
        let none = Settings::new(Codec::Raw, None).unwrap();
        let mut sums = SampleSums::default();
        assert!(sums.sizes().is_empty());
        // Half the size with zstd 1 here, a tenth there; lz4 was tried on the first only, and is
        // twice as large and costs half.
        sums.add(1000, (400, 2000), Some((lz4, (800, 1000))));
        sums.add(1000, (100, 2000), Some((none, (1000, 10))));
        let sizes = sums.sizes();
        let found: Vec<_> =
            sizes.0.iter().map(|one| (one.settings, one.encoded, one.cpu_ns)).collect();
        let zstd_1 = Settings::default();
        assert_eq!(found, [(none, 2000, 20), (lz4, 1000, 2000), (zstd_1, 500, 4000)]);
    }
}
