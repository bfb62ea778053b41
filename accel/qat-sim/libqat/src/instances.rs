//! Instances: the functions that start and poll the device, and find, describe and start instances.

use crate::{report, BROKEN, DEVICE};
use qat_abi::*;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering;

/// 1 if there is a device.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_userIsQatAvailable() -> CpaBoolean {
    let available = DEVICE.is_available();
    available & CpaBoolean::from(!BROKEN.load(Ordering::Relaxed))
}

/// Starts the device.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_userStartMultiProcess(
    _name: *const c_char,
    _limited: CpaBoolean,
) -> CpaStatus {
    icp_sal_userStart(_name)
}

/// Starts the device.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_userStart(_name: *const c_char) -> CpaStatus {
    // First make the device, which reads the environment.
    let device = &*DEVICE;
    if BROKEN.load(Ordering::Relaxed) {
        return CPA_STATUS_FAIL;
    }
    device.start()
}

/// Stops the device and writes the report.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_userStop() -> CpaStatus {
    let status = DEVICE.stop();
    report();
    status
}

/// Delivers events. Contains no cancellation point.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_poll_device_events() -> CpaStatus {
    DEVICE.poll_events()
}

/// Runs callbacks.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_DcPollInstance(
    instance: CpaInstanceHandle,
    quota: u32,
) -> CpaStatus {
    DEVICE.poll(instance, quota)
}

/// UNSUPPORTED, as a polled instance answers: there is no descriptor to wait for.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_DcGetFileDescriptor(
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
pub(crate) unsafe extern "C" fn cpaDcGetNumInstances(count: *mut u16) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.num_instances(count) }
}

/// The instances' handles.
///
/// # Safety
/// `handles` has `count` entries.
#[no_mangle]
pub(crate) unsafe extern "C" fn cpaDcGetInstances(
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
pub(crate) unsafe extern "C" fn cpaDcInstanceGetInfo2(
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
pub(crate) unsafe extern "C" fn cpaDcQueryCapabilities(
    instance: CpaInstanceHandle,
    capabilities: *mut CpaDcInstanceCapabilities,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.capabilities(instance, capabilities) }
}

/// Sets the callback for events.
#[no_mangle]
pub(crate) extern "C" fn cpaDcInstanceSetNotificationCb(
    instance: CpaInstanceHandle,
    callback: CpaDcInstanceNotificationCbFunc,
    tag: *mut c_void,
) -> CpaStatus {
    DEVICE.set_notification(instance, callback, tag)
}

/// Sets the function that translates addresses.
#[no_mangle]
pub(crate) extern "C" fn cpaDcSetAddressTranslation(
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
pub(crate) unsafe extern "C" fn cpaDcGetNumIntermediateBuffers(
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
pub(crate) unsafe extern "C" fn cpaDcStartInstance(
    instance: CpaInstanceHandle,
    count: u16,
    buffers: *mut *mut CpaBufferList,
) -> CpaStatus {
    // SAFETY: the caller's promise.
    unsafe { DEVICE.start_instance(instance, count, buffers) }
}

/// Stops an instance.
#[no_mangle]
pub(crate) extern "C" fn cpaDcStopInstance(instance: CpaInstanceHandle) -> CpaStatus {
    DEVICE.stop_instance(instance)
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
