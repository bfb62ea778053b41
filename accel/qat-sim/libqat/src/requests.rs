//! Requests: the functions that make sessions, compress and decompress, and name their statuses.

use crate::DEVICE;
use qat_abi::*;
use std::ffi::{c_char, c_void, CStr};

forward! {
    /// Bytes of metadata for a list.
    fn cpaDcBufferListGetMetaSize(
        instance: CpaInstanceHandle, buffers: u32, bytes: *mut u32
    ): CpaDcBufferListGetMetaSize = meta_size(instance, buffers, bytes);
    /// Bytes of a session.
    fn cpaDcGetSessionSize(
        instance: CpaInstanceHandle, setup: *mut CpaDcSessionSetupData, session: *mut u32,
        context: *mut u32
    ): CpaDcGetSessionSize = session_size(instance, setup, session, context);
    /// Makes a session.
    fn cpaDcInitSession(
        instance: CpaInstanceHandle, session: CpaDcSessionHandle, setup: *mut CpaDcSessionSetupData,
        _context: *mut CpaBufferList, callback: CpaDcCallbackFn
    ): CpaDcInitSession = init_session(instance, session, setup, callback);
    /// Removes a session.
    fn cpaDcRemoveSession(
        instance: CpaInstanceHandle, session: CpaDcSessionHandle
    ): CpaDcRemoveSession = remove_session(instance, session);
    /// The largest compressed size of `bytes` bytes.
    fn cpaDcDeflateCompressBound(
        _instance: CpaInstanceHandle, huffman: u32, bytes: u32, bound: *mut u32
    ): CpaDcDeflateCompressBound = deflate_bound(huffman, bytes, bound);
    /// Compresses.
    fn cpaDcCompressData2(
        instance: CpaInstanceHandle, session: CpaDcSessionHandle, source: *mut CpaBufferList,
        target: *mut CpaBufferList, operation: *mut CpaDcOpData, results: *mut CpaDcRqResults,
        tag: *mut c_void
    ): CpaDcCompressData2 = compress(instance, session, source, target, operation, results, tag);
    /// Decompresses.
    fn cpaDcDecompressData(
        instance: CpaInstanceHandle, session: CpaDcSessionHandle, source: *mut CpaBufferList,
        target: *mut CpaBufferList, results: *mut CpaDcRqResults, flush: u32, tag: *mut c_void
    ): CpaDcDecompressData = decompress(instance, session, source, target, results, flush, tag);
}

/// UNSUPPORTED: the simulated device has no LZ4.
#[no_mangle]
pub(crate) extern "C" fn cpaDcLZ4CompressBound(
    _instance: CpaInstanceHandle,
    _bytes: u32,
    _bound: *mut u32,
) -> CpaStatus {
    CPA_STATUS_UNSUPPORTED
}

/// UNSUPPORTED: the simulated device has no LZ4s.
#[no_mangle]
pub(crate) extern "C" fn cpaDcLZ4SCompressBound(
    _instance: CpaInstanceHandle,
    _bytes: u32,
    _bound: *mut u32,
) -> CpaStatus {
    CPA_STATUS_UNSUPPORTED
}

/// Compresses with verification and recovery, as the function without operation data does on Gen4.
///
/// # Safety
/// The pointers are null or valid until the callback.
#[no_mangle]
pub(crate) unsafe extern "C" fn cpaDcCompressData(
    instance: CpaInstanceHandle,
    session: CpaDcSessionHandle,
    source: *mut CpaBufferList,
    target: *mut CpaBufferList,
    results: *mut CpaDcRqResults,
    flush: u32,
    tag: *mut c_void,
) -> CpaStatus {
    let mut operation = CpaDcOpData {
        flushFlag: flush,
        compressAndVerify: CPA_TRUE,
        compressAndVerifyAndRecover: CPA_TRUE,
        integrityCrcCheck: CPA_FALSE,
        verifyHwIntegrityCrcs: CPA_FALSE,
        integrityCrcSize: 0,
        inputSkipData: CpaDcSkipData::default(),
        outputSkipData: CpaDcSkipData::default(),
        pCrcData: std::ptr::null_mut(),
    };
    // SAFETY: the caller's promise; the operation is read before the call returns.
    unsafe { DEVICE.compress(instance, session, source, target, &raw mut operation, results, tag) }
}

/// Decompresses; uses only the flush flag of the operation.
///
/// # Safety
/// The pointers are null or valid until the callback.
#[no_mangle]
pub(crate) unsafe extern "C" fn cpaDcDecompressData2(
    instance: CpaInstanceHandle,
    session: CpaDcSessionHandle,
    source: *mut CpaBufferList,
    target: *mut CpaBufferList,
    operation: *mut CpaDcOpData,
    results: *mut CpaDcRqResults,
    tag: *mut c_void,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    let Some(flush) = (unsafe { operation.as_ref() }).map(|operation| operation.flushFlag) else {
        return CPA_STATUS_INVALID_PARAM;
    };
    // SAFETY: the caller's promise.
    unsafe { DEVICE.decompress(instance, session, source, target, results, flush, tag) }
}

/// The name of a status.
///
/// # Safety
/// `text` is null or takes 256 bytes, the size that Intel's header states.
#[no_mangle]
pub(crate) unsafe extern "C" fn cpaDcGetStatusText(
    _instance: CpaInstanceHandle,
    status: CpaStatus,
    text: *mut c_char,
) -> CpaStatus {
    let name: &CStr = match status {
        CPA_STATUS_SUCCESS => c"success",
        CPA_STATUS_FAIL => c"fail",
        CPA_STATUS_RETRY => c"retry",
        CPA_STATUS_RESOURCE => c"out of resources",
        CPA_STATUS_INVALID_PARAM => c"invalid parameter",
        CPA_STATUS_FATAL => c"fatal error",
        CPA_STATUS_UNSUPPORTED => c"not supported",
        CPA_STATUS_RESTARTING => c"restarting",
        _ => return CPA_STATUS_INVALID_PARAM,
    };
    if text.is_null() {
        return CPA_STATUS_INVALID_PARAM;
    }
    let bytes = name.to_bytes_with_nul();
    // SAFETY: the caller's promise; the names are shorter.
    unsafe { text.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    CPA_STATUS_SUCCESS
}

// Checks each function against the type by which the driver calls it.
const _: CpaDcLz4CompressBound = cpaDcLZ4CompressBound;
const _: CpaDcLz4CompressBound = cpaDcLZ4SCompressBound;
