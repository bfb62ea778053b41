//! Sizes, sessions and requests: the functions for an application's data.

use super::{now_ns, put, Device, SESSION_BYTES};
use crate::counters::add;
use crate::faults::{Effect, Verdict};
use crate::instance::State;
use crate::script::Direction;
use crate::sgl::{self, Call};
use qat_abi::*;
use std::ffi::c_void;

impl Device {
    /// `cpaDcBufferListGetMetaSize`.
    ///
    /// # Safety
    /// `bytes` is null or valid for a write.
    pub unsafe fn meta_size(
        &self,
        handle: CpaInstanceHandle,
        flats: u32,
        bytes: *mut u32,
    ) -> CpaStatus {
        match (self.instance(handle), sgl::meta_bytes(flats)) {
            // SAFETY: the caller's promise.
            (Some(_), Some(size)) if flats > 0 => unsafe { put(bytes, size) },
            _ => CPA_STATUS_INVALID_PARAM,
        }
    }

    /// `cpaDcGetSessionSize`.
    ///
    /// # Safety
    /// The pointers are null or valid.
    pub unsafe fn session_size(
        &self,
        handle: CpaInstanceHandle,
        setup: *mut CpaDcSessionSetupData,
        session: *mut u32,
        context: *mut u32,
    ) -> CpaStatus {
        if self.instance(handle).is_none() || setup.is_null() {
            return CPA_STATUS_INVALID_PARAM;
        }
        // SAFETY: not null, and the caller's promise.
        if let Err(status) = check_setup(&unsafe { setup.read() }) {
            return status;
        }
        if !context.is_null() {
            // SAFETY: the caller's promise. Stateless sessions need none.
            unsafe { context.write(0) };
        }
        // SAFETY: the caller's promise.
        unsafe { put(session, u32::try_from(SESSION_BYTES).unwrap_or(0)) }
    }

    /// `cpaDcInitSession`. The session's memory must be pinned; all of its size is written.
    ///
    /// # Safety
    /// The pointers are null or valid; `session` has the size that `session_size` returned.
    pub unsafe fn init_session(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
        setup: *mut CpaDcSessionSetupData,
        callback: CpaDcCallbackFn,
    ) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        if let Some(status) = instance.objection() {
            return status;
        }
        if session.is_null() || setup.is_null() {
            return CPA_STATUS_INVALID_PARAM;
        }
        let Some(translation) = instance.translation() else { return CPA_STATUS_FAIL };
        // SAFETY: not null, and the caller's promise.
        let setup = unsafe { setup.read() };
        if let Err(status) = check_setup(&setup) {
            return status;
        }
        // SAFETY: the caller's own function, which takes any address.
        if unsafe { translation(session) } == 0 {
            return CPA_STATUS_FAIL;
        }
        // SAFETY: the caller's promise.
        unsafe { session.cast::<u8>().write_bytes(0, SESSION_BYTES) };
        instance.open_session(session, setup, callback);
        add(&machine.tallies.instances[instance.index].sessions_made, 1);
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcRemoveSession`: RETRY while requests are pending, FAIL of a dead device.
    pub fn remove_session(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
    ) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        match instance.state() {
            State::Restarting => CPA_STATUS_RESTARTING,
            State::Error => CPA_STATUS_FAIL,
            _ => instance.close_session(session),
        }
    }

    /// `cpaDcDeflateCompressBound` of Gen4; the handle is ignored.
    ///
    /// # Safety
    /// `bound` is null or valid for a write.
    pub unsafe fn deflate_bound(&self, huffman: u32, bytes: u32, bound: *mut u32) -> CpaStatus {
        let size = u64::from(bytes);
        // The formulas in dc_header_footer.c for Gen4.
        let most = match huffman {
            CPA_DC_HT_STATIC => (9 * size).div_ceil(8) + 5 + MIN_DEST_STATIC as u64,
            CPA_DC_HT_FULL_DYNAMIC => {
                (9 * size).div_ceil(8) + 8 * size * 155 / 7 / 16_384 + MIN_DEST_DYNAMIC as u64
            }
            _ => return CPA_STATUS_INVALID_PARAM,
        };
        match u32::try_from(most) {
            // SAFETY: the caller's promise.
            Ok(most) if bytes > 0 => unsafe { put(bound, most) },
            _ => CPA_STATUS_INVALID_PARAM,
        }
    }

    /// `cpaDcCompressData2`.
    ///
    /// # Safety
    /// The pointers are null or valid, and their targets stay valid until the callback.
    #[expect(clippy::too_many_arguments, reason = "the C function has them")]
    pub unsafe fn compress(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
        source: *mut CpaBufferList,
        target: *mut CpaBufferList,
        operation: *mut CpaDcOpData,
        results: *mut CpaDcRqResults,
        tag: *mut c_void,
    ) -> CpaStatus {
        // SAFETY: the caller's promise.
        let operation = unsafe { operation.as_ref() };
        let (flush, recover, wrong) = match operation {
            None => (0, false, Some(CPA_STATUS_INVALID_PARAM)),
            Some(operation) => (
                operation.flushFlag,
                operation.compressAndVerifyAndRecover == CPA_TRUE,
                check_operation(operation),
            ),
        };
        let direction = Direction::Compress;
        let call = Call { direction, session, source, target, results, flush, recover, tag };
        // SAFETY: the caller's promise.
        unsafe { self.submit(handle, &call, wrong) }
    }

    /// `cpaDcDecompressData`.
    ///
    /// # Safety
    /// Those of `compress`.
    #[expect(clippy::too_many_arguments, reason = "the C function has them")]
    pub unsafe fn decompress(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
        source: *mut CpaBufferList,
        target: *mut CpaBufferList,
        results: *mut CpaDcRqResults,
        flush: u32,
        tag: *mut c_void,
    ) -> CpaStatus {
        let direction = Direction::Decompress;
        let call = Call { direction, session, source, target, results, flush, recover: false, tag };
        // SAFETY: the caller's promise.
        unsafe { self.submit(handle, &call, None) }
    }

    /// # Safety
    /// The pointers of `call` are as `compress` requires.
    unsafe fn submit(
        &self,
        handle: CpaInstanceHandle,
        call: &Call,
        wrong: Option<CpaStatus>,
    ) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        let tally = &machine.tallies.instances[instance.index];
        add(&tally.submissions, 1);
        let mut effect = Effect::None;
        let mut rule = None;
        let armed = machine.faults.is_armed();
        let _inside = armed.then(|| instance.enter(tally));
        let now = if armed || machine.timed { now_ns() } else { 0 };
        if armed {
            let mut deeds = Vec::new();
            let verdict =
                machine.faults.submission(instance.index, call.direction, now, &mut deeds);
            deeds.into_iter().for_each(|deed| machine.act(deed));
            match verdict {
                Verdict::Refuse(status) => {
                    add(&machine.tallies.faults, 1);
                    add(&tally.retries, u64::from(status == CPA_STATUS_RETRY));
                    return status;
                }
                Verdict::Hang(stuck) => {
                    add(&machine.tallies.faults, 1);
                    stuck.for_ever();
                }
                Verdict::Accept { effect: some, rule: index } => {
                    effect = some;
                    rule = (some != Effect::None).then_some(index);
                }
            }
        }
        let status = match instance.objection().or(wrong) {
            Some(status) => status,
            // SAFETY: the caller's promise.
            None => unsafe { instance.submit(call, effect, now, tally) },
        };
        match (status, call.direction) {
            (CPA_STATUS_SUCCESS, direction) => {
                add(&machine.tallies.faults, u64::from(rule.is_some()));
                match direction {
                    Direction::Compress => add(&tally.compress, 1),
                    Direction::Decompress => add(&tally.decompress, 1),
                }
                machine.doorbell.ring();
            }
            (refused, _) => {
                add(&tally.retries, u64::from(refused == CPA_STATUS_RETRY));
                if let Some(rule) = rule {
                    machine.faults.give_back(rule);
                }
            }
        }
        status
    }
}

fn check_setup(setup: &CpaDcSessionSetupData) -> Result<(), CpaStatus> {
    match setup.compType {
        CPA_DC_DEFLATE => {}
        CPA_DC_LZ4 | CPA_DC_LZ4S => return Err(CPA_STATUS_UNSUPPORTED),
        _ => return Err(CPA_STATUS_INVALID_PARAM),
    }
    // The window size is ignored, because QATzip passes 7, which is no valid value.
    let good = matches!(setup.huffType, CPA_DC_HT_STATIC | CPA_DC_HT_FULL_DYNAMIC)
        && (1..=12).contains(&setup.compLevel)
        && setup.autoSelectBestHuffmanTree <= CPA_DC_ASB_ENABLED
        && setup.sessDirection <= CPA_DC_DIR_COMBINED
        && setup.sessState <= CPA_DC_STATELESS
        && setup.checksum <= CPA_DC_CRC32_ADLER32;
    match good {
        true => Ok(()),
        false => Err(CPA_STATUS_INVALID_PARAM),
    }
}

fn check_operation(operation: &CpaDcOpData) -> Option<CpaStatus> {
    let verify = operation.compressAndVerify;
    let recover = operation.compressAndVerifyAndRecover;
    if verify > 1 || recover > 1 || operation.integrityCrcCheck != 0 {
        return Some(CPA_STATUS_INVALID_PARAM);
    }
    if operation.inputSkipData.skipMode != 0 || operation.outputSkipData.skipMode != 0 {
        return Some(CPA_STATUS_UNSUPPORTED);
    }
    match (verify, recover) {
        (CPA_FALSE, CPA_TRUE) => Some(CPA_STATUS_INVALID_PARAM),
        (CPA_FALSE, _) => Some(CPA_STATUS_UNSUPPORTED),
        _ => None,
    }
}
