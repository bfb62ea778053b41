//! Instances: the functions that list, describe, start and stop them.

use super::{put, Device};
use crate::instance::{Notify, State};
use crate::machine::{handle_of, lock};
use crate::script::Entry;
use crate::sgl;
use qat_abi::*;
use std::ffi::c_void;

impl Device {
    /// `cpaDcGetNumInstances`.
    ///
    /// # Safety
    /// `count` is null or valid for a write.
    pub unsafe fn num_instances(&self, count: *mut u16) -> CpaStatus {
        let Some(machine) = self.machine() else { return CPA_STATUS_FAIL };
        let instances = u16::try_from(machine.instances.len()).unwrap_or(u16::MAX);
        // SAFETY: the caller's promise.
        unsafe { put(count, instances) }
    }

    /// `cpaDcGetInstances`.
    ///
    /// # Safety
    /// `handles` is null or valid for `count` writes.
    pub unsafe fn instances(&self, count: u16, handles: *mut CpaInstanceHandle) -> CpaStatus {
        let Some(machine) = self.machine() else { return CPA_STATUS_FAIL };
        if handles.is_null() || count == 0 {
            return CPA_STATUS_INVALID_PARAM;
        }
        if usize::from(count) > machine.instances.len() {
            return CPA_STATUS_RESOURCE;
        }
        for index in 0..usize::from(count) {
            // SAFETY: the caller's promise.
            let slot = unsafe { handles.add(index) };
            // SAFETY: the caller's promise.
            unsafe { slot.write(handle_of(index)) };
        }
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcInstanceGetInfo2`.
    ///
    /// # Safety
    /// `info` is null or valid for a write.
    pub unsafe fn info(&self, handle: CpaInstanceHandle, info: *mut CpaInstanceInfo2) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        let mut filled = CpaInstanceInfo2 {
            accelerationServiceType: CPA_ACC_SVC_TYPE_DATA_COMPRESSION,
            physInstId: CpaPhysicalInstanceId {
                packageId: u16::try_from(instance.package).unwrap_or(0),
                acceleratorId: u16::try_from(instance.index).unwrap_or(0),
                ..CpaPhysicalInstanceId::default()
            },
            operState: u32::from(instance.is_started() && instance.state() == State::Running),
            requiresPhysicallyContiguousMemory: CpaBoolean::from(machine.settings.contiguous),
            isPolled: CPA_TRUE,
            // All true except the name: software that asks has to see a 4xxx.
            isOffloaded: CPA_TRUE,
            ..CpaInstanceInfo2::ZERO
        };
        text(&mut filled.vendorName, "platen (simulated)");
        text(&mut filled.partName, "qat_4xxx_simulated");
        text(&mut filled.swVersion, concat!("Version ", env!("CARGO_PKG_VERSION")));
        text(&mut filled.instName, &format!("Dc{}", instance.index));
        text(&mut filled.instID, &format!("SIM_Dc{}", instance.index));
        // SAFETY: the caller's promise.
        unsafe { put(info, filled) }
    }

    /// `cpaDcQueryCapabilities`.
    ///
    /// # Safety
    /// `capabilities` is null or valid for a write.
    pub unsafe fn capabilities(
        &self,
        handle: CpaInstanceHandle,
        capabilities: *mut CpaDcInstanceCapabilities,
    ) -> CpaStatus {
        let Some((machine, _)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        let filled = CpaDcInstanceCapabilities {
            statelessDeflateCompression: CPA_TRUE,
            statelessDeflateDecompression: CPA_TRUE,
            checksumCRC32: CPA_TRUE,
            checksumAdler32: CPA_TRUE,
            dynamicHuffman: CPA_TRUE,
            dynamicHuffmanBufferReq: CpaBoolean::from(machine.settings.intermediate > 0),
            autoSelectBestHuffmanTree: CPA_TRUE,
            validWindowSizeMaskCompression: 1 << CPA_DC_WINSIZE_32K,
            validWindowSizeMaskDecompression: 1 << CPA_DC_WINSIZE_32K,
            endOfLastBlock: CPA_TRUE,
            compressAndVerify: CPA_TRUE,
            compressAndVerifyStrict: CPA_TRUE,
            compressAndVerifyAndRecover: CPA_TRUE,
            ..CpaDcInstanceCapabilities::default()
        };
        // SAFETY: the caller's promise.
        unsafe { put(capabilities, filled) }
    }

    /// `cpaDcInstanceSetNotificationCb`.
    pub fn set_notification(
        &self,
        handle: CpaInstanceHandle,
        callback: CpaDcInstanceNotificationCbFunc,
        tag: *mut c_void,
    ) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        *lock(&instance.notify) = Notify(callback, tag);
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcSetAddressTranslation`.
    pub fn set_translation(
        &self,
        handle: CpaInstanceHandle,
        translation: CpaVirtualToPhysical,
    ) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        if translation.is_none() {
            return CPA_STATUS_INVALID_PARAM;
        }
        instance.set_translation(translation);
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcGetNumIntermediateBuffers`.
    ///
    /// # Safety
    /// `count` is null or valid for a write.
    pub unsafe fn num_intermediate(&self, handle: CpaInstanceHandle, count: *mut u16) -> CpaStatus {
        let Some((machine, _)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        // SAFETY: the caller's promise.
        unsafe { put(count, machine.settings.intermediate) }
    }

    /// `cpaDcStartInstance`.
    ///
    /// # Safety
    /// `buffers` is null or has `count` entries, each null or a valid list.
    pub unsafe fn start_instance(
        &self,
        handle: CpaInstanceHandle,
        count: u16,
        buffers: *mut *mut CpaBufferList,
    ) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        machine.may_hang(Entry::Start, instance);
        if count != machine.settings.intermediate {
            return CPA_STATUS_INVALID_PARAM;
        }
        if count > 0 {
            let Some(translation) = instance.translation() else { return CPA_STATUS_FAIL };
            if buffers.is_null() {
                return CPA_STATUS_INVALID_PARAM;
            }
            for index in 0..usize::from(count) {
                // SAFETY: the caller's promise.
                let slot = unsafe { buffers.add(index) };
                // SAFETY: the caller's promise.
                let list = unsafe { slot.read() };
                // SAFETY: the caller's promise.
                if let Err(status) = unsafe { sgl::pinned(list, translation) } {
                    return status;
                }
            }
        }
        instance.start();
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcStopInstance`: requests in flight are never answered. FAIL from within a callback.
    pub fn stop_instance(&self, handle: CpaInstanceHandle) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        machine.may_hang(Entry::Stop, instance);
        match instance.stop() {
            true => CPA_STATUS_SUCCESS,
            false => CPA_STATUS_FAIL,
        }
    }
}

/// Writes a NUL-terminated text.
fn text(field: &mut [u8], value: &str) {
    let length = value.len().min(field.len() - 1);
    field[..length].copy_from_slice(&value.as_bytes()[..length]);
}
