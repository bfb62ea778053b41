//! Contexts that compress and decompress with a dictionary.
#![expect(unsafe_code, reason = "zstd's contexts take and give pointers")]

use std::ptr::{self, NonNull};
use std::sync::Arc;

use zstd_sys as sys;

use super::{Dictionary, MAX_DICTIONARY_PLAIN};
use crate::fixed::{checked, Fixed};
use crate::SettingsError;

/// The result of compressing a page with a dictionary.
pub(crate) enum Compressed {
    /// The compressed length.
    Fits(usize),
    /// The result does not fit into the output buffer.
    NoGain,
    /// The page is too long, or the dictionary is for decompression only.
    Unfit,
}

/// A compression context for single pages with a dictionary, in memory of its own.
pub(crate) struct WithDictionary {
    pub(super) context: Fixed,
    /// The dictionary that `context` refers to.
    of: Option<Arc<Dictionary>>,
}

impl WithDictionary {
    /// Creates a context for dictionaries of `level`.
    pub(crate) fn new(level: i32) -> Result<Self, SettingsError> {
        Ok(Self { context: Fixed::new(level, Dictionary::context_memory(level))?, of: None })
    }

    /// Compresses at most a page into `out`.
    pub(crate) fn compress(
        &mut self,
        dictionary: &Arc<Dictionary>,
        plain: &[u8],
        out: &mut [u8],
    ) -> Compressed {
        if plain.len() > MAX_DICTIONARY_PLAIN || dictionary.for_encoder.is_null() {
            return Compressed::Unfit;
        }
        if !self.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, dictionary)) {
            self.clear_dictionary();
            // SAFETY: both are valid. A dictionary cannot change while a second `Arc` of it exists,
            // and `of` holds one until the context refers to another dictionary or to none.
            let refused = checked(unsafe {
                sys::ZSTD_CCtx_refCDict(self.context.as_ptr(), dictionary.for_encoder)
            });
            if refused.is_err() {
                return Compressed::Unfit;
            }
            self.of = Some(Arc::clone(dictionary));
        }
        let result = self.context.compress(plain, out);
        // SAFETY: takes and returns only numbers.
        match unsafe { sys::ZSTD_getErrorCode(result) } {
            sys::ZSTD_ErrorCode::ZSTD_error_no_error => Compressed::Fits(result),
            sys::ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall => Compressed::NoGain,
            _ => Compressed::Unfit,
        }
    }

    /// Clears the context's reference to a dictionary.
    pub(crate) fn clear_dictionary(&mut self) {
        // SAFETY: the context is valid; null means none.
        let refused = unsafe { sys::ZSTD_CCtx_refCDict(self.context.as_ptr(), ptr::null()) };
        // zstd refuses this only in the middle of a frame. `compress` leaves a frame unfinished
        // only on an error; the reset below ends it.
        if checked(refused).is_err() {
            let only = sys::ZSTD_ResetDirective::ZSTD_reset_session_only;
            // SAFETY: the context is valid.
            unsafe { sys::ZSTD_CCtx_reset(self.context.as_ptr(), only) };
            // SAFETY: as above.
            let refused = unsafe { sys::ZSTD_CCtx_refCDict(self.context.as_ptr(), ptr::null()) };
            assert!(checked(refused).is_ok(), "a context between frames takes no dictionary");
        }
        self.of = None;
    }
}

/// A decompression context, for frames with and without a dictionary.
pub(crate) struct Context(NonNull<sys::ZSTD_DCtx>);

// SAFETY: the context has no thread affinity.
unsafe impl Send for Context {}

impl Context {
    /// # Panics
    ///
    /// If there is no memory for the context.
    pub(crate) fn new() -> Self {
        // SAFETY: takes no arguments.
        let context = NonNull::new(unsafe { sys::ZSTD_createDCtx() }).expect("there is memory");
        let this = Self(context);
        let format = sys::ZSTD_dParameter::ZSTD_d_experimentalParam1;
        // SAFETY: the context was just created.
        checked(unsafe { sys::ZSTD_DCtx_setParameter(context.as_ptr(), format, 1) })
            .expect("a fresh context takes the format");
        this
    }

    /// Decompresses one payload into `out`, and returns its length.
    pub(crate) fn decompress(
        &mut self,
        dictionary: Option<&Dictionary>,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<usize, &'static str> {
        let context = self.0.as_ptr();
        let (to, room) = (out.as_mut_ptr().cast(), out.len());
        let (from, len) = (payload.as_ptr().cast(), payload.len());
        let Some(dictionary) = dictionary else {
            // SAFETY: the context is valid and ours alone; both buffers have the lengths given.
            return checked(unsafe { sys::ZSTD_decompressDCtx(context, to, room, from, len) });
        };
        if dictionary.is_empty() {
            return Err("there is no dictionary");
        }
        let of = dictionary.for_decoder;
        // SAFETY: as above; the dictionary is valid, and does not change while it is borrowed.
        checked(unsafe { sys::ZSTD_decompress_usingDDict(context, to, room, from, len, of) })
    }

    #[cfg(test)]
    pub(crate) fn sizeof(&self) -> usize {
        // SAFETY: the context is valid.
        unsafe { sys::ZSTD_sizeof_DCtx(self.0.as_ptr()) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is ours, and freed once.
        unsafe { sys::ZSTD_freeDCtx(self.0.as_ptr()) };
    }
}
