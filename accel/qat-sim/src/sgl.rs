//! Buffer lists: libqat's checks, and the device's form of a list in its metadata.
//!
//! As in libqat, an address is translated once a flat buffer and once for the metadata, and the
//! list of bus addresses is written into the metadata, where the device reads it. Unlike libqat,
//! this also checks that the end of the metadata is pinned: metadata that is too small is refused
//! instead of overrun.

#![expect(unsafe_code, reason = "reads the caller's buffer lists, writes their metadata")]

use crate::script::Direction;
use qat_abi::*;
use std::ffi::c_void;

/// The caller's `CpaVirtualToPhysical`.
pub(crate) type Translation = unsafe extern "C" fn(*mut c_void) -> CpaPhysicalAddr;

/// Bytes of a list's header in the metadata, and of one entry.
pub(crate) const HEADER: usize = 16;
pub(crate) const ENTRY: usize = 16;
/// The most flat buffers of a list.
pub(crate) const MAX_FLATS: usize = 1 << 16;
/// The most bytes of a list: more than any request has, and few enough to copy.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// `cpaDcBufferListGetMetaSize`: with room for alignment, like the real one.
pub(crate) fn meta_bytes(flats: u32) -> Option<u32> {
    flats.checked_mul(16)?.checked_add(16 + 64)
}

/// A call of `cpaDcCompressData2` or `cpaDcDecompressData`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) direction: Direction,
    pub(crate) session: CpaDcSessionHandle,
    pub(crate) source: *mut CpaBufferList,
    pub(crate) target: *mut CpaBufferList,
    pub(crate) results: *mut CpaDcRqResults,
    pub(crate) flush: u32,
    pub(crate) recover: bool,
    pub(crate) tag: *mut c_void,
}

/// The lengths of both lists.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lists {
    source: u64,
    target: u64,
}

/// Checks everything that does not depend on the session.
///
/// # Safety
/// The pointers in `call` are null or valid.
pub(crate) unsafe fn check(call: &Call) -> Result<Lists, CpaStatus> {
    if call.session.is_null() || call.results.is_null() || call.flush > CPA_DC_FLUSH_FULL {
        return Err(CPA_STATUS_INVALID_PARAM);
    }
    if call.source.is_null() || call.target.is_null() || call.source == call.target {
        return Err(CPA_STATUS_INVALID_PARAM);
    }
    // SAFETY: the caller's promise.
    let source = unsafe { length(call.source) }?;
    // SAFETY: the caller's promise.
    let target = unsafe { length(call.target) }?;
    if source == 0 || target == 0 {
        return Err(CPA_STATUS_INVALID_PARAM);
    }
    Ok(Lists { source, target })
}

/// The session's objection to the request, if any.
pub(crate) fn against(
    setup: &CpaDcSessionSetupData,
    call: &Call,
    lists: &Lists,
) -> Option<CpaStatus> {
    if setup.sessState != CPA_DC_STATELESS {
        return Some(CPA_STATUS_UNSUPPORTED);
    }
    let wrong = match call.direction {
        Direction::Compress => CPA_DC_DIR_DECOMPRESS,
        Direction::Decompress => CPA_DC_DIR_COMPRESS,
    };
    let least = match (call.direction, setup.huffType) {
        (Direction::Decompress, _) => 1,
        (Direction::Compress, CPA_DC_HT_STATIC) => MIN_DEST_STATIC as u64,
        (Direction::Compress, _) => MIN_DEST_DYNAMIC as u64,
    };
    // A stateless request has all of its data: it ends FULL or FINAL.
    let unfinished = call.direction == Direction::Compress
        && !matches!(call.flush, CPA_DC_FLUSH_FULL | CPA_DC_FLUSH_FINAL);
    let bad = setup.sessDirection == wrong
        || lists.target < least
        || lists.source.max(lists.target) > MAX_BYTES
        || unfinished;
    bad.then_some(CPA_STATUS_INVALID_PARAM)
}

/// Writes both lists into their metadata; returns the metadata's bus addresses.
///
/// # Safety
/// `check` has passed `call`.
pub(crate) unsafe fn translate(
    call: &Call,
    translation: Translation,
) -> Result<(u64, u64), CpaStatus> {
    // SAFETY: the caller's promise.
    let source = unsafe { describe(call.source, translation) }?;
    // SAFETY: the caller's promise.
    let target = unsafe { describe(call.target, translation) }?;
    Ok((source, target))
}

/// # Safety
/// `list` is valid.
unsafe fn length(list: *const CpaBufferList) -> Result<u64, CpaStatus> {
    // SAFETY: the caller's promise.
    let CpaBufferList { numBuffers, pBuffers, pPrivateMetaData, .. } = unsafe { list.read() };
    let flats = numBuffers as usize;
    if flats == 0 || flats > MAX_FLATS || pBuffers.is_null() || pPrivateMetaData.is_null() {
        return Err(CPA_STATUS_INVALID_PARAM);
    }
    let mut bytes = 0;
    for index in 0..flats {
        // SAFETY: the list has that many entries.
        let flat = unsafe { pBuffers.add(index) };
        // SAFETY: as above.
        let CpaFlatBuffer { dataLenInBytes, pData } = unsafe { flat.read() };
        if pData.is_null() {
            return Err(CPA_STATUS_INVALID_PARAM);
        }
        bytes += u64::from(dataLenInBytes);
    }
    Ok(bytes)
}

/// # Safety
/// `length` has passed `list`.
unsafe fn describe(list: *const CpaBufferList, translation: Translation) -> Result<u64, CpaStatus> {
    // SAFETY: the caller's promise.
    let CpaBufferList { numBuffers, pBuffers, pPrivateMetaData, .. } = unsafe { list.read() };
    let flats = numBuffers as usize;
    let meta = pPrivateMetaData.cast::<u8>();
    let bytes = HEADER + flats * ENTRY;
    // SAFETY: the caller's own function, which takes any address.
    let physical = unsafe { translation(pPrivateMetaData) };
    // SAFETY: as above.
    let end = unsafe { translation(meta.wrapping_add(bytes - 1).cast()) };
    if physical == 0 || end != physical + (bytes as u64 - 1) {
        return Err(CPA_STATUS_FAIL);
    }
    // SAFETY: the metadata is pinned memory from its first byte to its last.
    unsafe { meta.cast::<[u32; 4]>().write_unaligned([numBuffers, 0, 0, 0]) };
    for index in 0..flats {
        // SAFETY: the list has that many entries.
        let flat = unsafe { pBuffers.add(index) };
        // SAFETY: as above.
        let CpaFlatBuffer { dataLenInBytes, pData } = unsafe { flat.read() };
        // SAFETY: the caller's own function, which takes any address.
        let address = unsafe { translation(pData.cast()) };
        if address == 0 {
            return Err(CPA_STATUS_FAIL);
        }
        let entry = meta.wrapping_add(HEADER + index * ENTRY).cast::<[u64; 2]>();
        // SAFETY: within the metadata.
        unsafe { entry.write_unaligned([dataLenInBytes.into(), address]) };
    }
    Ok(physical)
}

/// Checks that the device can use an intermediate buffer.
///
/// # Safety
/// `list` is null or valid.
pub(crate) unsafe fn pinned(
    list: *const CpaBufferList,
    translation: Translation,
) -> Result<(), CpaStatus> {
    if list.is_null() {
        return Err(CPA_STATUS_INVALID_PARAM);
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { length(list) }?;
    // SAFETY: `length` has passed it.
    unsafe { describe(list, translation) }.map(|_| ())
}
