//! A controller's configuration, and its beliefs before it has measured anything.

use codec::{Codec, Settings};

use crate::Class;

/// The most candidates of a controller; more would only blur the estimates.
pub const MAX_CANDIDATES: usize = 32;

/// The configuration of a controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// Codec threads.
    pub workers: usize,
    /// CPU cores that the codec threads may use on average (`--max-cpu`); `None`: one per codec
    /// thread.
    pub max_cpu: Option<f64>,
    /// Cores that the codec threads share with the rest of this process (reading, hashing,
    /// sending). `None`: unknown; then only the codec threads' own CPU time counts.
    pub cores: Option<f64>,
    /// CPU time that a plain byte costs on those cores besides encoding, ns. A first guess when
    /// [`Signals::other_cpu`](crate::Signals::other_cpu) is given.
    pub other_ns_per_byte: f64,
    /// The settings to choose from, in any order; [`Config::candidates`] are the usual ones. Until
    /// there are measurements, the cheapest that compresses is used, or the first if none does.
    pub candidates: Vec<Settings>,
    /// Bytes of a full chunk.
    pub chunk_bytes: usize,
    /// How long encoding one chunk may take, ns. Chunks still being encoded when the VM stops add
    /// to the downtime, and the session's window holds 15 ms of drain: slower candidates would
    /// starve the link.
    pub longest_encode_ns: f64,
    /// Share of the time to completion that exploring may cost, 0 to 1.
    pub explore_share: f64,
}

impl Config {
    /// The usual candidates for `workers` codec threads.
    pub fn new(workers: usize) -> Self {
        Self {
            workers,
            max_cpu: None,
            cores: None,
            other_ns_per_byte: 0.35,
            candidates: Self::candidates(),
            chunk_bytes: 512 << 10,
            longest_encode_ns: 10e6,
            explore_share: 0.02,
        }
    }

    /// none, lz4 -7 and 1, and zstd 1, 3, 7 and 9.
    ///
    /// Few, since each has to be tried, and a figure that is wrong by chance may attract chunks. By
    /// the sizes and costs that `--example measure` prints, mixes of these are within 1.7 % of the
    /// best that those, lz4 -15 and -31, and zstd -5, -3, -1, 2 and 5 allow, on text, guest and
    /// redis memory, with 1 to 16 cores and links of 1 Gbit/s to unlimited. zstd -3 adds nothing to
    /// lz4 1 and zstd 1; without lz4 -7 it is up to 4.8 %. zlib is never the best (zstd 1 encodes
    /// at half its cost to the same size). zstd 12 saves 0.4 to 1.2 % of level 9's bytes at 1.5
    /// times its cost, and a chunk takes it longer than the downtime allows.
    pub fn candidates() -> Vec<Settings> {
        let lz4 = [-7, 1].map(|level| (Codec::Lz4, Some(level)));
        let zstd = [1, 3, 7, 9].map(|level| (Codec::Zstd, Some(level)));
        std::iter::once((Codec::Raw, None))
            .chain(lz4)
            .chain(zstd)
            .filter_map(|(codec, level)| Settings::new(codec, level).ok())
            .collect()
    }
}

/// A candidate's assumed size and cost relative to zstd 1, on the same data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prior {
    /// Size is (size under zstd 1) to this power.
    pub(crate) power: f64,
    /// Cost is this multiple of zstd 1's.
    pub(crate) cost: f64,
}

/// Powers and costs on guest memory by `--example measure`; zlib's from the measurements that chose
/// libdeflate. Only a start: after some samples, observations outweigh them.
pub(crate) fn prior(settings: Settings) -> Prior {
    let table: &[(i32, f64, f64)] = match settings.codec() {
        // By `--example zstd_history` of crate `corpus`, with two histories.
        Codec::Zstd if settings.has_history() => &[
            (3, 1.08, 2.5),
            (5, 1.115, 4.1),
            (6, 1.137, 5.4),
            (7, 1.149, 6.5),
            (9, 1.162, 8.7),
            (12, 1.18, 19.0),
            (19, 1.24, 110.0),
        ],
        Codec::Raw | Codec::SameFilled => &[(0, 0.0, 0.0)],
        Codec::Lz4 => {
            &[(-31, 0.374, 0.243), (-15, 0.478, 0.336), (-7, 0.583, 0.427), (1, 0.732, 0.598)]
        }
        Codec::Zstd => &[
            (-5, 0.69, 0.62),
            (-3, 0.77, 0.68),
            (-1, 0.86, 0.79),
            (1, 1.00, 1.00),
            (2, 1.02, 1.25),
            (3, 1.055, 1.47),
            (5, 1.075, 3.1),
            (7, 1.097, 4.9),
            (9, 1.104, 6.0),
            (12, 1.11, 9.0),
            (15, 1.112, 24.0),
            (19, 1.16, 100.0),
        ],
        // A candidate only where a device does it: the codec thread then has little to do.
        Codec::DeflateQz => &[(1, 0.97, 0.15)],
        Codec::Zlib => &[(0, 0.0, 0.05), (1, 0.97, 1.5), (6, 1.06, 2.8), (9, 1.08, 8.0)],
    };
    // zstd 0 is its own default, 3.
    let level = match (settings.codec(), settings.level()) {
        (Codec::Zstd, 0) => 3,
        (_, level) => level,
    };
    let above = table.iter().position(|row| row.0 >= level).unwrap_or(table.len() - 1);
    let (high, low) = (table[above], table[above.saturating_sub(1)]);
    if high.0 <= level || high.0 == low.0 {
        return Prior { power: high.1, cost: high.2 };
    }
    let share = f64::from(level - low.0) / f64::from(high.0 - low.0);
    let between = |low: f64, high: f64| low + share * (high - low);
    Prior { power: between(low.1, high.1), cost: between(low.2, high.2) }
}

/// Size under zstd 1 and its cost in ns a plain byte, before the first observation of a class.
pub(crate) fn first_guess(class: Class) -> (f64, f64) {
    match class {
        Class::Sparse => (0.12, 0.8),
        Class::Plain => (0.37, 2.0),
        Class::Rich => (0.6, 2.2),
        Class::Dense => (0.97, 0.3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_there_is_has_a_finite_prior() {
        let codecs = [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz];
        let mut count = 0;
        for codec in codecs {
            for level in std::iter::once(None).chain((-63..=22).map(Some)) {
                let Ok(settings) = Settings::new(codec, level) else { continue };
                for settings in [settings, settings.with_history()] {
                    let prior = prior(settings);
                    assert!((0.0..2.0).contains(&prior.power), "{settings:?} {prior:?}");
                    assert!((0.0..200.0).contains(&prior.cost), "{settings:?} {prior:?}");
                }
                count += 1;
            }
        }
        assert!(count > 100);
        assert_eq!(Config::candidates().len(), 7);
        let four = prior(Settings::new(Codec::Zstd, Some(4)).unwrap());
        assert!((four.cost - 2.285).abs() < 1e-9);
        let zero = prior(Settings::new(Codec::Zstd, Some(0)).unwrap());
        assert!((zero.cost - 1.47).abs() < 1e-9);
    }
}
