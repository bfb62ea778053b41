//! The histories of a session as its ends agree on them (W29a): how many, and how large.

use codec::HISTORY_WINDOWS;
use serde::{Deserialize, Serialize};

/// The most histories of a session: two for each of 255 codec threads.
pub const MAX_HISTORIES: u16 = 510;

/// A number of histories, and the window of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Histories {
    /// The number of histories, 1 to [`MAX_HISTORIES`].
    pub count: u16,
    /// The window of each history, as the base-2 logarithm of its bytes.
    pub window_log: u8,
}

impl Histories {
    /// Divides `bytes` among the windows of `count` histories; `None` if the windows would be too
    /// small.
    pub fn sized(count: usize, bytes: u64) -> Option<Self> {
        let count =
            u16::try_from(count).ok().filter(|count| (1..=MAX_HISTORIES).contains(count))?;
        let each = u8::try_from((bytes / u64::from(count)).checked_ilog2()?).ok()?;
        let window_log = each.min(*HISTORY_WINDOWS.end());
        HISTORY_WINDOWS.contains(&window_log).then_some(Self { count, window_log })
    }

    /// Bytes of all windows together.
    pub fn bytes(self) -> u64 {
        u64::from(self.count) << self.window_log.min(*HISTORY_WINDOWS.end())
    }

    /// The grant of a server that has `bytes` for windows, to a client that asks for these
    /// histories.
    pub fn granted(self, bytes: u64) -> Option<Self> {
        let most = Self::sized(self.count.into(), bytes)?;
        let window_log = self.window_log.min(most.window_log);
        HISTORY_WINDOWS.contains(&window_log).then_some(Self { window_log, ..self })
    }

    /// Whether `granted` is no more than `asked`, and within the protocol's bounds.
    pub(crate) fn is_within(granted: Option<Self>, asked: Option<Self>) -> bool {
        match (granted, asked) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(granted), Some(asked)) => {
                granted.count == asked.count
                    && granted.window_log <= asked.window_log
                    && HISTORY_WINDOWS.contains(&granted.window_log)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_the_largest_that_the_memory_holds() {
        let of = |count, bytes| Histories::sized(count, bytes).map(|h| (h.count, h.window_log));
        assert_eq!(of(4, 16 << 20), Some((4, 22)));
        assert_eq!(of(4, (16 << 20) - 1), Some((4, 21)));
        assert_eq!(of(1, u64::MAX), Some((1, 27)));
        assert_eq!(of(510, 510 << 20), Some((510, 20)));
        for (count, bytes) in
            [(0, 1 << 30), (511, 1 << 40), (70_000, 1 << 60), (4, 4 << 19), (3, 0)]
        {
            assert_eq!(of(count, bytes), None, "{count} {bytes}");
        }
    }

    #[test]
    fn a_grant_is_bounded_by_both_ends_and_by_the_protocol() {
        let asked = Histories { count: 4, window_log: 22 };
        assert_eq!(asked.granted(1 << 30), Some(asked));
        assert_eq!((asked.bytes(), asked.granted(asked.bytes())), (16 << 20, Some(asked)));
        assert_eq!(asked.granted(9 << 20), Some(Histories { count: 4, window_log: 21 }));
        assert_eq!(asked.granted(1 << 20), None);
        for (count, window_log) in [(0, 22), (511, 22), (u16::MAX, 255), (4, 19)] {
            assert_eq!(Histories { count, window_log }.granted(u64::MAX), None);
        }
        // 512 MiB at most, whatever a client asks for.
        let most = Histories { count: 4, window_log: 255 }.granted(u64::MAX);
        assert_eq!(most, Some(Histories { count: 4, window_log: 27 }));
        let of = |count, window_log| Some(Histories { count, window_log });
        assert!(Histories::is_within(None, None) && Histories::is_within(None, of(4, 22)));
        assert!(Histories::is_within(of(4, 20), of(4, 22)));
        for granted in [of(5, 22), of(3, 22), of(4, 23), of(4, 19)] {
            assert!(!Histories::is_within(granted, of(4, 22)), "{granted:?}");
        }
        assert!(!Histories::is_within(of(4, 22), None));
    }
}
