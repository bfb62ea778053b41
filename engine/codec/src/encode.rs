//! Plain bytes to a payload that is smaller, or to nothing.

use libdeflater::CompressionLvl;
use lz4_flex::block::{compress_into_with_table, get_maximum_output_size, CompressTable};

use std::sync::Arc;

use crate::dictionary::{Compressed, Dictionary, WithDictionary};
use crate::fill::same_filled;
use crate::{qz, zstd, Codec, Settings, SettingsError, MAX_PLAIN};

/// What [`Encoder::encode`] made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// How the payload is to be read. [`Codec::Raw`]: the payload is the plain bytes.
    pub codec: Codec,
    /// Length of the payload, which for [`Codec::Raw`] is the plain length, else less.
    pub len: usize,
}

/// Compresses one unit after the other; owned by one thread.
///
/// Contexts are made when a codec is first set and kept, so that changing to and fro costs nothing.
pub struct Encoder {
    settings: Settings,
    lz4: Option<Lz4>,
    /// For both codecs that are deflate inside.
    deflate: Option<(i32, libdeflater::Compressor)>,
    /// For levels that need little memory, and for the others: a context that is changed to and fro
    /// between them would give memory back and take it again.
    zstd: [Option<zstd::Compressor>; 2],
    /// For pages with a dictionary.
    with_dictionary: Option<WithDictionary>,
}

impl Encoder {
    /// An encoder for `settings`.
    ///
    /// # Errors
    ///
    /// [`SettingsError::Context`] if a context cannot be made.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        let mut this =
            Self { settings, lz4: None, deflate: None, zstd: [None, None], with_dictionary: None };
        this.set(settings)?;
        Ok(this)
    }

    /// An encoder for `settings` that can compress pages with a dictionary too, if that is zstd's
    /// level from the beginning to the end.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_dictionaries(settings: Settings) -> Result<Self, SettingsError> {
        let mut this = Self::new(settings)?;
        if settings.codec() == Codec::Zstd {
            this.with_dictionary = Some(WithDictionary::new(settings.level())?);
        }
        Ok(this)
    }

    /// What is tried on the next unit.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Uses `settings` from the next unit on.
    ///
    /// # Errors
    ///
    /// [`SettingsError::Context`] if a context cannot be made; the encoder then sends units as they
    /// are until told otherwise.
    pub fn set(&mut self, settings: Settings) -> Result<(), SettingsError> {
        self.settings = Settings::new(Codec::Raw, None)?;
        let level = settings.level();
        match settings.codec() {
            Codec::Raw | Codec::SameFilled => {}
            Codec::Lz4 => {
                self.lz4.get_or_insert_with(Lz4::new);
            }
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
    /// The payload is always shorter than `plain`, or else the answer is [`Codec::Raw`]: then the
    /// caller sends `plain` itself, and the contents of `out` mean nothing. With [`Codec::Raw`]
    /// set, `plain` is not even read; with any other codec a repeated word is found first.
    ///
    /// An `out` of at least [`Encoder::roomy`] bytes saves lz4 a copy of its payload.
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
        // One byte short of the plain bytes: a codec that would need them all gives up, and what it
        // writes is smaller by construction.
        let room = plain.len() - 1;
        let len = match codec {
            Codec::Raw | Codec::SameFilled => None,
            Codec::Lz4 => self.lz4.as_mut().and_then(|lz4| lz4.compress(plain, out)),
            // Stored blocks only, which are never smaller.
            Codec::Zlib if self.settings.level() == 0 => None,
            Codec::Zlib => self
                .deflate
                .as_mut()
                .and_then(|(_, deflate)| deflate.deflate_compress(plain, &mut out[..room]).ok()),
            Codec::DeflateQz => self
                .deflate
                .as_mut()
                .and_then(|(_, deflate)| qz::compress(deflate, plain, &mut out[..room])),
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

    /// As [`encode`](Self::encode), with `dictionary` if there is one, it is for compression, and
    /// this encoder was made for any ([`with_dictionaries`](Self::with_dictionaries)): whether it
    /// was used is the other part of the answer. Only for a page of 4096 bytes at most.
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

    /// Lets go of the dictionary that was used last.
    pub fn forget_dictionary(&mut self) {
        if let Some(context) = &mut self.with_dictionary {
            context.forget();
        }
    }

    /// The length of `out` with which no codec needs scratch for `plain_len` bytes.
    pub fn roomy(plain_len: usize) -> usize {
        get_maximum_output_size(plain_len)
    }
}

/// Which of the two compressors does `level`. For units of 512 KiB levels up to 3 take 0.5 to 1.3
/// MB, those from 4 to 12 2.6 to 5.8 MB; a context gives back what it has used less than a third of
/// for long.
fn zstd_number(level: i32) -> usize {
    usize::from(level > 3)
}

/// Tables for short and long inputs, since a table is cleared for each unit, and scratch.
struct Lz4 {
    small: CompressTable,
    large: CompressTable,
    /// lz4_flex wants room for the worst case before it starts. Made when it is first needed: pages
    /// never do, and a device has an encoder for each thread.
    scratch: Box<[u8]>,
}

impl Lz4 {
    fn new() -> Self {
        Self {
            small: CompressTable::small(),
            large: CompressTable::large(),
            scratch: Box::default(),
        }
    }

    /// Compresses into `out`, which is at least as long as `plain`; `None` if that is no gain.
    fn compress(&mut self, plain: &[u8], out: &mut [u8]) -> Option<usize> {
        // 16-bit positions; the library would silently turn a small table into a large one.
        let table =
            if plain.len() < usize::from(u16::MAX) { &mut self.small } else { &mut self.large };
        if out.len() >= get_maximum_output_size(plain.len()) {
            return compress_into_with_table(plain, out, table).ok();
        }
        if self.scratch.is_empty() {
            self.scratch = vec![0; get_maximum_output_size(MAX_PLAIN)].into_boxed_slice();
        }
        let len = compress_into_with_table(plain, &mut self.scratch, table).ok()?;
        let payload = self.scratch.get(..len).filter(|_| len < plain.len())?;
        out[..len].copy_from_slice(payload);
        Some(len)
    }
}

/// Below this no codec can gain: the shortest payload that any of them writes is longer.
const MIN_PLAIN: usize = 2;
