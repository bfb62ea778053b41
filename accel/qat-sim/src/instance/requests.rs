//! Requests and sessions of an instance, and the responses that a poll delivers.

use crate::deflate::Params;
use crate::faults::Effect;
use crate::script::Direction;
use qat_abi::*;
use std::cmp::Ordering as By;
use std::collections::{BinaryHeap, VecDeque};
use std::ffi::c_void;

/// The data for the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    pub(crate) slot: usize,
    pub(crate) epoch: u32,
    pub(crate) sequence: u64,
    pub(crate) direction: Direction,
    pub(crate) source: u64,
    pub(crate) target: u64,
    pub(crate) seed: u32,
    pub(crate) params: Params,
    pub(crate) effect: Effect,
    pub(crate) submitted_ns: u64,
}

/// The device's answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Response {
    pub(crate) slot: usize,
    pub(crate) epoch: u32,
    pub(crate) sequence: u64,
    /// Not to be delivered before this time.
    pub(crate) due_ns: u64,
    /// Orders responses due at the same time.
    pub(crate) tie: u64,
    pub(crate) status: CpaStatus,
    pub(crate) results: CpaDcRqResults,
}

/// A request's data in libqat.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cookie {
    pub(super) state: CookieState,
    pub(super) epoch: u32,
    pub(super) sequence: u64,
    pub(super) session: usize,
    pub(super) callback: CpaDcCallbackFn,
    pub(super) tag: *mut c_void,
    pub(super) results: *mut CpaDcRqResults,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CookieState {
    Free,
    InFlight,
    /// Its callback runs or ran; the entry is freed when the poll ends.
    Answered,
}

/// A session of this instance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Session {
    /// The caller's memory, which is the handle.
    pub(super) handle: CpaDcSessionHandle,
    pub(super) setup: CpaDcSessionSetupData,
    pub(super) callback: CpaDcCallbackFn,
    pub(super) pending: usize,
}

#[derive(Debug)]
pub(super) struct Requests {
    pub(super) cookies: Vec<Cookie>,
    pub(super) free: Vec<usize>,
    pub(super) sessions: Vec<Option<Session>>,
    pub(super) sequence: u64,
}

// SAFETY: the pointers are the caller's, stored for its callbacks; the API lets any thread poll.
unsafe impl Send for Requests {}

/// Responses in a poll.
#[derive(Debug, Default)]
pub(super) struct Poller {
    /// By due time.
    pub(super) waiting: BinaryHeap<Waiting>,
    /// In order of delivery.
    pub(super) ready: VecDeque<Response>,
    pub(super) gathered: Vec<Response>,
    pub(super) answers: Vec<Answer>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting(pub(super) Response);

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> By {
        // The heap's greatest element is the one due first.
        (other.0.due_ns, other.0.tie).cmp(&(self.0.due_ns, self.0.tie))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<By> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == By::Equal
    }
}

impl Eq for Waiting {}

/// The data for a caller's callback.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    pub(super) slot: usize,
    pub(super) session: usize,
    pub(super) callback: CpaDcCallbackFn,
    pub(super) tag: *mut c_void,
    pub(super) results: *mut CpaDcRqResults,
    pub(super) status: CpaStatus,
    /// `None` for a dummy, which does not change the results.
    pub(super) values: Option<CpaDcRqResults>,
}

// SAFETY: the pointers are the caller's, for its callback; the API lets any thread poll.
unsafe impl Send for Answer {}

impl Cookie {
    pub(super) fn answer(
        &mut self,
        slot: usize,
        status: CpaStatus,
        values: Option<CpaDcRqResults>,
    ) -> Answer {
        self.state = CookieState::Answered;
        let Self { session, callback, tag, results, .. } = *self;
        Answer { slot, session, callback, tag, results, status, values }
    }
}
