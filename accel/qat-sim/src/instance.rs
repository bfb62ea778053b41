//! One compression instance: its ring, its sessions, its polls.
//!
//! A submission takes a cookie (the data for the answer) and queues a task (the data for the
//! device). An engine thread executes the task and queues a response. A poll matches the response
//! with the cookie, writes the results, runs the callback, and then frees the ring entry. A request
//! that dies with the device keeps its cookie, and a poll in state ERROR answers it as a dummy. The
//! epoch identifies dead requests: an answer of an older epoch is dropped before it touches memory.

#![expect(unsafe_code, reason = "runs the caller's callbacks and writes its results")]

mod poll;
mod requests;
mod submission;

use self::requests::{Cookie, CookieState, Poller, Requests, Session};
pub(crate) use self::requests::{Response, Task};
use crate::counters::{add, Tally};
use crate::script::Order;
use crate::sgl;
use qat_abi::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

/// State of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Running = 0,
    Error = 1,
    Restarting = 2,
}

/// Marks a thread in a submission or a poll.
pub(crate) struct Inside<'a>(&'a AtomicU32);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The callback for events, with its tag.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Notify(pub(crate) CpaDcInstanceNotificationCbFunc, pub(crate) *mut c_void);

// SAFETY: the tag is the caller's, handed back to its callback only.
unsafe impl Send for Notify {}

/// One instance.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Instance {
    pub(crate) index: usize,
    pub(crate) package: usize,
    ring: usize,
    order: Order,
    state: AtomicU8,
    /// Whether nothing is executed or delivered.
    pub(crate) silent: AtomicBool,
    started: AtomicBool,
    translation: AtomicUsize,
    in_flight: AtomicU32,
    /// Whether cookies of an ended epoch are due as dummies.
    orphans: AtomicBool,
    /// Threads in a submission or a poll, and whether one of them polls a dead instance. Maintained
    /// while the script has faults.
    inside: AtomicU32,
    walking: AtomicBool,
    /// Written with both `gate` and `requests` held, so it may be read with either.
    epoch: AtomicU32,
    requests: Mutex<Requests>,
    /// Tasks for the engines, with their number for a check without the lock.
    pub(crate) queue: Mutex<Vec<Task>>,
    pub(crate) queued: AtomicUsize,
    /// Responses of the engines, with their number.
    pub(crate) done: Mutex<Vec<Response>>,
    pub(crate) done_count: AtomicUsize,
    poller: Mutex<Poller>,
    /// Locked for reading by an engine that writes to memory and answers, for writing to end an
    /// epoch.
    pub(crate) gate: RwLock<()>,
    pub(crate) notify: Mutex<Notify>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Instance {
    pub(crate) fn new(index: usize, package: usize, ring: usize, order: Order) -> Self {
        let cookie = Cookie {
            state: CookieState::Free,
            epoch: 0,
            sequence: 0,
            session: 0,
            callback: None,
            tag: std::ptr::null_mut(),
            results: std::ptr::null_mut(),
        };
        Self {
            index,
            package,
            ring,
            order,
            state: AtomicU8::new(State::Running as u8),
            silent: AtomicBool::new(false),
            started: AtomicBool::new(false),
            translation: AtomicUsize::new(0),
            in_flight: AtomicU32::new(0),
            orphans: AtomicBool::new(false),
            inside: AtomicU32::new(0),
            walking: AtomicBool::new(false),
            epoch: AtomicU32::new(0),
            requests: Mutex::new(Requests {
                cookies: vec![cookie; ring - 1],
                free: (0..ring - 1).rev().collect(),
                sessions: Vec::new(),
                sequence: 0,
            }),
            queue: Mutex::new(Vec::with_capacity(ring)),
            queued: AtomicUsize::new(0),
            done: Mutex::new(Vec::with_capacity(ring)),
            done_count: AtomicUsize::new(0),
            poller: Mutex::new(Poller::default()),
            gate: RwLock::new(()),
            notify: Mutex::new(Notify(None, std::ptr::null_mut())),
        }
    }

    pub(crate) fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Running,
            1 => State::Error,
            _ => State::Restarting,
        }
    }

    pub(crate) fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// The status with which the state refuses a call that needs a running device.
    pub(crate) fn objection(&self) -> Option<CpaStatus> {
        match self.state() {
            State::Running => None,
            State::Error => Some(CPA_STATUS_FAIL),
            State::Restarting => Some(CPA_STATUS_RESTARTING),
        }
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed).into()
    }

    pub(crate) fn session_count(&self) -> u64 {
        lock(&self.requests).sessions.iter().flatten().count() as u64
    }

    pub(crate) fn is_started(&self) -> bool {
        self.started.load(Ordering::Acquire)
    }

    pub(crate) fn start(&self) {
        self.started.store(true, Ordering::Release);
    }

    pub(crate) fn set_translation(&self, translation: CpaVirtualToPhysical) {
        let address = translation.map_or(0, |function| function as usize);
        self.translation.store(address, Ordering::Release);
    }

    pub(crate) fn translation(&self) -> Option<sgl::Translation> {
        let address = self.translation.load(Ordering::Acquire);
        if address == 0 {
            return None;
        }
        // SAFETY: only `set_translation` writes it, from a function pointer of this very type.
        Some(unsafe { std::mem::transmute::<usize, sgl::Translation>(address) })
    }

    /// The epoch, for an engine that holds the gate.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Ends the epoch: requests in flight will never be executed. With `answered`, polls answer
    /// them as dummies.
    pub(crate) fn end_epoch(&self, answered: bool) {
        let _gate = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        let requests = lock(&self.requests);
        self.epoch.fetch_add(1, Ordering::AcqRel);
        if answered {
            self.orphans.store(true, Ordering::Release);
        }
        drop(requests);
    }

    /// Stops the instance: requests in flight are never answered. False while a poll runs.
    pub(crate) fn stop(&self) -> bool {
        let Ok(mut poller) = self.poller.try_lock() else { return false };
        self.end_epoch(false);
        let mut requests = lock(&self.requests);
        requests.free = (0..self.ring - 1).rev().collect();
        requests.cookies.iter_mut().for_each(|cookie| cookie.state = CookieState::Free);
        requests.sessions.iter_mut().flatten().for_each(|session| session.pending = 0);
        *poller = Poller::default();
        self.in_flight.store(0, Ordering::Relaxed);
        self.orphans.store(false, Ordering::Release);
        self.started.store(false, Ordering::Release);
        true
    }

    /// Makes a session, and replaces an existing one with this handle.
    pub(crate) fn open_session(
        &self,
        handle: CpaDcSessionHandle,
        setup: CpaDcSessionSetupData,
        callback: CpaDcCallbackFn,
    ) {
        let mut requests = lock(&self.requests);
        let session = Some(Session { handle, setup, callback, pending: 0 });
        let same =
            |slot: &&mut Option<Session>| slot.is_none_or(|session| session.handle == handle);
        match requests.sessions.iter_mut().find(same) {
            Some(slot) => *slot = session,
            None => requests.sessions.push(session),
        }
    }

    /// `cpaDcRemoveSession`.
    pub(crate) fn close_session(&self, handle: CpaDcSessionHandle) -> CpaStatus {
        let mut requests = lock(&self.requests);
        let of = |slot: &&mut Option<Session>| slot.is_some_and(|open| open.handle == handle);
        match requests.sessions.iter_mut().find(of) {
            None => CPA_STATUS_INVALID_PARAM,
            Some(slot) if slot.is_some_and(|session| session.pending > 0) => CPA_STATUS_RETRY,
            Some(slot) => {
                *slot = None;
                CPA_STATUS_SUCCESS
            }
        }
    }

    /// Records that a thread is in a submission or a poll, until the returned value is dropped.
    /// qatlib 24.02 polls a dead instance without the ring's lock, so a thread that comes in
    /// meanwhile spoils its lists: that counts as a violation.
    pub(crate) fn enter(&self, tally: &Tally) -> Inside<'_> {
        self.inside.fetch_add(1, Ordering::SeqCst);
        add(&tally.violations, u64::from(self.walking.load(Ordering::SeqCst)));
        Inside(&self.inside)
    }
}
