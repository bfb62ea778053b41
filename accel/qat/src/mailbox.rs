//! Where the library's callbacks leave their word: one static mailbox per instance.
//!
//! A callback carries only a tag, and it may come late, twice, or after its engine has gone. So a tag is numbers, never
//! a pointer: instance, slot, generation. The mailbox of an instance is never freed, its generations never repeat
//! within 2^32 requests of a slot, and a callback whose generation is not the expected one is counted and ignored.
//! Any thread may run a callback; the engine that owns the instance collects.

use qat_abi::CpaStatus;
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::OnceLock;

/// Slots an instance can have: its ring takes 511 requests, so more would be of no use.
pub(crate) const MAX_SLOTS: usize = 512;
/// Instances a process can have: 16 devices of 64.
pub(crate) const MAX_INSTANCES: usize = 1024;
const WORDS: usize = MAX_SLOTS / 64;

static MAILBOXES: [OnceLock<Box<Mailbox>>; MAX_INSTANCES] =
    [const { OnceLock::new() }; MAX_INSTANCES];

/// What an instance's notifications last said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum State {
    /// It takes requests.
    Running = 0,
    /// The device has died (`CPA_INSTANCE_EVENT_FATAL_ERROR`).
    Fatal = 1,
    /// The device is being reset (`CPA_INSTANCE_EVENT_RESTARTING`).
    Restarting = 2,
}

/// The mailbox of one instance.
#[derive(Debug)]
pub(crate) struct Mailbox {
    state: AtomicU8,
    /// FATAL_ERROR events.
    pub(crate) fatals: AtomicU64,
    /// RESTARTED events.
    pub(crate) restarts: AtomicU64,
    /// Callbacks that belonged to no request: late ones of a former life, or a second one.
    pub(crate) strays: AtomicU64,
    /// Last generation handed out per slot, over all engines that ever had this instance. Owner only.
    last: [AtomicU32; MAX_SLOTS],
    /// Generation whose callback is awaited; 0 for none. Written by the owner.
    expected: [AtomicU32; MAX_SLOTS],
    /// Status the callback brought. Valid where the slot's bit in `done` is set.
    status: [AtomicI32; MAX_SLOTS],
    done: [AtomicU64; WORDS],
}

impl Mailbox {
    /// The mailbox of the instance with this ordinal, made at first use; `None` above the limit.
    pub(crate) fn of(ordinal: usize) -> Option<&'static Self> {
        Some(MAILBOXES.get(ordinal)?.get_or_init(|| {
            Box::new(Self {
                state: AtomicU8::new(State::Running as u8),
                fatals: AtomicU64::new(0),
                restarts: AtomicU64::new(0),
                strays: AtomicU64::new(0),
                last: [const { AtomicU32::new(0) }; MAX_SLOTS],
                expected: [const { AtomicU32::new(0) }; MAX_SLOTS],
                status: [const { AtomicI32::new(0) }; MAX_SLOTS],
                done: [const { AtomicU64::new(0) }; WORDS],
            })
        }))
    }

    fn existing(ordinal: usize) -> Option<&'static Self> {
        MAILBOXES.get(ordinal)?.get().map(|mailbox| &**mailbox)
    }

    pub(crate) fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Running,
            1 => State::Fatal,
            _ => State::Restarting,
        }
    }

    /// A new start of the library: the state is what it was made with, whatever the last life ended in.
    pub(crate) fn reset(&self) {
        self.state.store(State::Running as u8, Ordering::Release);
        self.fatals.store(0, Ordering::Relaxed);
        self.restarts.store(0, Ordering::Relaxed);
    }

    /// Announces a request in `slot` and gives its tag. The slot has no request under way.
    pub(crate) fn expect(&self, ordinal: u16, slot: u16) -> *mut c_void {
        let at = usize::from(slot);
        // 0 means "none", so it is skipped when the count wraps.
        let generation = self.last[at].load(Ordering::Relaxed).wrapping_add(1).max(1);
        self.last[at].store(generation, Ordering::Relaxed);
        self.expected[at].store(generation, Ordering::Release);
        let tag = u64::from(generation) << 32 | u64::from(ordinal) << 16 | u64::from(slot);
        // Numbers, not an address: nobody dereferences it.
        std::ptr::without_provenance_mut(usize::try_from(tag).expect("64-bit pointers"))
    }

    /// A new owner: nothing is awaited and nothing has come. Nobody may have requests on the instance.
    pub(crate) fn clear(&self) {
        for expected in &self.expected {
            expected.store(0, Ordering::Release);
        }
        for done in &self.done {
            done.store(0, Ordering::Release);
        }
    }

    /// The request in `slot` was refused after all.
    pub(crate) fn forget(&self, slot: u16) {
        self.expected[usize::from(slot)].store(0, Ordering::Release);
    }

    /// Slots whose callbacks have come in word `word`, each reported once.
    pub(crate) fn take_done(&self, word: usize) -> u64 {
        // The plain load keeps an idle poll free of locked instructions.
        if self.done[word].load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.done[word].swap(0, Ordering::AcqRel)
    }

    /// What the callback of a slot that `take_done` reported said.
    pub(crate) fn status(&self, slot: u16) -> CpaStatus {
        self.status[usize::from(slot)].load(Ordering::Relaxed)
    }

    fn deliver(&self, slot: usize, generation: u32, status: CpaStatus) {
        // The exchange makes "once" certain, whichever threads call. 0 is "none", so it claims nothing.
        let claimed = generation != 0
            && self.expected.get(slot).is_some_and(|expected| {
                expected
                    .compare_exchange(generation, 0, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            });
        if !claimed {
            self.strays.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.status[slot].store(status, Ordering::Relaxed);
        // Release: the results the library wrote before this callback are seen by whoever takes the bit.
        self.done[slot / 64].fetch_or(1 << (slot % 64), Ordering::Release);
    }
}

/// Splits a tag into instance, slot, generation.
fn parse(tag: *mut c_void) -> (usize, usize, u32) {
    let tag = tag.addr();
    (tag >> 16 & 0xffff, tag & 0xffff, u32::try_from(tag >> 32).unwrap_or(0))
}

/// `CpaDcCallbackFn` of every session.
pub(crate) extern "C" fn on_completion(tag: *mut c_void, status: CpaStatus) {
    let (ordinal, slot, generation) = parse(tag);
    if let Some(mailbox) = Mailbox::existing(ordinal) {
        mailbox.deliver(slot, generation, status);
    }
}

/// `CpaDcInstanceNotificationCbFunc` of every instance; the tag is its ordinal.
pub(crate) extern "C" fn on_event(_: qat_abi::CpaInstanceHandle, tag: *mut c_void, event: u32) {
    let Some(mailbox) = Mailbox::existing(tag.addr()) else { return };
    let state = match event {
        qat_abi::CPA_INSTANCE_EVENT_FATAL_ERROR => {
            mailbox.fatals.fetch_add(1, Ordering::Relaxed);
            State::Fatal
        }
        qat_abi::CPA_INSTANCE_EVENT_RESTARTING => State::Restarting,
        qat_abi::CPA_INSTANCE_EVENT_RESTARTED => {
            mailbox.restarts.fetch_add(1, Ordering::Relaxed);
            State::Running
        }
        _ => return,
    };
    mailbox.state.store(state as u8, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    // Ordinals no device has, so that these tests share no mailbox with others.
    fn mailbox(ordinal: u16) -> (&'static Mailbox, u16) {
        (Mailbox::of(usize::from(ordinal)).unwrap(), ordinal)
    }

    #[test]
    fn a_callback_is_reported_once_and_a_second_one_is_a_stray() {
        let (mailbox, ordinal) = mailbox(1001);
        let tag = mailbox.expect(ordinal, 70);
        on_completion(tag, -1);
        on_completion(tag, 0);
        assert_eq!(mailbox.strays.load(Ordering::Relaxed), 1);
        assert_eq!(mailbox.take_done(0), 0);
        assert_eq!(mailbox.take_done(1), 1 << 6);
        assert_eq!(mailbox.take_done(1), 0);
    }

    #[test]
    fn a_late_callback_does_not_touch_the_slots_next_request() {
        let (mailbox, ordinal) = mailbox(1002);
        let old = mailbox.expect(ordinal, 3);
        mailbox.forget(3);
        let new = mailbox.expect(ordinal, 3);
        on_completion(old, -1);
        assert_eq!((mailbox.take_done(0), mailbox.strays.load(Ordering::Relaxed)), (0, 1));
        on_completion(new, 0);
        assert_eq!((mailbox.take_done(0), mailbox.status(3)), (1 << 3, 0));
    }

    #[test]
    fn tags_nobody_gave_out_are_ignored() {
        for tag in [0, usize::MAX, 0xffff, 1003 << 16, (7 << 32) | (1003 << 16) | 511] {
            on_completion(std::ptr::without_provenance_mut(tag), 0);
            on_event(std::ptr::null_mut(), std::ptr::without_provenance_mut(tag), 2);
        }
        let (mailbox, _) = mailbox(1003);
        assert_eq!(mailbox.state(), State::Running);
    }
}
