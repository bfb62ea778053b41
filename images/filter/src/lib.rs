//! Streams of zstd and gzip, compressed and decompressed on all threads.
//!
//! libvirt pipes a VM's memory through one process when it saves the VM (`save_image_format`), and
//! through another one when it restores it. The usual programs use one thread each.
//!
//! ```text
//!  input ─► unit of plain bytes ─► worker ─► a whole frame ─► in order ─► output   compress
//!  input ─► a whole frame ─► worker ─► plain bytes, checksum ─► in order ─► output decompress
//! ```
//!
//! A compressed stream is a sequence of standard frames: zstd frames (RFC 8878) with their content
//! size and a checksum, or gzip members (RFC 1952) that state their length in an extra field. Any
//! zstd or gzip reads them. [`decompress()`] reads any stream of the format. It decodes frames in
//! parallel if they are short and state their content size, and others one after the other.
//!
//! # What fails
//!
//! [`FilterError`] names the format, the number of the frame and its offset. The output then ends
//! before the damaged frame: a frame of up to 16 MiB of plain bytes is written once its checksum is
//! verified. Of a longer one, which platen does not write, bytes are written as they are decoded.
//!
//! # Limits
//!
//! Memory: some 5 units and frames for each thread. A frame decoded by itself needs its window, at
//! most 128 MiB.

mod compress;
mod decompress;
mod error;
mod gzip;
mod member;
mod ordered;
mod source;
mod zstd;

pub use compress::{compress, Options};
pub use decompress::decompress;
pub use error::FilterError;

/// The format of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// zstd frames.
    Zstd,
    /// gzip members.
    Gzip,
}

impl Format {
    /// The name of the usual program, and of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zstd => "zstd",
            Self::Gzip => "gzip",
        }
    }
}

/// Bytes of a whole stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Frames, of either side.
    pub frames: u64,
    /// The frames among them that a worker has decoded; all of a stream that is compressed.
    pub parallel: u64,
}
