//! The mailbox of an instance, in which the library's callbacks store their results. Mailboxes are
//! static.
//!
//! A callback has only a tag, and may come late, twice, or after its engine is gone. So a tag
//! consists of numbers and is never a pointer: instance, slot, generation. A mailbox is never
//! freed, its generations repeat only after 2^32 requests of a slot, and a callback with another
//! generation than expected is counted and ignored. Any thread may run a callback; the engine that
//! owns the instance collects.
//!
//! A slot's expected generation and its result share one 64-bit word, so that both change in one
//! step: the first to change it (the callback, another callback, or an owner that gives up)
//! decides. The bit in `done` then publishes the library's writes to the owner. `scripts/loom`
//! proves that, and that each part is necessary.

use crate::sync::{exchange, step, strong, AtomicU32, AtomicU64, AtomicU8, Ordering, Site};
use qat_abi::CpaStatus;
use std::array::from_fn;
use std::ffi::c_void;
use std::sync::OnceLock;

/// Slots of an instance: its ring holds 511 requests. A model needs two.
pub(crate) const MAX_SLOTS: usize = if cfg!(loom) { 2 } else { 512 };
/// Instances of a process: 16 devices of 64.
pub(crate) const MAX_INSTANCES: usize = 1024;
const WORDS: usize = MAX_SLOTS.div_ceil(64);

static MAILBOXES: [OnceLock<Box<Mailbox>>; MAX_INSTANCES] =
    [const { OnceLock::new() }; MAX_INSTANCES];

/// The last event of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(loom), derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[repr(u8)]
pub enum State {
    /// The instance takes requests.
    Running = 0,
    /// The device has died (`CPA_INSTANCE_EVENT_FATAL_ERROR`).
    Fatal = 1,
    /// The device is being reset (`CPA_INSTANCE_EVENT_RESTARTING`).
    Restarting = 2,
}

/// The events of an instance so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Events {
    pub(crate) state: State,
    /// FATAL_ERROR events.
    pub(crate) fatals: u64,
    /// RESTARTED events.
    pub(crate) restarts: u64,
}

/// The mailbox of one instance.
#[derive(Debug)]
pub(crate) struct Mailbox {
    state: AtomicU8,
    /// FATAL_ERROR events.
    pub(crate) fatals: AtomicU64,
    /// RESTARTED events.
    pub(crate) restarts: AtomicU64,
    /// Callbacks without a request: late or repeated ones.
    pub(crate) strays: AtomicU64,
    /// Last generation of each slot, over all engines that ever had this instance. Owner only.
    last: [AtomicU32; MAX_SLOTS],
    /// High half: the expected generation, 0 for none. Low half: the callback's status, valid from
    /// when the slot's bit is taken until the next request.
    requests: [AtomicU64; MAX_SLOTS],
    /// One bit for each slot whose callback has come.
    done: [AtomicU64; WORDS],
}

impl Mailbox {
    fn new() -> Self {
        Self {
            state: AtomicU8::new(State::Running as u8),
            fatals: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
            strays: AtomicU64::new(0),
            last: from_fn(|_| AtomicU32::new(0)),
            requests: from_fn(|_| AtomicU64::new(0)),
            done: from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// The mailbox of the instance with this ordinal, made at first use; `None` above the limit.
    pub(crate) fn of(ordinal: usize) -> Option<&'static Self> {
        Some(MAILBOXES.get(ordinal)?.get_or_init(|| Box::new(Self::new())))
    }

    fn existing(ordinal: usize) -> Option<&'static Self> {
        MAILBOXES.get(ordinal)?.get().map(|mailbox| &**mailbox)
    }

    pub(crate) fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            0 => State::Running,
            1 => State::Fatal,
            _ => State::Restarting,
        }
    }

    /// The state and the counts. If a restart is counted, the change of state and the death before
    /// it are visible.
    pub(crate) fn events(&self) -> Events {
        // The count first: a reader that saw the restart with the old state would handle the
        // restart, and miss it when the state changes later.
        let restarts = self.restarts.load(strong(Site::RestartAcquire, Ordering::Acquire));
        Events { state: self.state(), fatals: self.fatals.load(Ordering::Relaxed), restarts }
    }

    /// Resets the state for a new start of the library.
    pub(crate) fn reset(&self) {
        self.state.store(State::Running as u8, Ordering::Relaxed);
        self.fatals.store(0, Ordering::Relaxed);
        self.restarts.store(0, Ordering::Relaxed);
    }

    /// Announces a request in `slot` and returns its tag. The slot must have no request in flight,
    /// and no callback that `take_done` has yet to report.
    pub(crate) fn expect(&self, ordinal: u16, slot: u16) -> *mut c_void {
        let at = usize::from(slot);
        let count = u32::from(step(Site::Generation));
        // 0 means "none", so it is skipped when the count wraps.
        let generation = self.last[at].load(Ordering::Relaxed).wrapping_add(count).max(1);
        self.last[at].store(generation, Ordering::Relaxed);
        // Relaxed: the library's submission orders this before the callback, like all memory of the
        // request.
        self.requests[at].store(awaited(generation), Ordering::Relaxed);
        let tag = u64::from(generation) << 32 | u64::from(ordinal) << 16 | u64::from(slot);
        // A number and not an address: it is never dereferenced.
        std::ptr::without_provenance_mut(usize::try_from(tag).expect("64-bit pointers"))
    }

    /// Clears the mailbox for a new owner. There must be no requests on the instance, and no
    /// callback running.
    pub(crate) fn clear(&self) {
        for word in self.requests.iter().chain(&self.done) {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Withdraws a request in `slot` that was refused; `false` if its callback has come
    /// nevertheless. Then `take_done` reports it, and the request is in flight until then.
    #[must_use = "a request whose callback has come is under way until it is taken"]
    pub(crate) fn give_up(&self, slot: u16) -> bool {
        let at = usize::from(slot);
        let request = awaited(self.last[at].load(Ordering::Relaxed));
        exchange(Site::GiveUp, &self.requests[at], request, 0)
    }

    /// Slots of word `word` whose callbacks have come; each is reported once.
    pub(crate) fn take_done(&self, word: usize) -> u64 {
        // The plain load avoids an atomic read-modify-write in an idle poll.
        if self.done[word].load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.done[word].swap(0, strong(Site::DoneAcquire, Ordering::Acquire))
    }

    /// The callback's status for a slot that `take_done` reported.
    pub(crate) fn status(&self, slot: u16) -> CpaStatus {
        let request = self.requests[usize::from(slot)].load(Ordering::Relaxed);
        (request & 0xffff_ffff) as CpaStatus
    }

    fn deliver(&self, slot: usize, generation: u32, status: CpaStatus) {
        // One exchange claims the request and stores the status, so exactly one callback succeeds,
        // with its own status. 0 means "none" and claims nothing.
        let claimed = generation != 0
            && self.requests.get(slot).is_some_and(|request| {
                let answered = u64::from(status.cast_unsigned());
                exchange(Site::Claim, request, awaited(generation), answered)
            });
        if !claimed {
            self.strays.fetch_add(1, Ordering::Relaxed);
            return;
        }
        // Release: publishes the library's writes before this callback to the thread that takes the
        // bit.
        let release = strong(Site::DoneRelease, Ordering::Release);
        self.done[slot / 64].fetch_or(1 << (slot % 64), release);
    }

    fn event(&self, event: u32) {
        let set = |state| self.state.store(state as u8, Ordering::Relaxed);
        match event {
            qat_abi::CPA_INSTANCE_EVENT_FATAL_ERROR => {
                self.fatals.fetch_add(1, Ordering::Relaxed);
                set(State::Fatal);
            }
            qat_abi::CPA_INSTANCE_EVENT_RESTARTING => set(State::Restarting),
            qat_abi::CPA_INSTANCE_EVENT_RESTARTED => {
                set(State::Running);
                // Last, and Release: see `events`.
                self.restarts.fetch_add(1, strong(Site::RestartRelease, Ordering::Release));
            }
            _ => {}
        }
    }
}

/// The word of a slot whose request of this generation is in flight.
fn awaited(generation: u32) -> u64 {
    u64::from(generation) << 32
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
    if let Some(mailbox) = Mailbox::existing(tag.addr()) {
        mailbox.event(event);
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    // Ordinals that no device has, so that these tests share no mailbox with others.
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
        assert!(mailbox.give_up(3));
        let new = mailbox.expect(ordinal, 3);
        on_completion(old, -1);
        assert_eq!((mailbox.take_done(0), mailbox.strays.load(Ordering::Relaxed)), (0, 1));
        on_completion(new, 0);
        assert_eq!((mailbox.take_done(0), mailbox.status(3)), (1 << 3, 0));
    }

    #[test]
    fn a_callback_before_the_refusal_counts() {
        let (mailbox, ordinal) = mailbox(1004);
        let tag = mailbox.expect(ordinal, 511);
        on_completion(tag, i32::MIN);
        assert!(!mailbox.give_up(511));
        assert_eq!((mailbox.take_done(7), mailbox.status(511)), (1 << 63, i32::MIN));
    }

    #[test]
    fn a_new_owner_gets_no_result_of_the_last_one() {
        let (mailbox, ordinal) = mailbox(1005);
        let [came, late] = [1, 2].map(|slot| mailbox.expect(ordinal, slot));
        on_completion(came, 0);
        mailbox.clear();
        on_completion(late, 0);
        assert_eq!((mailbox.take_done(0), mailbox.strays.load(Ordering::Relaxed)), (0, 1));
    }

    #[test]
    fn unissued_tags_are_ignored() {
        for tag in [0, usize::MAX, 0xffff, 1003 << 16, (7 << 32) | (1003 << 16) | 511] {
            on_completion(std::ptr::without_provenance_mut(tag), 0);
            on_event(std::ptr::null_mut(), std::ptr::without_provenance_mut(tag), 2);
        }
        let (mailbox, _) = mailbox(1003);
        assert_eq!(mailbox.state(), State::Running);
    }
}
