//! Names of the codecs that pages can have.

use codec::Codec;

/// The codec of this name, if pages can have it.
pub(super) fn page_codec(text: &str) -> Result<Codec, String> {
    match text.parse() {
        Ok(codec) => Ok(codec),
        _ => Err(format!("'{text}' is none of none, lz4, zlib, zstd, qatzip")),
    }
}
