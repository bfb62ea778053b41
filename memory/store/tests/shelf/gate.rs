//! A disk that answers no read while a gate is shut, and pages written back to it.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use store::{format_backing, Batch, Page, Seen, Store, MAX_OBJECT};

use super::Shelf;

static GATE: (Mutex<bool>, Condvar) = (Mutex::new(true), Condvar::new());

thread_local! {
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
}

static HAS_COME: AtomicBool = AtomicBool::new(false);

fn wait_at_gate() {
    if IS_WATCHED.get() {
        HAS_COME.store(true, Ordering::Release);
    }
    let open = GATE.0.lock().unwrap();
    drop(GATE.1.wait_while(open, |open| !*open).unwrap());
}

pub(crate) fn set_gate(open: bool) {
    *GATE.0.lock().unwrap() = open;
    GATE.1.notify_all();
}

/// From now on [`has_come`] says whether the calling thread has come to the gate.
pub(crate) fn watch_this_thread() {
    HAS_COME.store(false, Ordering::Release);
    IS_WATCHED.set(true);
}

pub(crate) fn has_come() -> bool {
    HAS_COME.load(Ordering::Acquire)
}

pub(crate) fn is_gate_open() -> bool {
    *GATE.0.lock().unwrap()
}

/// Gives the store such a disk, with room for this many incompressible pages.
pub(crate) fn behind_the_gate(store: &Store, pages: u64) -> Shelf {
    let disk = Shelf::pausing(2 + usize::try_from(pages).unwrap(), wait_at_gate);
    format_backing(&disk, "shelf", store).unwrap();
    store.set_backing(disk.boxed(), "shelf").unwrap();
    disk
}

/// Noise with the page's number in it.
pub(crate) fn page(index: u64) -> Vec<u8> {
    let mut state = index << 32 | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()[7]
    };
    (0..4096).map(|_| next()).collect()
}

/// Writes back pages of noise.
pub(crate) fn put_out(store: &Arc<Store>, pages: Range<u64>) {
    let mut worker = store.worker().unwrap();
    let (mut batch, mut out) = (Batch::new(64), [0; MAX_OBJECT]);
    let number = pages.end - pages.start;
    for index in pages {
        let Page::Object { tag, len } = worker.look(index, &mut out).unwrap() else {
            panic!("page {index} is no object")
        };
        batch.add(&Seen { index, tag, bytes: &out[..len] });
        if batch.blocks() == 64 {
            assert_eq!(worker.write_back(&mut batch).unwrap().pages, 64);
        }
    }
    worker.write_back(&mut batch).unwrap();
    assert_eq!(store.stats().bd_count, number);
}
