//! Names of the page codecs.

use codec::Codec;

/// Parses the name of a page codec.
pub(super) fn page_codec(text: &str) -> Result<Codec, String> {
    match text.parse() {
        Ok(codec) => Ok(codec),
        _ => Err(format!("'{text}' is none of none, lz4, zlib, zstd, qatzip")),
    }
}
