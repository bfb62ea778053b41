//! Encodes plain bytes to a smaller payload, or reports that there is none.

use libdeflater::CompressionLvl;

use std::sync::Arc;

use crate::dictionary::contexts::{Compressed, WithDictionary};
use crate::dictionary::Dictionary;
use crate::fill::same_filled;
use crate::fixed::{checked, Fixed};
use crate::{lz4, qz, zstd, Codec, Settings, SettingsError, MAX_PLAIN};

/// The result of [`Encoder::encode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// How to read the payload. With [`Codec::Raw`] the payload is the plain bytes.
    pub codec: Codec,
    /// Length of the payload: the plain length for [`Codec::Raw`], otherwise less.
    pub len: usize,
}

/// A maker of raw DEFLATE streams besides libdeflate: an accelerator.
pub trait Deflate: Send {
    /// Compresses `plain` into the front of `out`. Each [`Deflated::Done`] inflates to `plain`.
    fn deflate(&mut self, plain: &[u8], out: &mut [u8]) -> Deflated;
}

/// The result of [`Deflate::deflate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deflated {
    /// A stream of this many bytes.
    Done(usize),
    /// The stream does not fit into `out`.
    TooLong,
    /// There is no stream; the encoder makes one by libdeflate.
    Failed,
}

/// Compresses units one after the other; owned by one thread.
///
/// A context is created when its codec is first set, and then reused, so that switching codecs
/// costs nothing.
pub struct Encoder {
    settings: Settings,
    /// The context for both codecs based on deflate.
    deflate: Option<(i32, libdeflater::Compressor)>,
    /// The maker of streams for [`Settings::qpl`].
    other: Option<Box<dyn Deflate>>,
    /// One for the levels that need little memory, one for the others: a single context that
    /// switches between them would free memory and allocate it again.
    zstd: [Option<zstd::Compressor>; 2],
    /// Used instead of `zstd` in an encoder for a limited size of units.
    fixed: Option<Fixed>,
    /// The context for pages compressed with a dictionary.
    with_dictionary: Option<WithDictionary>,
}

impl Encoder {
    /// Creates an encoder for `settings`.
    ///
    /// # Errors
    ///
    /// [`SettingsError::Context`] if a context cannot be made.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        let mut this = Self {
            settings,
            deflate: None,
            other: None,
            zstd: [None, None],
            fixed: None,
            with_dictionary: None,
        };
        this.set(settings)?;
        Ok(this)
    }

    /// Creates an encoder for `settings` and units of at most `largest` bytes. Longer units may
    /// remain uncompressed. With zstd it has one context for all sizes, which takes
    /// [`memory_with_limit`](Self::memory_with_limit) bytes, and allocates nothing later.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn with_limit(settings: Settings, largest: usize) -> Result<Self, SettingsError> {
        if settings.codec() != Codec::Zstd {
            return Self::new(settings);
        }
        let mut this = Self::new(Settings::new(Codec::Raw, None)?)?;
        let level = settings.level();
        this.fixed = Some(Fixed::new(level, Fixed::memory_for(level, largest))?);
        this.settings = settings;
        Ok(this)
    }

    /// As [`with_limit`](Self::with_limit), for an encoder that can also compress pages with a
    /// dictionary, provided that the settings are zstd and its level never changes.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn with_dictionaries(settings: Settings, largest: usize) -> Result<Self, SettingsError> {
        let mut this = Self::with_limit(settings, largest)?;
        if settings.codec() == Codec::Zstd {
            this.with_dictionary = Some(WithDictionary::new(settings.level())?);
        }
        Ok(this)
    }

    /// Returns this encoder with `other` as the maker of the streams of [`Settings::qpl`]. Without
    /// a maker, and where it fails, libdeflate makes the streams.
    #[must_use]
    pub fn with_deflate(mut self, other: Box<dyn Deflate>) -> Self {
        self.other = Some(other);
        self
    }

    /// The most heap memory, in bytes, of an encoder made [`with_limit`](Self::with_limit).
    pub fn memory_with_limit(settings: Settings, largest: usize) -> usize {
        match (settings.codec(), settings.level()) {
            (Codec::Zstd, level) => Fixed::memory_for(level, largest),
            (Codec::Zlib | Codec::DeflateQz, level) if level > 3 => 712 << 10,
            (Codec::Zlib | Codec::DeflateQz, _) => 400 << 10,
            (Codec::Raw | Codec::SameFilled | Codec::Lz4, _) => 0,
        }
    }

    /// The settings for the next unit.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Uses `settings` from the next unit on.
    ///
    /// # Errors
    ///
    /// [`SettingsError::Context`] if a context cannot be created; the encoder then returns
    /// [`Codec::Raw`] until other settings are set.
    pub fn set(&mut self, settings: Settings) -> Result<(), SettingsError> {
        self.settings = Settings::new(Codec::Raw, None)?;
        self.fixed = None;
        let level = settings.level();
        match settings.codec() {
            Codec::Raw | Codec::SameFilled | Codec::Lz4 => {}
            Codec::Zlib | Codec::DeflateQz
                if self.deflate.as_ref().is_some_and(|(have, _)| *have == level) => {}
            codec @ (Codec::Zlib | Codec::DeflateQz) => {
                let checked = CompressionLvl::new(level).map_err(|_| SettingsError::Context {
                    codec,
                    level,
                    reason: "libdeflate has no such level",
                })?;
                self.deflate = Some((level, libdeflater::Compressor::new(checked)));
            }
            Codec::Zstd => match &mut self.zstd[zstd_number(level)] {
                Some(context) => context.set_level(level),
                none => *none = Some(zstd::Compressor::new(level)?),
            },
        }
        self.settings = settings;
        Ok(())
    }

    /// Compresses `plain` into the front of `out`, which is at least as long.
    ///
    /// The payload is always shorter than `plain`; otherwise the result is [`Codec::Raw`], the
    /// caller sends `plain` itself, and the contents of `out` are unspecified. With [`Codec::Raw`]
    /// set, `plain` is not even read; any other codec first checks for a repeated word.
    ///
    /// # Panics
    ///
    /// If `plain` is longer than [`MAX_PLAIN`] or than `out`.
    pub fn encode(&mut self, plain: &[u8], out: &mut [u8]) -> Encoded {
        assert!(plain.len() <= MAX_PLAIN, "unit of {} bytes, at most {MAX_PLAIN}", plain.len());
        assert!(out.len() >= plain.len(), "{} bytes of room for {}", out.len(), plain.len());
        let raw = Encoded { codec: Codec::Raw, len: plain.len() };
        let codec = self.settings.codec();
        if codec == Codec::Raw || plain.len() < MIN_PLAIN {
            return raw;
        }
        if let Some(word) = same_filled(plain) {
            out[..word.len()].copy_from_slice(&word);
            return Encoded { codec: Codec::SameFilled, len: word.len() };
        }
        // One byte less than the plain bytes: a codec that needs more gives up, so that any payload
        // is smaller than the plain bytes.
        let room = plain.len() - 1;
        let len = match codec {
            Codec::Raw | Codec::SameFilled => None,
            Codec::Lz4 => lz4::compress(self.settings.level(), plain, &mut out[..room]),
            // Level 0 writes stored blocks only, which are never smaller.
            Codec::Zlib if self.settings.level() == 0 => None,
            Codec::Zlib => self.deflate(plain, &mut out[..room]),
            Codec::DeflateQz => self
                .deflate
                .as_mut()
                .and_then(|(_, deflate)| qz::compress(deflate, plain, &mut out[..room])),
            Codec::Zstd if let Some(fixed) = &mut self.fixed => {
                checked(fixed.compress(plain, &mut out[..room])).ok()
            }
            Codec::Zstd => {
                let zstd = &mut self.zstd[zstd_number(self.settings.level())];
                zstd.as_mut().and_then(|zstd| zstd.compress(plain, &mut out[..room]))
            }
        };
        match len {
            Some(len) if len <= room => Encoded { codec, len },
            _ => raw,
        }
    }

    /// Makes a raw DEFLATE stream, by the maker that is set.
    fn deflate(&mut self, plain: &[u8], out: &mut [u8]) -> Option<usize> {
        if let Some(other) = self.other.as_mut().filter(|_| self.settings.is_qpl()) {
            match other.deflate(plain, out) {
                Deflated::Done(len) => return Some(len),
                Deflated::TooLong => return None,
                Deflated::Failed => {}
            }
        }
        let (_, deflate) = self.deflate.as_mut()?;
        deflate.deflate_compress(plain, out).ok()
    }

    /// As [`encode`](Self::encode), but uses `dictionary` if it is not empty and is for
    /// compression, and if this encoder was made [`with_dictionaries`](Self::with_dictionaries).
    /// The second result tells whether the dictionary was used. Only for pages of at most 4096
    /// bytes.
    ///
    /// # Panics
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_with(
        &mut self,
        dictionary: Option<&Arc<Dictionary>>,
        plain: &[u8],
        out: &mut [u8],
    ) -> (Encoded, bool) {
        if let (Some(dictionary), Some(context)) = (dictionary, &mut self.with_dictionary) {
            assert!(out.len() >= plain.len(), "{} bytes of room for {}", out.len(), plain.len());
            if plain.len() >= MIN_PLAIN && same_filled(plain).is_none() {
                // As in `encode`.
                let room = plain.len() - 1;
                match context.compress(dictionary, plain, &mut out[..room]) {
                    Compressed::Fits(len) => return (Encoded { codec: Codec::Zstd, len }, true),
                    Compressed::NoGain => {
                        return (Encoded { codec: Codec::Raw, len: plain.len() }, false);
                    }
                    Compressed::Unfit => {}
                }
            }
        }
        (self.encode(plain, out), false)
    }

    /// Releases the dictionary that was used last.
    pub fn release_dictionary(&mut self) {
        if let Some(context) = &mut self.with_dictionary {
            context.clear_dictionary();
        }
    }
}

/// The number of the zstd compressor that handles `level`. For units of 512 KiB, levels up to 3
/// need 0.5 to 1.3 MB, and levels from 4 to 12 need 2.6 to 5.8 MB. zstd shrinks a context that uses
/// less than a third of its memory for long.
fn zstd_number(level: i32) -> usize {
    usize::from(level > 3)
}

/// No codec gains with fewer plain bytes: any payload would be longer.
const MIN_PLAIN: usize = 2;
