//! libqat.so.4 of the simulated QAT device: Intel's C functions, and two for tests.
//!
//! The script comes from `PLATEN_QAT_SIM` (directives, or a file of them) and from
//! `platen_qat_sim_control`. Counters go to `platen_qat_sim_counters` and, as JSON, to the file in
//! `PLATEN_QAT_SIM_REPORT` when the library is stopped and when the process ends. Nothing is
//! written to stdout, because qzip streams its data there.

#![allow(non_snake_case, reason = "Intel's names")]
#![allow(unsafe_code, reason = "exports C functions")]

use qat_abi::*;
use qat_sim::script::{MemoryMode, Settings};
use qat_sim::{Counters, Device, Dma};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::LazyLock;

extern "C" {
    fn platen_usdm_read(iova: u64, into: *mut u8, bytes: usize) -> c_int;
    fn platen_usdm_write(iova: u64, from: *const u8, bytes: usize) -> c_int;
    fn platen_usdm_configure(slab: c_int, limit: u64);
    fn platen_usdm_violations() -> u64;
}

/// Pinned memory, in the other library.
struct Usdm;

impl Dma for Usdm {
    fn read(&self, iova: u64, into: &mut [u8]) -> bool {
        // SAFETY: a slice is valid for its length.
        unsafe { platen_usdm_read(iova, into.as_mut_ptr(), into.len()) != 0 }
    }

    fn write(&self, iova: u64, from: &[u8]) -> bool {
        // SAFETY: a slice is valid for its length.
        unsafe { platen_usdm_write(iova, from.as_ptr(), from.len()) != 0 }
    }

    fn configure(&self, settings: &Settings) {
        let slab = c_int::from(settings.memory == MemoryMode::Slab);
        // SAFETY: two numbers.
        unsafe { platen_usdm_configure(slab, settings.usdm_bytes.unwrap_or(u64::MAX)) };
    }

    fn violations(&self) -> u64 {
        // SAFETY: no arguments.
        unsafe { platen_usdm_violations() }
    }
}

/// The environment's script is invalid: then there is no device, so that a typing error cannot pass
/// for a good run.
static BROKEN: AtomicBool = AtomicBool::new(false);

static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let device = Device::new(&Usdm);
    let script = qat_sim::script_from_environment();
    let applied = script.and_then(|text| text.map_or(Ok(()), |text| device.control(&text)));
    if let Err(problem) = applied {
        eprintln!("qat-sim: PLATEN_QAT_SIM: {problem}");
        BROKEN.store(true, Ordering::Relaxed);
    }
    device
});

/// Writes the report, if one is requested.
extern "C" fn report() {
    // Also in a process that never used the device: the report's reader may want the zeros.
    let Some(path) = std::env::var_os("PLATEN_QAT_SIM_REPORT") else { return };
    if let Err(error) = std::fs::write(&path, DEVICE.counters().to_json()) {
        eprintln!("qat-sim: PLATEN_QAT_SIM_REPORT={}: {error}", path.display());
    }
}

/// Runs at `exit`, after libqatzip's own destructor, which depends on this library.
#[used]
#[link_section = ".fini_array"]
static AT_EXIT: extern "C" fn() = report;

/// Sets a script: returns 0, or -1 with a line on stderr. Its faults replace all earlier ones;
/// set-up lines need a stopped library.
///
/// # Safety
/// `script` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn platen_qat_sim_control(script: *const c_char) -> c_int {
    if script.is_null() {
        return -1;
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(script) }.to_string_lossy();
    match DEVICE.control(&text) {
        Ok(()) => {
            BROKEN.store(false, Ordering::Relaxed);
            0
        }
        Err(problem) => {
            eprintln!("qat-sim: {problem}");
            -1
        }
    }
}

/// The counters, as `qat_sim::Counters`.
///
/// # Safety
/// `counters` is null or valid for a write.
#[no_mangle]
pub unsafe extern "C" fn platen_qat_sim_counters(counters: *mut Counters) {
    if !counters.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { counters.write(DEVICE.counters()) };
    }
}

/// 1 if there is a device.
#[no_mangle]
pub extern "C" fn icp_sal_userIsQatAvailable() -> CpaBoolean {
    let available = DEVICE.is_available();
    available & CpaBoolean::from(!BROKEN.load(Ordering::Relaxed))
}

/// Starts the device.
#[no_mangle]
pub extern "C" fn icp_sal_userStartMultiProcess(
    _name: *const c_char,
    _limited: CpaBoolean,
) -> CpaStatus {
    icp_sal_userStart(_name)
}

/// Starts the device.
#[no_mangle]
pub extern "C" fn icp_sal_userStart(_name: *const c_char) -> CpaStatus {
    // First make the device, which reads the environment.
    let device = &*DEVICE;
    if BROKEN.load(Ordering::Relaxed) {
        return CPA_STATUS_FAIL;
    }
    device.start()
}

/// Stops the device and writes the report.
#[no_mangle]
pub extern "C" fn icp_sal_userStop() -> CpaStatus {
    let status = DEVICE.stop();
    report();
    status
}

/// Delivers events. Contains no cancellation point.
#[no_mangle]
pub extern "C" fn icp_sal_poll_device_events() -> CpaStatus {
    DEVICE.poll_events()
}

/// Runs callbacks.
#[no_mangle]
pub extern "C" fn icp_sal_DcPollInstance(instance: CpaInstanceHandle, quota: u32) -> CpaStatus {
    DEVICE.poll(instance, quota)
}

/// UNSUPPORTED, as a polled instance answers: there is no descriptor to wait for.
#[no_mangle]
pub extern "C" fn icp_sal_DcGetFileDescriptor(
    _instance: CpaInstanceHandle,
    _descriptor: *mut c_int,
) -> CpaStatus {
    CPA_STATUS_UNSUPPORTED
}

/// The number of instances.
///
/// # Safety
/// `count` is null or valid.
#[no_mangle]
pub unsafe extern "C" fn cpaDcGetNumInstances(count: *mut u16) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.num_instances(count) }
}

/// The instances' handles.
///
/// # Safety
/// `handles` has `count` entries.
#[no_mangle]
pub unsafe extern "C" fn cpaDcGetInstances(
    count: u16,
    handles: *mut CpaInstanceHandle,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.instances(count, handles) }
}

/// An instance's description.
///
/// # Safety
/// `info` is null or valid.
#[no_mangle]
pub unsafe extern "C" fn cpaDcInstanceGetInfo2(
    instance: CpaInstanceHandle,
    info: *mut CpaInstanceInfo2,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.info(instance, info) }
}

/// An instance's capabilities.
///
/// # Safety
/// `capabilities` is null or valid.
#[no_mangle]
pub unsafe extern "C" fn cpaDcQueryCapabilities(
    instance: CpaInstanceHandle,
    capabilities: *mut CpaDcInstanceCapabilities,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.capabilities(instance, capabilities) }
}

/// Sets the callback for events.
#[no_mangle]
pub extern "C" fn cpaDcInstanceSetNotificationCb(
    instance: CpaInstanceHandle,
    callback: CpaDcInstanceNotificationCbFunc,
    tag: *mut c_void,
) -> CpaStatus {
    DEVICE.set_notification(instance, callback, tag)
}

/// Sets the function that translates addresses.
#[no_mangle]
pub extern "C" fn cpaDcSetAddressTranslation(
    instance: CpaInstanceHandle,
    translation: CpaVirtualToPhysical,
) -> CpaStatus {
    DEVICE.set_translation(instance, translation)
}

/// The number of intermediate buffers that an instance needs.
///
/// # Safety
/// `count` is null or valid.
#[no_mangle]
pub unsafe extern "C" fn cpaDcGetNumIntermediateBuffers(
    instance: CpaInstanceHandle,
    count: *mut u16,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.num_intermediate(instance, count) }
}

/// Starts an instance.
///
/// # Safety
/// `buffers` is null or has `count` entries.
#[no_mangle]
pub unsafe extern "C" fn cpaDcStartInstance(
    instance: CpaInstanceHandle,
    count: u16,
    buffers: *mut *mut CpaBufferList,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.start_instance(instance, count, buffers) }
}

/// Stops an instance.
#[no_mangle]
pub extern "C" fn cpaDcStopInstance(instance: CpaInstanceHandle) -> CpaStatus {
    DEVICE.stop_instance(instance)
}

/// Bytes of metadata for a list.
///
/// # Safety
/// `bytes` is null or valid.
#[no_mangle]
pub unsafe extern "C" fn cpaDcBufferListGetMetaSize(
    instance: CpaInstanceHandle,
    buffers: u32,
    bytes: *mut u32,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.meta_size(instance, buffers, bytes) }
}

/// Bytes of a session.
///
/// # Safety
/// The pointers are null or valid.
#[no_mangle]
pub unsafe extern "C" fn cpaDcGetSessionSize(
    instance: CpaInstanceHandle,
    setup: *mut CpaDcSessionSetupData,
    session: *mut u32,
    context: *mut u32,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.session_size(instance, setup, session, context) }
}

/// Makes a session.
///
/// # Safety
/// The pointers are null or valid, `session` of the stated size.
#[no_mangle]
pub unsafe extern "C" fn cpaDcInitSession(
    instance: CpaInstanceHandle,
    session: CpaDcSessionHandle,
    setup: *mut CpaDcSessionSetupData,
    _context: *mut CpaBufferList,
    callback: CpaDcCallbackFn,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.init_session(instance, session, setup, callback) }
}

/// Removes a session.
#[no_mangle]
pub extern "C" fn cpaDcRemoveSession(
    instance: CpaInstanceHandle,
    session: CpaDcSessionHandle,
) -> CpaStatus {
    DEVICE.remove_session(instance, session)
}

/// The largest compressed size of `bytes` bytes.
///
/// # Safety
/// `bound` is null or valid.
#[no_mangle]
pub unsafe extern "C" fn cpaDcDeflateCompressBound(
    _instance: CpaInstanceHandle,
    huffman: u32,
    bytes: u32,
    bound: *mut u32,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.deflate_bound(huffman, bytes, bound) }
}

/// UNSUPPORTED: the simulated device has no LZ4.
#[no_mangle]
pub extern "C" fn cpaDcLZ4CompressBound(
    _instance: CpaInstanceHandle,
    _bytes: u32,
    _bound: *mut u32,
) -> CpaStatus {
    CPA_STATUS_UNSUPPORTED
}

/// UNSUPPORTED: the simulated device has no LZ4s.
#[no_mangle]
pub extern "C" fn cpaDcLZ4SCompressBound(
    _instance: CpaInstanceHandle,
    _bytes: u32,
    _bound: *mut u32,
) -> CpaStatus {
    CPA_STATUS_UNSUPPORTED
}

/// Compresses.
///
/// # Safety
/// The pointers are null or valid until the callback.
#[no_mangle]
pub unsafe extern "C" fn cpaDcCompressData2(
    instance: CpaInstanceHandle,
    session: CpaDcSessionHandle,
    source: *mut CpaBufferList,
    target: *mut CpaBufferList,
    operation: *mut CpaDcOpData,
    results: *mut CpaDcRqResults,
    tag: *mut c_void,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.compress(instance, session, source, target, operation, results, tag) }
}

/// Decompresses.
///
/// # Safety
/// The pointers are null or valid until the callback.
#[no_mangle]
pub unsafe extern "C" fn cpaDcDecompressData(
    instance: CpaInstanceHandle,
    session: CpaDcSessionHandle,
    source: *mut CpaBufferList,
    target: *mut CpaBufferList,
    results: *mut CpaDcRqResults,
    flush: u32,
    tag: *mut c_void,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.decompress(instance, session, source, target, results, flush, tag) }
}

/// Compresses with verification and recovery, as the function without operation data does on Gen4.
///
/// # Safety
/// The pointers are null or valid until the callback.
#[no_mangle]
pub unsafe extern "C" fn cpaDcCompressData(
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
pub unsafe extern "C" fn cpaDcDecompressData2(
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
pub unsafe extern "C" fn cpaDcGetStatusText(
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
const _: IcpSalUserIsQatAvailable = icp_sal_userIsQatAvailable;
const _: IcpSalUserStartMultiProcess = icp_sal_userStartMultiProcess;
const _: IcpSalUserStop = icp_sal_userStop;
const _: IcpSalPollDeviceEvents = icp_sal_poll_device_events;
const _: IcpSalDcPollInstance = icp_sal_DcPollInstance;
const _: IcpSalDcGetFileDescriptor = icp_sal_DcGetFileDescriptor;
const _: CpaDcGetNumInstances = cpaDcGetNumInstances;
const _: CpaDcGetInstances = cpaDcGetInstances;
const _: CpaDcInstanceGetInfo2 = cpaDcInstanceGetInfo2;
const _: CpaDcQueryCapabilities = cpaDcQueryCapabilities;
const _: CpaDcInstanceSetNotificationCb = cpaDcInstanceSetNotificationCb;
const _: CpaDcSetAddressTranslation = cpaDcSetAddressTranslation;
const _: CpaDcGetNumIntermediateBuffers = cpaDcGetNumIntermediateBuffers;
const _: CpaDcStartInstance = cpaDcStartInstance;
const _: CpaDcStopInstance = cpaDcStopInstance;
const _: CpaDcBufferListGetMetaSize = cpaDcBufferListGetMetaSize;
const _: CpaDcGetSessionSize = cpaDcGetSessionSize;
const _: CpaDcInitSession = cpaDcInitSession;
const _: CpaDcRemoveSession = cpaDcRemoveSession;
const _: CpaDcDeflateCompressBound = cpaDcDeflateCompressBound;
const _: CpaDcLz4CompressBound = cpaDcLZ4CompressBound;
const _: CpaDcLz4CompressBound = cpaDcLZ4SCompressBound;
const _: CpaDcCompressData2 = cpaDcCompressData2;
const _: CpaDcDecompressData = cpaDcDecompressData;
