//! Instances: the functions that start and poll the device, and find, describe and start instances.

use crate::{report, BROKEN, DEVICE};
use qat_abi::*;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering;

forward! {
    /// Delivers events. Contains no cancellation point.
    fn icp_sal_poll_device_events(): IcpSalPollDeviceEvents = poll_events();
    /// Runs callbacks.
    fn icp_sal_DcPollInstance(instance: CpaInstanceHandle, quota: u32): IcpSalDcPollInstance =
        poll(instance, quota);
    /// The number of instances.
    fn cpaDcGetNumInstances(count: *mut u16): CpaDcGetNumInstances = num_instances(count);
    /// The instances' handles.
    fn cpaDcGetInstances(count: u16, handles: *mut CpaInstanceHandle): CpaDcGetInstances =
        instances(count, handles);
    /// An instance's description.
    fn cpaDcInstanceGetInfo2(
        instance: CpaInstanceHandle, info: *mut CpaInstanceInfo2
    ): CpaDcInstanceGetInfo2 = info(instance, info);
    /// An instance's capabilities.
    fn cpaDcQueryCapabilities(
        instance: CpaInstanceHandle, capabilities: *mut CpaDcInstanceCapabilities
    ): CpaDcQueryCapabilities = capabilities(instance, capabilities);
    /// Sets the callback for events.
    fn cpaDcInstanceSetNotificationCb(
        instance: CpaInstanceHandle, callback: CpaDcInstanceNotificationCbFunc, tag: *mut c_void
    ): CpaDcInstanceSetNotificationCb = set_notification(instance, callback, tag);
    /// Sets the function that translates addresses.
    fn cpaDcSetAddressTranslation(
        instance: CpaInstanceHandle, translation: CpaVirtualToPhysical
    ): CpaDcSetAddressTranslation = set_translation(instance, translation);
    /// The number of intermediate buffers that an instance needs.
    fn cpaDcGetNumIntermediateBuffers(
        instance: CpaInstanceHandle, count: *mut u16
    ): CpaDcGetNumIntermediateBuffers = num_intermediate(instance, count);
    /// Starts an instance.
    fn cpaDcStartInstance(
        instance: CpaInstanceHandle, count: u16, buffers: *mut *mut CpaBufferList
    ): CpaDcStartInstance = start_instance(instance, count, buffers);
    /// Stops an instance.
    fn cpaDcStopInstance(instance: CpaInstanceHandle): CpaDcStopInstance = stop_instance(instance);
}

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

/// UNSUPPORTED, as a polled instance answers: there is no descriptor to wait for.
#[no_mangle]
pub(crate) extern "C" fn icp_sal_DcGetFileDescriptor(
    _instance: CpaInstanceHandle,
    _descriptor: *mut c_int,
) -> CpaStatus {
    CPA_STATUS_UNSUPPORTED
}

// Checks each function against the type by which the driver calls it.
const _: IcpSalUserIsQatAvailable = icp_sal_userIsQatAvailable;
const _: IcpSalUserStartMultiProcess = icp_sal_userStartMultiProcess;
const _: IcpSalUserStop = icp_sal_userStop;
const _: IcpSalDcGetFileDescriptor = icp_sal_DcGetFileDescriptor;
