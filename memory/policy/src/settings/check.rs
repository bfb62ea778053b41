//! Whether settings are in range, and name a codec that compresses.

use codec::Codec;
use store::{MAX_AGE, MAX_MEMBERS};

use super::{Pressure, Settings, SettingsError};

impl Settings {
    /// Checks that all numbers are in range.
    ///
    /// # Errors
    ///
    /// [`SettingsError`].
    pub fn check(&self) -> Result<(), SettingsError> {
        let Self {
            period, period_pressed, idle, idle_pressed, group, gain, cpu, cpu_pressed, ..
        } = *self;
        let Pressure { stall, window, .. } = self.pressure;
        let ages = 1..=u64::from(MAX_AGE);
        if self.backing_dev.is_some() && !self.enabled {
            return Err(SettingsError::Disabled);
        }
        let group = group as u64;
        let age = |name, value: u8| (name, value.into(), 1..=u64::from(MAX_AGE), "1 to 7 periods");
        for (name, value, range, expected) in [
            ("period", period, 1..=86_400, "1 to 86400 seconds"),
            ("period_pressed", period_pressed, 1..=86_400, "1 to 86400 seconds"),
            ("idle", idle.into(), ages.clone(), "1 to 7 periods"),
            ("idle_pressed", idle_pressed.into(), ages, "1 to 7 periods"),
            // The store has one record for every eight pages.
            (
                "group",
                group,
                if group == 1 { 1..=1 } else { 8..=MAX_MEMBERS as u64 },
                "1, or 8 to 32 pages",
            ),
            age("writeback_idle", self.writeback_idle),
            age("writeback_idle_pressed", self.writeback_idle_pressed),
            age("writeback_huge_idle", self.writeback_huge_idle),
            age("writeback_huge_idle_pressed", self.writeback_huge_idle_pressed),
            (
                "writeback_batch_size",
                self.writeback_batch_size.into(),
                1..=1024,
                "1 to 1024 blocks of 4 KiB",
            ),
            // Fewer pages are not enough for the samples.
            ("dictionary_pages", self.dictionary_pages, 1024..=u64::MAX, "1024 pages or more"),
            ("dictionary_period", self.dictionary_period, 1..=31_536_000, "1 second to a year"),
            ("gain", gain.into(), 1..=90, "1 to 90 per cent"),
            ("cpu", cpu.into(), 1..=100, "1 to 100 per cent"),
            ("cpu_pressed", cpu_pressed.into(), 1..=100, "1 to 100 per cent"),
            ("pressure.window", window.into(), 500..=10_000, "500 to 10000 milliseconds"),
            ("pressure.stall", stall.into(), 1..=window.into(), "1 ms to the whole window"),
        ] {
            if !range.contains(&value) {
                return Err(SettingsError::Range { name, value, expected });
            }
        }
        if !matches!(self.dictionary.as_str(), "auto" | "off") {
            return Err(SettingsError::Dictionary(self.dictionary.clone()));
        }
        self.codec().map(drop)
    }

    /// Codec and level.
    pub(crate) fn codec(&self) -> Result<codec::Settings, SettingsError> {
        let wrong = || SettingsError::Codec { codec: self.codec.clone(), level: self.level };
        let codec: Codec = self.codec.parse().map_err(|_| wrong())?;
        let known = match codec {
            Codec::Zstd | Codec::Lz4 => true,
            Codec::Zlib => self.level > 0,
            _ => false,
        };
        let settings = codec::Settings::new(codec, Some(self.level));
        settings.ok().filter(|_| known).ok_or_else(wrong)
    }
}
