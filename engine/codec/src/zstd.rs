//! Contexts of zstd, set up for units: no magic number, no content size, no checksum, no
//! dictionary id, since the unit header says all of it.

use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat, ResetDirective};

use crate::{Codec, SettingsError};

/// A compression context at one level at a time.
pub(crate) struct Compressor {
    context: CCtx<'static>,
}

impl Compressor {
    pub(crate) fn new(level: i32) -> Result<Self, SettingsError> {
        let context = CCtx::try_create().ok_or(SettingsError::Context {
            codec: Codec::Zstd,
            level,
            reason: "out of memory",
        })?;
        let mut this = Self { context };
        this.set_level(level)?;
        Ok(this)
    }

    pub(crate) fn set_level(&mut self, level: i32) -> Result<(), SettingsError> {
        let failed = |code| SettingsError::Context {
            codec: Codec::Zstd,
            level,
            reason: zstd_safe::get_error_name(code),
        };
        self.context.reset(ResetDirective::SessionAndParameters).map_err(failed)?;
        for parameter in [
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
            CParameter::CompressionLevel(level),
        ] {
            self.context.set_parameter(parameter).map_err(failed)?;
        }
        Ok(())
    }

    /// Compresses into `out`; `None` if it does not fit there.
    pub(crate) fn compress(&mut self, plain: &[u8], out: &mut [u8]) -> Option<usize> {
        self.context.compress2(out, plain).ok()
    }
}

/// A decompression context.
pub(crate) struct Decompressor {
    context: DCtx<'static>,
}

impl Decompressor {
    pub(crate) fn new() -> Self {
        let mut context = DCtx::create();
        context
            .set_parameter(DParameter::Format(FrameFormat::Magicless))
            .expect("a fresh context takes the format");
        Self { context }
    }

    /// Decompresses into `out` and returns how many bytes it wrote there. The window is `out`
    /// itself: nothing is allocated whatever window the frame asks for.
    pub(crate) fn decompress(
        &mut self,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<usize, &'static str> {
        self.context.decompress(out, payload).map_err(zstd_safe::get_error_name)
    }
}
