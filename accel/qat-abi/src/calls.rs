//! Function types of `libqat.so.4` and `libusdm.so.0`, one per exported function that platen or
//! QATzip uses.

use crate::layout::{
    CpaBufferList, CpaDcCallbackFn, CpaDcInstanceCapabilities, CpaDcOpData, CpaDcRqResults,
    CpaDcSessionSetupData, CpaInstanceInfo2,
};
use crate::{CpaBoolean, CpaDcSessionHandle, CpaInstanceHandle, CpaPhysicalAddr, CpaStatus};
use std::ffi::{c_char, c_int, c_void};

/// `CpaVirtualToPhysical`: 0 means that the address is not for the device.
pub type CpaVirtualToPhysical =
    Option<unsafe extern "C" fn(address: *mut c_void) -> CpaPhysicalAddr>;
/// `CpaDcInstanceNotificationCbFunc`: called from `icp_sal_poll_device_events` with a
/// `CpaInstanceEvent`.
pub type CpaDcInstanceNotificationCbFunc =
    Option<unsafe extern "C" fn(instance: CpaInstanceHandle, tag: *mut c_void, event: u32)>;

/// `icp_sal_userIsQatAvailable`.
pub type IcpSalUserIsQatAvailable = unsafe extern "C" fn() -> CpaBoolean;
/// `icp_sal_userStartMultiProcess(process name, limit device access)`.
pub type IcpSalUserStartMultiProcess = unsafe extern "C" fn(*const c_char, CpaBoolean) -> CpaStatus;
/// `icp_sal_userStop`.
pub type IcpSalUserStop = unsafe extern "C" fn() -> CpaStatus;
/// `icp_sal_poll_device_events`: delivers events to the notification callbacks.
pub type IcpSalPollDeviceEvents = unsafe extern "C" fn() -> CpaStatus;
/// `icp_sal_DcPollInstance(instance, quota)`: runs callbacks; quota 0 for all; RETRY when nothing
/// was there.
pub type IcpSalDcPollInstance = unsafe extern "C" fn(CpaInstanceHandle, u32) -> CpaStatus;
/// `icp_sal_DcGetFileDescriptor(instance, fd)`: optional, for event-driven completion.
pub type IcpSalDcGetFileDescriptor =
    unsafe extern "C" fn(CpaInstanceHandle, *mut c_int) -> CpaStatus;

/// `cpaDcGetNumInstances`.
pub type CpaDcGetNumInstances = unsafe extern "C" fn(*mut u16) -> CpaStatus;
/// `cpaDcGetInstances`.
pub type CpaDcGetInstances = unsafe extern "C" fn(u16, *mut CpaInstanceHandle) -> CpaStatus;
/// `cpaDcInstanceGetInfo2`.
pub type CpaDcInstanceGetInfo2 =
    unsafe extern "C" fn(CpaInstanceHandle, *mut CpaInstanceInfo2) -> CpaStatus;
/// `cpaDcQueryCapabilities`.
pub type CpaDcQueryCapabilities =
    unsafe extern "C" fn(CpaInstanceHandle, *mut CpaDcInstanceCapabilities) -> CpaStatus;
/// `cpaDcInstanceSetNotificationCb`.
pub type CpaDcInstanceSetNotificationCb = unsafe extern "C" fn(
    CpaInstanceHandle,
    CpaDcInstanceNotificationCbFunc,
    *mut c_void,
) -> CpaStatus;
/// `cpaDcSetAddressTranslation`.
pub type CpaDcSetAddressTranslation =
    unsafe extern "C" fn(CpaInstanceHandle, CpaVirtualToPhysical) -> CpaStatus;
/// `cpaDcGetNumIntermediateBuffers`.
pub type CpaDcGetNumIntermediateBuffers =
    unsafe extern "C" fn(CpaInstanceHandle, *mut u16) -> CpaStatus;
/// `cpaDcStartInstance(instance, buffers, intermediate buffers)`.
pub type CpaDcStartInstance =
    unsafe extern "C" fn(CpaInstanceHandle, u16, *mut *mut CpaBufferList) -> CpaStatus;
/// `cpaDcStopInstance`.
pub type CpaDcStopInstance = unsafe extern "C" fn(CpaInstanceHandle) -> CpaStatus;
/// `cpaDcBufferListGetMetaSize(instance, buffers in the list, bytes)`.
pub type CpaDcBufferListGetMetaSize =
    unsafe extern "C" fn(CpaInstanceHandle, u32, *mut u32) -> CpaStatus;
/// `cpaDcGetSessionSize(instance, setup, session bytes, context bytes)`.
pub type CpaDcGetSessionSize = unsafe extern "C" fn(
    CpaInstanceHandle,
    *mut CpaDcSessionSetupData,
    *mut u32,
    *mut u32,
) -> CpaStatus;
/// `cpaDcInitSession(instance, session, setup, context, callback)`.
pub type CpaDcInitSession = unsafe extern "C" fn(
    CpaInstanceHandle,
    CpaDcSessionHandle,
    *mut CpaDcSessionSetupData,
    *mut CpaBufferList,
    CpaDcCallbackFn,
) -> CpaStatus;
/// `cpaDcRemoveSession`: RETRY while requests are pending.
pub type CpaDcRemoveSession =
    unsafe extern "C" fn(CpaInstanceHandle, CpaDcSessionHandle) -> CpaStatus;
/// `cpaDcDeflateCompressBound(instance, huffman, input bytes, bound)`. QATzip passes a null
/// instance.
pub type CpaDcDeflateCompressBound =
    unsafe extern "C" fn(CpaInstanceHandle, u32, u32, *mut u32) -> CpaStatus;
/// `cpaDcLZ4CompressBound` and `cpaDcLZ4SCompressBound`.
pub type CpaDcLz4CompressBound =
    unsafe extern "C" fn(CpaInstanceHandle, u32, *mut u32) -> CpaStatus;
/// `cpaDcCompressData2(instance, session, source, destination, operation, results, tag)`.
pub type CpaDcCompressData2 = unsafe extern "C" fn(
    CpaInstanceHandle,
    CpaDcSessionHandle,
    *mut CpaBufferList,
    *mut CpaBufferList,
    *mut CpaDcOpData,
    *mut CpaDcRqResults,
    *mut c_void,
) -> CpaStatus;
/// `cpaDcDecompressData(instance, session, source, destination, results, flush, tag)`.
pub type CpaDcDecompressData = unsafe extern "C" fn(
    CpaInstanceHandle,
    CpaDcSessionHandle,
    *mut CpaBufferList,
    *mut CpaBufferList,
    *mut CpaDcRqResults,
    u32,
    *mut c_void,
) -> CpaStatus;

/// `qaeMemAllocNUMA(bytes, node, alignment)`: at most 64 MiB, alignment a power of two up to 4 MiB;
/// null when exhausted.
pub type QaeMemAllocNuma = unsafe extern "C" fn(usize, c_int, usize) -> *mut c_void;
/// `qaeMemFreeNUMA(pointer to the pointer)`, which it sets to null.
pub type QaeMemFreeNuma = unsafe extern "C" fn(*mut *mut c_void);
/// `qaeVirtToPhysNUMA`: 0 for memory it does not know.
pub type QaeVirtToPhysNuma = unsafe extern "C" fn(*mut c_void) -> u64;
/// `qaePhysToVirtNUMA`: null for an address it does not know.
pub type QaePhysToVirtNuma = unsafe extern "C" fn(u64) -> *mut c_void;
/// `qaeMemMapContiguousIova(address, bytes)` of 26.02 and later: maps the caller's own pages for
/// the device; 0 is success.
pub type QaeMemMapContiguousIova = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
