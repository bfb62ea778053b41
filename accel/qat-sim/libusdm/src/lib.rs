//! libusdm.so.0 of the simulated QAT device: pinned memory.
//!
//! Besides Intel's functions it exports those by which the simulated libqat accesses that memory:
//! `platen_usdm_read`, `platen_usdm_write`, `platen_usdm_configure`, `platen_usdm_violations`. Its
//! settings come from the script in `PLATEN_QAT_SIM` at the first allocation, unless libqat has set
//! others before.

#![allow(non_snake_case, reason = "Intel's names")]
#![allow(unsafe_code, reason = "exports C functions")]

use qat_abi::{QaeMemAllocNuma, QaeMemFreeNuma, QaePhysToVirtNuma, QaeVirtToPhysNuma};
use qat_sim::script::{MemoryMode, Script, Settings};
use qat_sim::Usdm;
use std::ffi::{c_int, c_void};
use std::sync::LazyLock;

static USDM: LazyLock<Usdm> = LazyLock::new(|| {
    let usdm = Usdm::default();
    // libqat reports an invalid script, at its start.
    let script = qat_sim::script_from_environment().ok().flatten();
    let script = script.and_then(|text| Script::parse(&text).ok()).unwrap_or_default();
    let mut settings = Settings::default();
    script.apply(&mut settings);
    usdm.configure(settings.memory, settings.usdm_bytes);
    usdm
});

const _: QaeMemAllocNuma = qaeMemAllocNUMA;
const _: QaeMemFreeNuma = qaeMemFreeNUMA;
const _: QaeVirtToPhysNuma = qaeVirtToPhysNUMA;
const _: QaePhysToVirtNuma = qaePhysToVirtNUMA;

/// Pinned memory; the simulation has one NUMA node.
#[no_mangle]
pub extern "C" fn qaeMemAllocNUMA(size: usize, _node: c_int, align: usize) -> *mut c_void {
    USDM.allocate(size, align)
}

/// Frees, and sets the pointer to null.
///
/// # Safety
/// `pointer` is null or points to a pointer.
#[no_mangle]
pub unsafe extern "C" fn qaeMemFreeNUMA(pointer: *mut *mut c_void) {
    // SAFETY: the caller's promise.
    let Some(pointer) = (unsafe { pointer.as_mut() }) else { return };
    if !pointer.is_null() && !USDM.free(*pointer) {
        eprintln!("qat-sim: qaeMemFreeNUMA({:p}): no pinned memory begins there", *pointer);
    }
    *pointer = std::ptr::null_mut();
}

/// The IOVA of an address, 0 for one that is not pinned.
#[no_mangle]
pub extern "C" fn qaeVirtToPhysNUMA(address: *mut c_void) -> u64 {
    USDM.physical(address)
}

/// The address of an IOVA, null for one that is not mapped.
#[no_mangle]
pub extern "C" fn qaePhysToVirtNUMA(iova: u64) -> *mut c_void {
    USDM.address(iova)
}

/// A device read: 1 when all of it was mapped and read, otherwise 0.
///
/// # Safety
/// `into` takes `bytes` bytes.
#[no_mangle]
pub unsafe extern "C" fn platen_usdm_read(iova: u64, into: *mut u8, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(USDM.read(iova, unsafe { std::slice::from_raw_parts_mut(into, bytes) }))
}

/// A device write: 1 when all of it was mapped and written, otherwise 0.
///
/// # Safety
/// `from` has `bytes` bytes.
#[no_mangle]
pub unsafe extern "C" fn platen_usdm_write(iova: u64, from: *const u8, bytes: usize) -> c_int {
    // SAFETY: the caller's promise.
    c_int::from(USDM.write(iova, unsafe { std::slice::from_raw_parts(from, bytes) }))
}

/// Sets layout (1 for slabs) and limit (`u64::MAX` for none) of later allocations.
#[no_mangle]
pub extern "C" fn platen_usdm_configure(slab: c_int, limit: u64) {
    let mode = if slab == 0 { MemoryMode::Guard } else { MemoryMode::Slab };
    USDM.configure(mode, (limit != u64::MAX).then_some(limit));
}

/// Frees of addresses that were not allocated.
#[no_mangle]
pub extern "C" fn platen_usdm_violations() -> u64 {
    USDM.violations()
}
