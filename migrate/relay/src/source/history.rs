//! The histories of one codec thread of the source (W29a): one for each level that it uses, each
//! with its encoder.

use codec::{same_filled, HistoryEncoder, Settings, SettingsError};
use controller::Class;
use session::Histories;

/// The histories of a codec thread.
pub(crate) struct OwnHistories {
    window_log: u8,
    /// Numbers of histories that no level has yet.
    free: std::ops::Range<u16>,
    encoders: Vec<(i32, HistoryEncoder)>,
}

/// The result of [`OwnHistories::encode`].
pub(crate) enum Attempt {
    /// A part of so many bytes, header included.
    Part(usize),
    /// The chunk does not get smaller.
    NoGain,
    /// A chunk of this kind goes without a history.
    Unfit,
}

impl OwnHistories {
    /// Takes the histories of codec thread `number` from `all` of the session: one for each of
    /// `levels` levels.
    pub(crate) fn new(all: Histories, number: usize, levels: usize) -> Self {
        let place = |number: usize| u16::try_from(number * levels).unwrap_or(u16::MAX);
        let (from, to) = (place(number).min(all.count), place(number + 1).min(all.count));
        Self { window_log: all.window_log, free: from..to, encoders: Vec::new() }
    }

    /// Compresses `plain`, all of a chunk or its packed form, as the next part of the history of
    /// these settings.
    pub(crate) fn encode(&mut self, settings: Settings, plain: &[u8], out: &mut [u8]) -> Attempt {
        // Random bytes would only push others out of the window, and end the frame.
        let fits = settings.has_history()
            && same_filled(plain).is_none()
            && Class::of(plain) != Class::Dense;
        let Some(encoder) = fits.then(|| self.encoder(settings.level()).ok().flatten()).flatten()
        else {
            return Attempt::Unfit;
        };
        encoder.encode(plain, out).map_or(Attempt::NoGain, Attempt::Part)
    }

    /// The encoder of `level`, made at its first use; `None` when all histories are in use.
    fn encoder(&mut self, level: i32) -> Result<Option<&mut HistoryEncoder>, SettingsError> {
        if let Some(at) = self.encoders.iter().position(|(of, _)| *of == level) {
            return Ok(Some(&mut self.encoders[at].1));
        }
        let Some(history) = self.free.next() else { return Ok(None) };
        let encoder = HistoryEncoder::new(history, level, self.window_log)?;
        self.encoders.push((level, encoder));
        Ok(self.encoders.last_mut().map(|(_, encoder)| encoder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codec::{Codec, PartHeader};

    #[test]
    fn each_thread_and_level_has_a_history_of_its_own() {
        let all = Histories { count: 4, window_log: 20 };
        let zstd = |level| Settings::new(Codec::Zstd, Some(level)).unwrap();
        let plain = b"It was the best of times, it was the worst of times. ".repeat(100);
        let mut seen = Vec::new();
        for number in [0, 1, 2] {
            let mut own = OwnHistories::new(all, number, 2);
            for level in [6, 9, 6, 3] {
                let mut out = vec![0; plain.len()];
                match own.encode(zstd(level).with_history(), &plain, &mut out) {
                    Attempt::Part(len) => {
                        let part = PartHeader::from_bytes(&out[..len]).unwrap();
                        seen.push((number, level, part.history, part.number));
                    }
                    Attempt::Unfit => {}
                    Attempt::NoGain => panic!("text shrinks"),
                }
            }
        }
        let expected =
            [(0, 6, 0, 0), (0, 9, 1, 0), (0, 6, 0, 1), (1, 6, 2, 0), (1, 9, 3, 0), (1, 6, 2, 1)];
        assert_eq!(seen, expected);
    }

    #[test]
    fn random_and_filled_chunks_go_without_a_history() {
        let mut own = OwnHistories::new(Histories { count: 2, window_log: 20 }, 0, 1);
        let settings = Settings::new(Codec::Zstd, Some(6)).unwrap();
        let mut state = 1_u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        })
        .take(50_000)
        .collect();
        let (filled, text) = (vec![3; 50_000], b"one of many words, ".repeat(500));
        let mut out = vec![0; 50_000];
        let mut unfit = |settings, plain: &[u8]| {
            matches!(own.encode(settings, plain, &mut out), Attempt::Unfit)
        };
        assert!(unfit(settings.with_history(), &noise));
        assert!(unfit(settings.with_history(), &filled));
        assert!(unfit(settings, &text));
        assert!(!unfit(settings.with_history(), &text));
    }
}
