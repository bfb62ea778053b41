//! The settings of an encoder: a codec and a level that the codec has.

use std::ops::RangeInclusive;

use crate::{Codec, HISTORY_LEVELS};

/// A codec and a level, checked to fit each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    codec: Codec,
    level: i32,
    by_qpl: bool,
    history: bool,
}

impl Settings {
    /// Pairs `codec` with `level`, or with the codec's default level (1).
    ///
    /// zlib has 0 to 9 (0: no compression, every unit is sent raw), zstd -5 to 19 (0: zstd's own
    /// default, 3), qatzip 1 to 9, lz4 -63 to 1 (-n: acceleration n + 1), and none has no level.
    ///
    /// # Errors
    ///
    /// The level is out of range, or the codec is [`Codec::SameFilled`], which the encoder detects
    /// by itself.
    pub fn new(codec: Codec, level: Option<i32>) -> Result<Self, SettingsError> {
        let Some(levels) = levels(codec) else {
            return match (codec, level) {
                (Codec::SameFilled, _) => Err(SettingsError::NotSelectable(codec)),
                (_, Some(level)) => Err(SettingsError::NoLevels { codec, level }),
                (_, None) => Ok(Self { codec, level: 0, by_qpl: false, history: false }),
            };
        };
        let level = level.unwrap_or(DEFAULT_LEVEL);
        if !levels.contains(&level) {
            let (min, max) = levels.into_inner();
            return Err(SettingsError::Level { codec, level, min, max });
        }
        Ok(Self { codec, level, by_qpl: false, history: false })
    }

    /// Units of [`Codec::Zlib`] that Intel's QPL makes, if the encoder has it
    /// ([`Encoder::with_deflate`](crate::Encoder::with_deflate)). The level is QPL's default, which
    /// QEMU's method `qpl` uses too.
    pub fn qpl() -> Self {
        Self { codec: Codec::Zlib, level: DEFAULT_LEVEL, by_qpl: true, history: false }
    }

    /// Whether these are [`Settings::qpl`].
    pub fn is_qpl(&self) -> bool {
        self.by_qpl
    }

    /// These settings with a history ([`HistoryEncoder`](crate::HistoryEncoder)), if they are zstd
    /// of a level for which one pays. An encoder of units ignores it.
    #[must_use]
    pub fn with_history(self) -> Self {
        let history = self.codec == Codec::Zstd && HISTORY_LEVELS.contains(&self.level);
        Self { history, ..self }
    }

    /// Whether chunks refer to earlier chunks.
    pub fn has_history(&self) -> bool {
        self.history
    }

    /// The name in options and reports: "qpl", "zstd-history", or the codec's.
    pub fn name(&self) -> &'static str {
        if self.by_qpl {
            "qpl"
        } else if self.history {
            "zstd-history"
        } else {
            self.codec.name()
        }
    }

    /// The codec that is tried on each unit.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// The level; 0 for [`Codec::Raw`], which has none.
    pub fn level(&self) -> i32 {
        self.level
    }
}

impl Default for Settings {
    /// zstd level 1: the best ratio for the CPU time on guest memory, and the default of QEMU's
    /// multifd zstd.
    fn default() -> Self {
        Self { codec: Codec::Zstd, level: DEFAULT_LEVEL, by_qpl: false, history: false }
    }
}

/// Why a codec and a level do not fit, or cannot be set up. The cause is the user's choice or a
/// lack of memory, never the data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The codec has levels, but not this one.
    #[error("{codec} has no level {level}, expected {min} to {max}")]
    Level {
        /// The codec asked for.
        codec: Codec,
        /// The level asked for.
        level: i32,
        /// The lowest level there is.
        min: i32,
        /// The highest level there is.
        max: i32,
    },
    /// A level was given for a codec that has none.
    #[error("codec {codec} takes no level, got {level}")]
    NoLevels {
        /// The codec asked for.
        codec: Codec,
        /// The level asked for.
        level: i32,
    },
    /// The codec cannot be selected: the encoder detects it by itself.
    #[error("codec {0} cannot be asked for, it is used where it fits")]
    NotSelectable(Codec),
    /// The codec's context could not be created.
    #[error("cannot set up {codec} level {level}: {reason}")]
    Context {
        /// The codec asked for.
        codec: Codec,
        /// The level asked for.
        level: i32,
        /// The library's message.
        reason: &'static str,
    },
}

fn levels(codec: Codec) -> Option<RangeInclusive<i32>> {
    match codec {
        Codec::Raw | Codec::SameFilled => None,
        Codec::Lz4 => Some(-63..=1),
        Codec::Zlib => Some(0..=9),
        Codec::Zstd => Some(-5..=19),
        Codec::DeflateQz => Some(1..=9),
    }
}

const DEFAULT_LEVEL: i32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_out_of_range_is_named_with_its_codec_and_range() {
        let error = Settings::new(Codec::Zlib, Some(10)).unwrap_err();
        assert_eq!(error.to_string(), "zlib has no level 10, expected 0 to 9");
        let error = Settings::new(Codec::Zstd, Some(-6)).unwrap_err();
        assert_eq!(error.to_string(), "zstd has no level -6, expected -5 to 19");
        let error = Settings::new(Codec::DeflateQz, Some(0)).unwrap_err();
        assert_eq!(error.to_string(), "qatzip has no level 0, expected 1 to 9");
        for level in [-64, 2] {
            let error = Settings::new(Codec::Lz4, Some(level)).unwrap_err();
            assert_eq!(error.to_string(), format!("lz4 has no level {level}, expected -63 to 1"));
        }
        let error = Settings::new(Codec::Raw, Some(1)).unwrap_err();
        assert_eq!(error.to_string(), "codec none takes no level, got 1");
        assert!(Settings::new(Codec::SameFilled, None).is_err());
    }

    #[test]
    fn without_a_level_each_codec_has_its_default() {
        for (codec, level) in [
            (Codec::Raw, 0),
            (Codec::Lz4, 1),
            (Codec::Zlib, 1),
            (Codec::Zstd, 1),
            (Codec::DeflateQz, 1),
        ] {
            let settings = Settings::new(codec, None).unwrap();
            assert_eq!((settings.codec(), settings.level()), (codec, level));
        }
        assert_eq!(Settings::default(), Settings::new(Codec::Zstd, None).unwrap());
    }
}
