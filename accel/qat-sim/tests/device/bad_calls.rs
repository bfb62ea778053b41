//! Calls that are refused.

use crate::rig::{operation, pinned, setup, text, Rig, Slot, USDM};
use qat_abi::*;
use std::ptr::null_mut;

fn slot() -> Slot {
    let mut slot = Slot::new();
    slot.fill(&text(3000), 4000);
    slot
}

/// The answer to a request after `bend` has changed it.
fn answer(rig: &Rig, bend: impl FnOnce(&mut Slot, &mut CpaDcOpData)) -> CpaStatus {
    let mut slot = slot();
    let mut operation = operation(CPA_DC_FLUSH_FINAL);
    bend(&mut slot, &mut operation);
    let status = rig.compress_as(0, &mut slot, &mut operation);
    assert_eq!(rig.counters().in_flight, 0, "a refused request leaves nothing");
    status
}

#[test]
fn memory_that_is_not_pinned_is_refused() {
    let rig = Rig::new("");
    let mut own = vec![0_u8; 8192];
    let own = own.as_mut_ptr();
    assert_eq!(answer(&rig, |slot, _| slot.flats[0].pData = own), CPA_STATUS_FAIL);
    assert_eq!(answer(&rig, |slot, _| slot.flats[1].pData = own), CPA_STATUS_FAIL);
    for list in [0, 1] {
        let bend = |slot: &mut Slot, _: &mut CpaDcOpData| {
            slot.lists[list].pPrivateMetaData = own.cast();
        };
        assert_eq!(answer(&rig, bend), CPA_STATUS_FAIL);
        let bend = |slot: &mut Slot, _: &mut CpaDcOpData| {
            slot.lists[list].pPrivateMetaData = pinned(31).cast();
        };
        assert_eq!(answer(&rig, bend), CPA_STATUS_FAIL, "metadata one byte too small");
    }
    // A session outside pinned memory.
    let mut data = setup();
    // SAFETY: 8 KiB of our own.
    let status =
        unsafe { rig.device.init_session(rig.handles[0], own.cast(), &raw mut data, None) };
    assert_eq!(status, CPA_STATUS_FAIL);
}

#[test]
fn unreachable_memory_fails_and_is_counted() {
    let rig = Rig::new("");
    // The start is pinned, so libqat's one translation passes; the end is not.
    for list in [0, 1] {
        let mut slot = slot();
        slot.flats[list].pData = pinned(2999);
        let before = rig.counters().violations;
        assert_eq!(rig.compress(&mut slot), CPA_STATUS_SUCCESS);
        rig.wait(std::slice::from_ref(&slot), 1);
        let fits = list == 1 && slot.results.produced <= 2999;
        if !fits {
            assert_eq!((slot.status(), slot.results.status), (CPA_STATUS_FAIL, CPA_DC_FATALERR));
            assert_eq!(rig.counters().violations, before + 1);
        }
    }
    // Freed under the device's hands.
    let rig2 = Rig::new("now silence");
    let mut slot = slot();
    assert_eq!(rig2.compress(&mut slot), CPA_STATUS_SUCCESS);
    assert!(USDM.free(slot.source.cast()));
    rig2.device.control("now revive").expect("a good script");
    rig2.wait(std::slice::from_ref(&slot), 1);
    assert_eq!(slot.status(), CPA_STATUS_FAIL);
    assert_eq!(rig2.counters().violations, 1);
    for rig in [rig, rig2] {
        rig.device.control("reset").expect("a good script");
    }
}

#[test]
fn bad_arguments_are_invalid() {
    let rig = Rig::new("");
    let invalid = CPA_STATUS_INVALID_PARAM;
    assert_eq!(answer(&rig, |slot, _| slot.flats[0].dataLenInBytes = 0), invalid);
    assert_eq!(answer(&rig, |slot, _| slot.flats[0].pData = null_mut()), invalid);
    assert_eq!(answer(&rig, |slot, _| slot.lists[0].numBuffers = 0), invalid);
    assert_eq!(answer(&rig, |slot, _| slot.lists[1].pBuffers = null_mut()), invalid);
    assert_eq!(answer(&rig, |slot, _| slot.lists[1].pPrivateMetaData = null_mut()), invalid);
    assert_eq!(answer(&rig, |slot, _| slot.flats[1].dataLenInBytes = 511), invalid);
    assert_eq!(answer(&rig, |_, operation| operation.flushFlag = 4), invalid);
    assert_eq!(answer(&rig, |_, operation| operation.flushFlag = CPA_DC_FLUSH_SYNC), invalid);
    assert_eq!(answer(&rig, |_, operation| operation.compressAndVerify = 2), invalid);
    let unverified = |_: &mut Slot, operation: &mut CpaDcOpData| operation.compressAndVerify = 0;
    assert_eq!(answer(&rig, unverified), CPA_STATUS_UNSUPPORTED);

    let mut slot = slot();
    let [source, target] = &mut *slot.lists;
    let (source, target) = (&raw mut *source, &raw mut *target);
    let mut last = operation(CPA_DC_FLUSH_FINAL);
    let (handle, session) = (rig.handles[0], rig.sessions[0]);
    let results = &raw mut *slot.results;
    let tag = null_mut();
    let call = |handle, session, source, target, operation, results| {
        // SAFETY: each is null, not looked into, or valid.
        unsafe { rig.device.compress(handle, session, source, target, operation, results, tag) }
    };
    let last = &raw mut last;
    assert_eq!(call(handle, session, source, source, last, results), invalid, "in place");
    assert_eq!(call(handle, session, source, target, last, null_mut()), invalid, "no results");
    assert_eq!(call(handle, session, source, target, null_mut(), results), invalid, "no operation");
    assert_eq!(call(handle, session, null_mut(), target, last, results), invalid, "no source");
    assert_eq!(call(handle, null_mut(), source, target, last, results), invalid, "no session");
    assert_eq!(call(results.cast(), session, source, target, last, results), invalid, "no handle");
    let other = rig.handles[1];
    assert_eq!(call(other, session, source, target, last, results), invalid, "not its session");
}

#[test]
fn sessions_of_the_wrong_kind_are_refused() {
    let rig =
        Rig::with("", CpaDcSessionSetupData { sessDirection: CPA_DC_DIR_DECOMPRESS, ..setup() });
    assert_eq!(rig.compress(&mut slot()), CPA_STATUS_INVALID_PARAM);
    let rig =
        Rig::with("", CpaDcSessionSetupData { sessDirection: CPA_DC_DIR_COMPRESS, ..setup() });
    assert_eq!(rig.decompress(&mut slot()), CPA_STATUS_INVALID_PARAM);
    let rig = Rig::with("", CpaDcSessionSetupData { sessState: CPA_DC_STATEFUL, ..setup() });
    assert_eq!(rig.compress(&mut slot()), CPA_STATUS_UNSUPPORTED);
    let rig = Rig::with("", CpaDcSessionSetupData { huffType: CPA_DC_HT_STATIC, ..setup() });
    let mut small = Slot::new();
    small.fill(&text(100), MIN_DEST_STATIC - 1);
    assert_eq!(rig.compress(&mut small), CPA_STATUS_INVALID_PARAM);
    for (field, expected) in [
        (CpaDcSessionSetupData { compType: CPA_DC_LZ4, ..setup() }, CPA_STATUS_UNSUPPORTED),
        (CpaDcSessionSetupData { compLevel: 13, ..setup() }, CPA_STATUS_INVALID_PARAM),
        (
            CpaDcSessionSetupData { huffType: CPA_DC_HT_PRECOMP, ..setup() },
            CPA_STATUS_INVALID_PARAM,
        ),
    ] {
        let mut data = field;
        let session = pinned(4096).cast();
        // SAFETY: pinned memory that is large enough.
        let status =
            unsafe { rig.device.init_session(rig.handles[0], session, &raw mut data, None) };
        assert_eq!(status, expected);
    }
}

#[test]
fn intermediate_buffers_are_counted_and_must_be_pinned() {
    let rig = Rig::new("");
    assert_eq!(rig.device.stop(), CPA_STATUS_SUCCESS);
    rig.device.control("intermediate 2").expect("a good script");
    assert_eq!(rig.device.start(), CPA_STATUS_SUCCESS);
    let handle = rig.handles[0];
    let start = |count, lists: *mut *mut CpaBufferList| {
        // SAFETY: null, or so many valid lists.
        unsafe { rig.device.start_instance(handle, count, lists) }
    };
    let mut slots = [slot(), slot()];
    let mut lists = slots.each_mut().map(|slot| &raw mut slot.lists[0]);
    assert_eq!(start(2, lists.as_mut_ptr()), CPA_STATUS_FAIL, "no translation");
    rig.device.set_translation(handle, Some(crate::rig::translate));
    assert_eq!(start(0, null_mut()), CPA_STATUS_INVALID_PARAM);
    assert_eq!(start(2, null_mut()), CPA_STATUS_INVALID_PARAM);
    assert_eq!(start(2, lists.as_mut_ptr()), CPA_STATUS_SUCCESS);
    let mut own = [0_u8; 64];
    slots[1].flats[0].pData = own.as_mut_ptr();
    assert_eq!(start(2, lists.as_mut_ptr()), CPA_STATUS_FAIL);
}

#[test]
fn the_bound_is_that_of_gen4() {
    let rig = Rig::new("");
    let bound = |huffman, bytes| {
        let mut most = 0;
        // SAFETY: a local.
        let status = unsafe { rig.device.deflate_bound(huffman, bytes, &raw mut most) };
        (status, most)
    };
    assert_eq!(bound(CPA_DC_HT_STATIC, 4096), (0, 4608 + 5 + 1024));
    assert_eq!(bound(CPA_DC_HT_FULL_DYNAMIC, 4096), (0, 4608 + 44 + 512));
    assert_eq!(bound(CPA_DC_HT_FULL_DYNAMIC, u32::MAX).0, CPA_STATUS_INVALID_PARAM);
    assert_eq!(bound(CPA_DC_HT_PRECOMP, 1).0, CPA_STATUS_INVALID_PARAM);
}
