//! Each fault of the script that is not the device's death.

use crate::rig::{noise, operation, text, Rig, Slot};
use qat_abi::*;
use std::time::{Duration, Instant};

fn slots(count: usize) -> Vec<Slot> {
    let mut slots: Vec<Slot> = (0..count).map(|_| Slot::new()).collect();
    slots.iter_mut().for_each(|slot| slot.fill(&text(3000), 4000));
    slots
}

fn statuses(rig: &Rig, slots: &mut [Slot]) -> Vec<CpaStatus> {
    slots.iter_mut().map(|slot| rig.compress(slot)).collect()
}

#[test]
fn retry_and_fail_refuse_so_many_submissions() {
    let rig = Rig::new("at 2 retry 2; at 5 fail");
    let mut slots = slots(6);
    let (yes, retry, no) = (CPA_STATUS_SUCCESS, CPA_STATUS_RETRY, CPA_STATUS_FAIL);
    assert_eq!(statuses(&rig, &mut slots), [yes, retry, retry, yes, no, yes]);
    rig.wait(&slots, 3);
    let counters = rig.counters();
    assert_eq!((counters.submissions, counters.accepted, counters.faults), (6, 3, 3));
    assert_eq!(slots.iter().map(Slot::times).collect::<Vec<_>>(), [1, 0, 0, 1, 0, 1]);
}

#[test]
fn retry_can_go_on_for_ever() {
    let rig = Rig::new("now retry forever");
    assert!(statuses(&rig, &mut slots(50)).iter().all(|status| *status == CPA_STATUS_RETRY));
    rig.device.control("").expect("no faults is a script");
    let slot = rig.compress_one(&text(100), 512);
    assert_eq!(slot.results.status, CPA_DC_OK);
}

#[test]
fn status_and_error_produce_nothing_but_rubbish() {
    let rig = Rig::new("at 1 status -11; at 2 error -13");
    let mut slots = slots(3);
    statuses(&rig, &mut slots);
    rig.wait(&slots, 3);
    assert_eq!((slots[0].status(), slots[0].results.status), (CPA_STATUS_SUCCESS, -11));
    assert_eq!((slots[1].status(), slots[1].results.status), (CPA_STATUS_FAIL, -13));
    assert_eq!((slots[2].status(), slots[2].results.status), (CPA_STATUS_SUCCESS, CPA_DC_OK));
    for slot in &slots[..2] {
        assert_eq!((slot.results.produced, slot.results.consumed), (0, 0));
        assert!(slot.memory()[..64].iter().all(|byte| *byte == 0xdb));
    }
}

#[test]
fn a_failing_poll_delivers_nothing_and_loses_nothing() {
    let rig = Rig::new("engine stored; now pollfail 2");
    let mut slots = slots(1);
    statuses(&rig, &mut slots);
    assert_eq!([rig.poll(), rig.poll()], [CPA_STATUS_FAIL, CPA_STATUS_FAIL]);
    assert_eq!(slots[0].times(), 0);
    rig.wait(&slots, 1);
    assert_eq!(slots[0].results.status, CPA_DC_OK);
}

#[test]
fn a_late_completion_writes_its_output_late() {
    let rig = Rig::new("at 1 late 300");
    let mut slots = slots(2);
    let start = Instant::now();
    statuses(&rig, &mut slots);
    rig.wait(&slots[1..], 1);
    let (times, memory) = (slots[0].times(), slots[0].memory());
    if start.elapsed() < Duration::from_millis(300) {
        assert_eq!(times, 0);
        assert!(memory.iter().all(|byte| *byte == 0xee), "nothing is written before");
    }
    rig.wait(&slots, 2);
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert_eq!(slots[0].output(), slots[1].output());
}

#[test]
fn flip_is_one_bit_and_crc_is_wrong() {
    let rig = Rig::new("at 2 flip; at 3 crc");
    let mut slots = slots(3);
    statuses(&rig, &mut slots);
    rig.wait(&slots, 3);
    let good = &slots[0];
    let differing: u32 = good
        .memory()
        .iter()
        .zip(slots[1].memory())
        .map(|(left, right)| (left ^ right).count_ones())
        .sum();
    assert_eq!(differing, 1);
    assert_eq!(slots[1].results, good.results);
    assert_eq!(slots[2].output(), good.output());
    assert_ne!(slots[2].results.checksum, good.results.checksum);
}

#[test]
fn silence_lasts_until_the_device_is_revived() {
    let rig = Rig::new("at 2 silence");
    let mut slots = slots(3);
    slots[0].fill(&noise(100), 512);
    assert_eq!(rig.compress(&mut slots[0]), CPA_STATUS_SUCCESS);
    rig.wait(&slots[..1], 1);
    assert_eq!(rig.compress(&mut slots[1]), CPA_STATUS_SUCCESS);
    assert_eq!(rig.compress(&mut slots[2]), CPA_STATUS_SUCCESS);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(50) {
        assert_eq!(rig.poll(), CPA_STATUS_RETRY);
    }
    assert_eq!(rig.device.remove_session(rig.handles[0], rig.sessions[0]), CPA_STATUS_RETRY);
    rig.device.control("now revive").expect("a good script");
    rig.wait(&slots, 3);
    assert_eq!(rig.device.remove_session(rig.handles[0], rig.sessions[0]), CPA_STATUS_SUCCESS);
}

#[test]
fn filters_pick_instance_and_direction() {
    let rig = Rig::new("now instance=1 fail forever; at 1 op=decompress error -9");
    let mut slots = slots(2);
    let mut last = operation(CPA_DC_FLUSH_FINAL);
    assert_eq!(rig.compress_as(1, &mut slots[0], &mut last), CPA_STATUS_FAIL);
    assert_eq!(rig.compress_as(2, &mut slots[0], &mut last), CPA_STATUS_SUCCESS);
    rig.wait(&slots, 1);
    assert_eq!(slots[0].results.status, CPA_DC_OK);
    let back = rig.decompress_one(&slots[0].output(), 3000);
    assert_eq!((back.status(), back.results.status), (CPA_STATUS_FAIL, -9));
    let back = rig.decompress_one(&slots[0].output(), 3000);
    assert_eq!(back.output(), text(3000));
}

#[test]
fn an_absent_device_does_not_start() {
    let device = qat_sim::Device::new(&NoMemory);
    device.control("absent").expect("a good script");
    assert_eq!((device.is_available(), device.start()), (CPA_FALSE, CPA_STATUS_FAIL));
    device.control("reset; instances 0").expect("a good script");
    assert_eq!((device.is_available(), device.start()), (CPA_TRUE, CPA_STATUS_SUCCESS));
    let mut count = 9;
    // SAFETY: a local.
    assert_eq!(unsafe { device.num_instances(&raw mut count) }, CPA_STATUS_SUCCESS);
    assert_eq!(count, 0);
    assert!(device.control("instances 2").is_err(), "not while it runs");
    assert_eq!(device.stop(), CPA_STATUS_SUCCESS);
}

struct NoMemory;

impl qat_sim::Dma for NoMemory {
    fn read(&self, _iova: u64, _into: &mut [u8]) -> bool {
        false
    }
    fn write(&self, _iova: u64, _from: &[u8]) -> bool {
        false
    }
    fn configure(&self, _settings: &qat_sim::script::Settings) {}
    fn violations(&self) -> u64 {
        0
    }
}
