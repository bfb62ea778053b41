//! Compression and decompression in software: libdeflate, with contexts and an output buffer
//! allocated once.

use crate::piece::BadData;
use libdeflater::{CompressionLvl, Compressor, Decompressor};

/// Contexts and output buffer of one engine.
pub(crate) struct Software {
    compressor: Compressor,
    decompressor: Decompressor,
    /// Room for the largest output of either direction.
    output: Box<[u8]>,
}

impl std::fmt::Debug for Software {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Software").field("output", &self.output.len()).finish_non_exhaustive()
    }
}

impl Software {
    /// Allocates for `level` 1 to 12 and pieces of at most `max_plain` bytes.
    pub(crate) fn new(level: u32, max_plain: usize) -> Self {
        let level = i32::try_from(level).ok().and_then(|level| CompressionLvl::new(level).ok());
        let mut compressor = Compressor::new(level.unwrap_or_default());
        let room = compressor.deflate_compress_bound(max_plain).max(max_plain);
        Self { compressor, decompressor: Decompressor::new(), output: vec![0; room].into() }
    }

    /// Makes a raw deflate stream of `plain`, which has at most `max_plain` bytes.
    pub(crate) fn compress(&mut self, plain: &[u8]) -> &[u8] {
        let len = self
            .compressor
            .deflate_compress(plain, &mut self.output)
            .expect("the output has the size that libdeflate asks for");
        &self.output[..len]
    }

    /// Decodes the raw deflate stream `data` to its `plain_len` bytes.
    ///
    /// Ignores bytes after the final block, as the device does.
    pub(crate) fn decompress(&mut self, data: &[u8], plain_len: usize) -> Result<&[u8], BadData> {
        let bad = BadData { len: data.len(), plain_len };
        // The length may come from a peer: above the limit it is refused.
        let output = self.output.get_mut(..plain_len).ok_or(bad)?;
        match self.decompressor.deflate_decompress(data, output) {
            Ok(len) if len == plain_len => Ok(output),
            _ => Err(bad),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_length_up_to_the_limit_comes_back_and_more_is_refused() {
        let mut software = Software::new(1, 4096);
        let noise: Vec<u8> =
            (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in [0, 1, 511, 4096] {
            let packed = software.compress(&noise[..len]).to_vec();
            assert_eq!(software.decompress(&packed, len).unwrap(), &noise[..len]);
            if len > 0 {
                assert!(software.decompress(&packed, len - 1).is_err());
                assert!(software.decompress(&packed[..packed.len() - 1], len).is_err());
            }
            assert!(software.decompress(&packed, len + 1).is_err());
        }
        let packed = software.compress(&noise).to_vec();
        assert_eq!(
            software.decompress(&packed, 1 << 20),
            Err(BadData { len: packed.len(), plain_len: 1 << 20 })
        );
    }
}
