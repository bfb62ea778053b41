//! Options of the commands that write an image.

use crate::args::CodecChoice;
use crate::qat_args::{Accelerator, QatLibraries, SourceAccelerator};
use crate::qat_command;
use anyhow::ensure;
use clap::Args;
use codec::Codec;
use image::Options;

/// How the units of an image are compressed.
#[derive(Args, Debug)]
pub(crate) struct CompressionArgs {
    /// Codec: none, lz4, zlib, zstd, qatzip or auto. auto is zstd with the highest level, 1 to 9,
    /// with which the compression threads keep up with QEMU and the disk
    #[arg(long, default_value = "zstd")]
    codec: CodecChoice,
    /// Compression level: zlib 0 to 9, zstd -5 to 19, lz4 -63 to 1, qatzip 1 to 9 [default: 1]
    #[arg(long, allow_negative_numbers = true)]
    level: Option<i32>,
    /// Compressor for codec qatzip
    #[arg(long, value_enum, default_value = "auto")]
    accelerator: Accelerator,
    #[command(flatten)]
    qat: QatLibraries,
    /// Number of compression threads, 1 to 255 [default: the number of CPUs, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=255))]
    compress_threads: Option<u16>,
}

impl CompressionArgs {
    /// The options for an image's writer.
    pub(crate) fn options(&self) -> anyhow::Result<Options> {
        let default = Options::default();
        let named = self.codec.settings(self.level)?;
        let settings = named.unwrap_or(default.settings);
        ensure!(
            !settings.is_qpl(),
            "codec qpl is for migrations: an image has its deflate by zlib"
        );
        ensure!(
            self.accelerator != Accelerator::Qat || settings.codec() == Codec::DeflateQz,
            "--accelerator qat goes with --codec qatzip, not with {}",
            self.codec
        );
        let wanted = match self.accelerator {
            Accelerator::Auto => SourceAccelerator::Auto,
            Accelerator::Qat => SourceAccelerator::Qat,
            Accelerator::None => SourceAccelerator::None,
        };
        let device = qat_command::accelerator(wanted, &self.qat, Some(settings))?;
        let threads = self.compress_threads.map_or(default.threads, usize::from);
        Ok(Options { settings, adapt: named.is_none(), device, threads, ..default })
    }
}
