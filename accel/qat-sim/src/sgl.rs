//! Buffer lists: the checks of libqat on the way in, the device's form of them in the metadata.
//!
//! As in libqat, an address is translated once per flat buffer and once for the metadata, and the
//! list of bus addresses is written into the metadata, where the device reads it. Unlike libqat,
//! the simulated one also asks whether the metadata's end is pinned: metadata that is too small is
//! refused instead of overrun.

#![expect(unsafe_code, reason = "reads the caller's buffer lists, writes their metadata")]

use crate::script::Direction;
use qat_abi::*;
use std::ffi::c_void;

/// The caller's `CpaVirtualToPhysical`, present.
pub(crate) type Translation = unsafe extern "C" fn(*mut c_void) -> CpaPhysicalAddr;

/// The bytes before the entries, and of one entry, of a list in metadata.
pub(crate) const HEADER: usize = 16;
pub(crate) const ENTRY: usize = 16;
/// Flat buffers in one list, at most.
pub(crate) const MAX_FLATS: usize = 1 << 16;
/// Bytes in one list, at most: more than a request ever has, little enough to copy.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// `cpaDcBufferListGetMetaSize`: with room to align, as the real one has it.
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

/// Looks at what can be seen without a session.
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

/// What the session has against the request.
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
    // A stateless request is the whole of its data: it ends FULL or FINAL.
    let unfinished = call.direction == Direction::Compress
        && !matches!(call.flush, CPA_DC_FLUSH_FULL | CPA_DC_FLUSH_FINAL);
    let bad = setup.sessDirection == wrong
        || lists.target < least
        || lists.source.max(lists.target) > MAX_BYTES
        || unfinished;
    bad.then_some(CPA_STATUS_INVALID_PARAM)
}

/// Writes both lists into their metadata; the metadata's bus addresses.
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

/// Looks whether an intermediate buffer is one that the device can use.
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
