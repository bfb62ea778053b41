//! One class's plan, packed so that readers load it without a lock.

/// One class's plan in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) low: u8,
    pub(crate) high: u8,
    /// Share of `high`, in 65536ths; 65535 counts as all.
    pub(crate) share: u16,
    /// Every `period`th chunk explores this; 0: none does.
    pub(crate) explore: u8,
    pub(crate) period: u16,
}

impl Plan {
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.low)
            | u64::from(self.high) << 8
            | u64::from(self.explore) << 16
            | u64::from(self.share) << 24
            | u64::from(self.period) << 40
    }

    pub(crate) fn unpack(word: u64) -> Self {
        let [low, high, explore, share_low, share_high, period_low, period_high, _] =
            word.to_le_bytes();
        Self {
            low,
            high,
            explore,
            share: u16::from_le_bytes([share_low, share_high]),
            period: u16::from_le_bytes([period_low, period_high]),
        }
    }
}

/// A candidate's number in a plan.
pub(crate) fn number(candidate: usize) -> u8 {
    u8::try_from(candidate).unwrap_or(0)
}

/// `share` in 65536ths; all is 65535.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "0 to 65535; `as` saturates"
)]
pub(crate) fn parts(share: f64) -> u16 {
    (share * 65536.0) as u16
}
