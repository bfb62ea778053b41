//! Options of the commands that write an image.

use clap::Args;
use codec::{Codec, Settings};
use image::Options;

/// How the units of an image are compressed.
#[derive(Args, Debug)]
pub(crate) struct CompressionArgs {
    /// Codec: none, lz4, zlib, zstd or qatzip
    #[arg(long, default_value = "zstd")]
    codec: Codec,
    /// Compression level: zlib 0 to 9, zstd -5 to 19, qatzip 1 to 9 [default: 1]
    #[arg(long, allow_negative_numbers = true)]
    level: Option<i32>,
    /// Number of compression threads, 1 to 255 [default: the number of CPUs, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=255))]
    compress_threads: Option<u16>,
}

impl CompressionArgs {
    /// The options for an image's writer.
    pub(crate) fn options(&self) -> anyhow::Result<Options> {
        let default = Options::default();
        let settings = Settings::new(self.codec, self.level)?;
        let threads = self.compress_threads.map_or(default.threads, usize::from);
        Ok(Options { settings, threads, ..default })
    }
}
