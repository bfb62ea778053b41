//! zstd dictionaries for single pages: digested once, shared by all threads, with no allocation
//! afterwards.
//!
//! ```text
//!  samples ──► train (another process) ──► bytes ──► Dictionary::digest, into memory that is there already
//!                                                        │ shared by Arc
//!          Encoder::encode_with ◄────────────────────────┴───────────────────► Decoder::decode_with
//! ```
//!
//! A dictionary's bytes may come from an untrusted process. [`Dictionary::digest`] refuses bytes
//! that are no dictionary, and with any accepted one a payload decodes within the bounds of its
//! output. The caller has to know that a payload was made with *this* dictionary: another one gives
//! other bytes without an error.
//!
//! zstd works in memory that the caller provides ("static" contexts). It never allocates, and
//! returns an error when it would have to.
#![expect(unsafe_code, reason = "zstd's static contexts, which the safe bindings leave out")]

pub(crate) mod contexts;

use std::ffi::c_int;
use std::fmt;
use std::ptr;

use zstd_sys as sys;

use crate::fixed::{Memory, SLACK};

/// The most plain bytes compressed with a dictionary: a page.
pub(crate) const MAX_DICTIONARY_PLAIN: usize = 4096;

/// The most bytes of a dictionary.
pub const MAX_DICTIONARY: usize = 16 << 10;

/// The magic number of a dictionary (RFC 8878, section 5).
const MAGIC: [u8; 4] = 0xec30_a437_u32.to_le_bytes();

/// Why bytes are no dictionary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DictionaryError {
    /// The bytes are too few, or more than [`MAX_DICTIONARY`].
    #[error("dictionary of {0} bytes, expected 256 to {MAX_DICTIONARY}")]
    Length(usize),
    /// The bytes begin with another number.
    #[error("not a dictionary: it begins with {0:02x?}")]
    Magic([u8; 4]),
    /// zstd cannot read the bytes.
    #[error("zstd cannot read the dictionary")]
    Unsound,
    /// The memory already holds a dictionary.
    #[error("there is a dictionary already")]
    Taken,
}

/// A dictionary in memory of its own, or that memory while it is empty.
pub struct Dictionary {
    /// The level for compression, and the memory for it; `None` for a dictionary that only
    /// decompresses.
    compress: Option<(c_int, Memory)>,
    decompress: Memory,
    /// Both pointers are null while the dictionary is empty. They point into the two memories.
    for_encoder: *const sys::ZSTD_CDict,
    for_decoder: *const sys::ZSTD_DDict,
    len: usize,
}

// SAFETY: the memory has no thread affinity. After `digest`, which has exclusive access, nothing
// writes it: any number of contexts may use zstd's digested dictionaries at once.
unsafe impl Send for Dictionary {}
// SAFETY: as above.
unsafe impl Sync for Dictionary {}

impl Dictionary {
    /// Allocates memory for a dictionary of at most [`MAX_DICTIONARY`] bytes: for decompression,
    /// and for compression if a `level` is given.
    pub fn room(level: Option<i32>) -> Self {
        Self {
            compress: level.map(|level| (level, Memory::new(encoder_memory(level)))),
            decompress: Memory::new(decoder_memory()),
            for_encoder: ptr::null(),
            for_decoder: ptr::null(),
            len: 0,
        }
    }

    /// Bytes that [`room`](Self::room) allocates.
    pub fn memory_for(level: Option<i32>) -> usize {
        let whole = |bytes: usize| bytes.next_multiple_of(8);
        whole(decoder_memory()) + level.map_or(0, |level| whole(encoder_memory(level)))
    }

    /// Additional bytes that an encoder made
    /// [`with_dictionaries`](crate::Encoder::with_dictionaries) of `level` needs.
    pub fn context_memory(level: i32) -> usize {
        // A context with a dictionary attached uses the dictionary's parameters, reduced to the
        // page.
        let params = params(level);
        // SAFETY: takes and returns only numbers.
        let params = unsafe { sys::ZSTD_adjustCParams(params, MAX_DICTIONARY_PLAIN as u64, 0) };
        // SAFETY: as above.
        let bytes = unsafe { sys::ZSTD_estimateCCtxSize_usingCParams(params) };
        (bytes + SLACK).next_multiple_of(8)
    }

    /// Reads a dictionary into the memory, which must be empty.
    ///
    /// # Errors
    ///
    /// [`DictionaryError`]; the memory then stays empty.
    pub fn digest(&mut self, bytes: &[u8]) -> Result<(), DictionaryError> {
        if !self.is_empty() {
            return Err(DictionaryError::Taken);
        }
        if !(256..=MAX_DICTIONARY).contains(&bytes.len()) {
            return Err(DictionaryError::Length(bytes.len()));
        }
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            return Err(DictionaryError::Magic(magic));
        }
        let (dict, len) = (bytes.as_ptr().cast(), bytes.len());
        let (to, room) = (self.decompress.start(), self.decompress.bytes());
        // SAFETY: `to` is aligned, has `room` bytes, is ours alone while we have `&mut self`, and
        // lives as long as the pointer; `dict` is copied.
        let for_decoder = unsafe { sys::ZSTD_initStaticDDict(to, room, dict, len, BY_COPY, FULL) };
        if for_decoder.is_null() {
            return Err(DictionaryError::Unsound);
        }
        let mut for_encoder = ptr::null();
        if let Some((level, memory)) = &self.compress {
            let (to, room) = (memory.start(), memory.bytes());
            let params = params(*level);
            // SAFETY: as above.
            for_encoder =
                unsafe { sys::ZSTD_initStaticCDict(to, room, dict, len, BY_COPY, FULL, params) };
            if for_encoder.is_null() {
                return Err(DictionaryError::Unsound);
            }
        }
        (self.for_encoder, self.for_decoder, self.len) = (for_encoder, for_decoder, len);
        Ok(())
    }

    /// Drops the dictionary, so that the memory can hold another one.
    pub fn clear(&mut self) {
        (self.for_encoder, self.for_decoder, self.len) = (ptr::null(), ptr::null(), 0);
    }

    /// Whether the memory holds no dictionary.
    pub fn is_empty(&self) -> bool {
        self.for_decoder.is_null()
    }

    /// Bytes of the dictionary; 0 while the memory is empty.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory allocated.
    pub fn memory(&self) -> usize {
        self.decompress.bytes() + self.compress.as_ref().map_or(0, |(_, memory)| memory.bytes())
    }
}

impl fmt::Debug for Dictionary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dictionary")
            .field("len", &self.len)
            .field("memory", &self.memory())
            .finish_non_exhaustive()
    }
}

/// Parameters of `level` for a dictionary of the largest size. For slightly smaller ones zstd's
/// tables are two to four times as large, without gain.
fn params(level: c_int) -> sys::ZSTD_compressionParameters {
    // SAFETY: takes and returns only numbers.
    let params = unsafe { sys::ZSTD_getCParams(level, 0, MAX_DICTIONARY) };
    // zstd's own default for an unknown source size is 513 bytes.
    //
    // SAFETY: as above.
    unsafe { sys::ZSTD_adjustCParams(params, 513, MAX_DICTIONARY) }
}

/// Bytes of a dictionary's tables for compression at `level`.
fn encoder_memory(level: c_int) -> usize {
    let params = params(level);
    // SAFETY: takes and returns only numbers.
    unsafe { sys::ZSTD_estimateCDictSize_advanced(MAX_DICTIONARY, params, BY_COPY) }
}

/// Bytes of a dictionary's tables for decompression.
fn decoder_memory() -> usize {
    // SAFETY: takes and returns only numbers.
    unsafe { sys::ZSTD_estimateDDictSize(MAX_DICTIONARY, BY_COPY) }
}

/// Trains a dictionary of at most `most` bytes from samples of `each` bytes. `None` if the samples
/// do not suffice.
///
/// Takes tens of MiB of memory and most of a second: do not call it in a process that must not wait
/// for memory.
pub fn train(samples: &[u8], each: usize, most: usize) -> Option<Vec<u8>> {
    let sizes = vec![each; samples.len() / each.max(1)];
    let mut dictionary = Vec::with_capacity(most.min(MAX_DICTIONARY));
    let samples = &samples[..sizes.len() * each];
    zstd_safe::train_from_buffer(&mut dictionary, samples, &sizes).ok()?;
    (dictionary.len() <= most).then_some(dictionary)
}

const BY_COPY: sys::ZSTD_dictLoadMethod_e = sys::ZSTD_dictLoadMethod_e::ZSTD_dlm_byCopy;
const FULL: sys::ZSTD_dictContentType_e = sys::ZSTD_dictContentType_e::ZSTD_dct_fullDict;

#[cfg(test)]
mod tests;
