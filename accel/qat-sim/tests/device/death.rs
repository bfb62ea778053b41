//! A device that dies, and one that comes back.

use crate::rig::{operation, setup, text, Rig, Slot};
use qat_abi::*;
use std::ffi::c_void;
use std::sync::Mutex;
use std::time::{Duration, Instant};

type Events = Mutex<Vec<u32>>;

unsafe extern "C" fn note(_instance: CpaInstanceHandle, tag: *mut c_void, event: u32) {
    // SAFETY: every tag of these tests is an `Events` that outlives its rig.
    unsafe { &*tag.cast::<Events>() }.lock().expect("no panic").push(event);
}

/// A rig whose first instance tells its events.
fn rig(script: &str) -> (Rig, &'static Events) {
    let rig = Rig::new(script);
    let events: &'static Events = Box::leak(Box::default());
    let tag = std::ptr::from_ref(events).cast_mut().cast();
    assert_eq!(rig.device.set_notification(rig.handles[0], Some(note), tag), CPA_STATUS_SUCCESS);
    (rig, events)
}

fn submit(rig: &Rig, count: usize) -> Vec<Slot> {
    let mut slots: Vec<Slot> = (0..count).map(|_| Slot::new()).collect();
    for slot in &mut slots {
        slot.fill(&text(3000), 4000);
        assert_eq!(rig.compress(slot), CPA_STATUS_SUCCESS);
    }
    slots
}

fn events(events: &Events) -> Vec<u32> {
    events.lock().expect("no panic").clone()
}

#[test]
fn death_is_silence_then_an_event_then_dummies() {
    // Silence first, so that nothing is answered before the device dies.
    let (rig, seen) = rig("now silence; at 21 fatal");
    let mut slots = submit(&rig, 30);
    assert_eq!(rig.poll(), CPA_STATUS_RETRY, "first there is silence");
    assert_eq!(events(seen), []);

    assert_eq!(rig.device.poll_events(), CPA_STATUS_SUCCESS);
    assert_eq!(events(seen), [CPA_INSTANCE_EVENT_FATAL_ERROR]);
    let mut late = Slot::new();
    late.fill(&text(100), 512);
    assert_eq!(rig.compress(&mut late), CPA_STATUS_FAIL);
    assert_eq!(rig.device.poll(rig.handles[0], 10), CPA_STATUS_SUCCESS, "a quota of dummies");
    assert_eq!(slots.iter().map(Slot::times).sum::<u32>(), 10);
    assert_eq!(rig.poll(), CPA_STATUS_SUCCESS);
    for slot in &slots {
        assert_eq!((slot.times(), slot.status()), (1, CPA_STATUS_FAIL));
        assert_eq!(slot.results.status, 77, "results are untouched");
        assert!(slot.memory().iter().all(|byte| *byte == 0xee), "so is memory");
    }
    assert_eq!(rig.poll(), CPA_STATUS_RETRY);
    let counters = rig.counters();
    assert_eq!((counters.dummies, counters.in_flight), (30, 0));

    // It stays dead until a script command restarts it; then handles and sessions are good again.
    rig.device.control("now restarting; now restarted").expect("a good script");
    rig.device.poll_events();
    let tail = [CPA_INSTANCE_EVENT_RESTARTING, CPA_INSTANCE_EVENT_RESTARTED];
    assert_eq!(events(seen)[1..], tail);
    slots.truncate(1);
    assert_eq!(rig.compress(&mut slots[0]), CPA_STATUS_SUCCESS);
    rig.wait(&slots, 2);
    assert_eq!((slots[0].status(), slots[0].results.status), (CPA_STATUS_SUCCESS, CPA_DC_OK));
}

#[test]
fn a_reset_waits_for_the_rings_to_be_polled_empty() {
    let (rig, seen) = rig("now silence; at 5 reset 0");
    let slots = submit(&rig, 5);
    rig.device.poll_events();
    let told = [CPA_INSTANCE_EVENT_FATAL_ERROR, CPA_INSTANCE_EVENT_RESTARTING];
    assert_eq!(events(seen), told);
    rig.device.poll_events();
    assert_eq!(events(seen), told, "told once, and not restarting yet");
    assert_eq!(rig.poll(), CPA_STATUS_SUCCESS, "dummies, not -7");
    assert!(slots.iter().all(|slot| slot.times() == 1));
    rig.device.poll_events();
    assert_eq!(events(seen)[2..], [CPA_INSTANCE_EVENT_RESTARTED]);
    assert_eq!(rig.compress_one(&text(100), 512).results.status, CPA_DC_OK);
}

#[test]
fn restarting_answers_minus_seven_to_everything() {
    let (rig, seen) = rig("now restarting");
    rig.device.poll_events();
    assert_eq!(events(seen), [CPA_INSTANCE_EVENT_RESTARTING]);
    let mut slot = Slot::new();
    slot.fill(&text(100), 512);
    assert_eq!(rig.compress(&mut slot), CPA_STATUS_RESTARTING);
    assert_eq!(rig.poll(), CPA_STATUS_RESTARTING);
    let removed = rig.device.remove_session(rig.handles[0], rig.sessions[0]);
    assert_eq!(removed, CPA_STATUS_RESTARTING);
    rig.device.control("now restarted").expect("a good script");
    assert_eq!(rig.compress(&mut slot), CPA_STATUS_RESTARTING, "not before the event is polled");
    rig.device.poll_events();
    assert_eq!(rig.compress(&mut slot), CPA_STATUS_SUCCESS);
    rig.wait(std::slice::from_ref(&slot), 1);
}

#[test]
fn packages_die_alone() {
    let (rig, seen) = rig("packages 4; now instance=1 fatal");
    rig.device.poll_events();
    assert_eq!(events(seen), [], "instance 0 is of another package");
    let mut slot = Slot::new();
    slot.fill(&text(100), 512);
    let mut last = operation(CPA_DC_FLUSH_FINAL);
    assert_eq!(rig.compress_as(1, &mut slot, &mut last), CPA_STATUS_FAIL);
    assert_eq!(rig.compress_as(0, &mut slot, &mut last), CPA_STATUS_SUCCESS);
    rig.wait(std::slice::from_ref(&slot), 1);
}

#[test]
fn a_late_request_of_a_dead_device_writes_nothing() {
    // On a machine that stands still, the first ones may be answered before the device dies.
    let died_in_time = || {
        let start = Instant::now();
        let (rig, _) = rig("now late 1500 forever; at 4 fatal");
        let slots = submit(&rig, 4);
        rig.device.poll_events();
        (start.elapsed() < Duration::from_millis(1500)).then_some((rig, slots))
    };
    let (rig, slots) = (0..20).find_map(|_| died_in_time()).expect("the machine moves");
    rig.wait(&slots, 4);
    assert!(slots.iter().all(|slot| slot.status() == CPA_STATUS_FAIL));
    rig.device.control("now restarting; now restarted").expect("a good script");
    rig.device.poll_events();
    // Past the time at which the late ones would have been carried out.
    std::thread::sleep(Duration::from_millis(1700));
    rig.poll();
    for slot in &slots {
        assert_eq!(slot.times(), 1);
        assert!(slot.memory().iter().all(|byte| *byte == 0xee));
    }
}

#[test]
fn a_stopped_instance_drops_its_requests_and_can_start_again() {
    let rig = Rig::new("now silence");
    let mut slots = submit(&rig, 20);
    assert_eq!(rig.device.stop_instance(rig.handles[0]), CPA_STATUS_SUCCESS);
    assert_eq!(rig.compress(&mut slots[0]), CPA_STATUS_FAIL, "not started");
    rig.device.control("now revive").expect("a good script");
    // SAFETY: no intermediate buffers.
    let started = unsafe { rig.device.start_instance(rig.handles[0], 0, std::ptr::null_mut()) };
    assert_eq!(started, CPA_STATUS_SUCCESS);
    assert_eq!(rig.compress(&mut slots[0]), CPA_STATUS_SUCCESS);
    rig.wait(&slots, 1);
    assert_eq!(rig.poll(), CPA_STATUS_RETRY);
    assert!(slots[1..].iter().all(|slot| slot.times() == 0));
    assert!(slots[1..].iter().all(|slot| slot.memory().iter().all(|byte| *byte == 0xee)));
}

#[test]
fn answers_that_were_not_polled_in_time_die_with_the_device() {
    let (rig, _) = rig("engine stored");
    let slots = submit(&rig, 10);
    // Carried out and answered, but nobody has polled.
    let start = Instant::now();
    while rig.counters().plain_bytes < 30_000 {
        assert!(start.elapsed() < Duration::from_secs(300));
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(5));
    rig.device.control("now fatal").expect("a good script");
    rig.device.poll_events();
    assert_eq!(rig.poll(), CPA_STATUS_SUCCESS);
    rig.device.control("now restarting; now restarted").expect("a good script");
    rig.device.poll_events();
    assert_eq!(rig.poll(), CPA_STATUS_RETRY, "nothing is left of the old answers");
    for slot in &slots {
        assert_eq!((slot.times(), slot.status(), slot.results.status), (1, CPA_STATUS_FAIL, 77));
    }
    assert_eq!(rig.compress_one(&text(100), 512).results.status, CPA_DC_OK);
}

#[test]
fn a_dead_device_finishes_no_job() {
    // The slowest request there is, and death in the middle of it.
    let slow = CpaDcSessionSetupData { compLevel: 12, ..setup() };
    for pause_us in [200, 500, 1000, 2000, 3000] {
        let rig = Rig::with("", slow);
        let mut slot = Slot::new();
        slot.fill(&text(78_000), 80_000);
        assert_eq!(rig.compress(&mut slot), CPA_STATUS_SUCCESS);
        std::thread::sleep(Duration::from_micros(pause_us));
        rig.device.control("now fatal").expect("a good script");
        rig.device.poll_events();
        rig.wait(std::slice::from_ref(&slot), 1);
        let before = slot.memory();
        // From its answer on, memory is the caller's again.
        std::thread::sleep(Duration::from_millis(100));
        assert!(slot.memory() == before, "written after the answer");
    }
}
