//! A submission: a request is checked, gets a cookie, and is queued.

#![expect(unsafe_code, reason = "reads the caller's lists and results")]

use super::requests::{Cookie, CookieState, Session, Task};
use super::{lock, Instance};
use crate::counters::Tally;
use crate::deflate::Params;
use crate::faults::Effect;
use crate::sgl::{self, Call};
use qat_abi::*;
use std::sync::atomic::Ordering;

impl Instance {
    /// Accepts a request, or returns the status of its refusal. The caller has checked the state.
    ///
    /// # Safety
    /// The pointers of `call` are null or valid as Intel's API requires, the results until the
    /// callback.
    pub(crate) unsafe fn submit(
        &self,
        call: &Call,
        effect: Effect,
        submitted_ns: u64,
        tally: &Tally,
    ) -> CpaStatus {
        if !self.is_started() {
            return CPA_STATUS_FAIL;
        }
        let Some(translation) = self.translation() else { return CPA_STATUS_FAIL };
        // SAFETY: the caller's promise.
        let lists = match unsafe { sgl::check(call) } {
            Ok(lists) => lists,
            Err(status) => return status,
        };

        let mut requests = lock(&self.requests);
        let of = |slot: &Option<Session>| slot.is_some_and(|open| open.handle == call.session);
        let Some(session) = requests.sessions.iter().position(of) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        let Some(Session { setup, callback, .. }) = requests.sessions[session] else {
            return CPA_STATUS_INVALID_PARAM;
        };
        if let Some(status) = sgl::against(&setup, call, &lists) {
            return status;
        }
        let Some(slot) = requests.free.last().copied() else { return CPA_STATUS_RETRY };
        // Writing the lists comes last, as in libqat: a request that is refused leaves no trace
        // there. SAFETY: `check` has walked both lists.
        let (source, target) = match unsafe { sgl::translate(call, translation) } {
            Ok(both) => both,
            Err(status) => return status,
        };
        // SAFETY: not null, and the caller's promise.
        let seed = unsafe { (*call.results).checksum };
        // The state is checked again, now that an end of the epoch would have to wait for this
        // call.
        if let Some(status) = self.objection() {
            return status;
        }
        requests.free.pop();
        requests.sequence += 1;
        let (sequence, epoch) = (requests.sequence, self.epoch());
        requests.cookies[slot] = Cookie {
            state: CookieState::InFlight,
            epoch,
            sequence,
            session,
            callback,
            tag: call.tag,
            results: call.results,
        };
        if let Some(session) = &mut requests.sessions[session] {
            session.pending += 1;
        }
        let task = Task {
            slot,
            epoch,
            sequence,
            direction: call.direction,
            source,
            target,
            seed,
            params: params(&setup, call),
            effect,
            submitted_ns,
        };
        let in_flight = u64::from(self.in_flight.fetch_add(1, Ordering::Relaxed) + 1);
        if in_flight > tally.max_in_flight.load(Ordering::Relaxed) {
            tally.max_in_flight.store(in_flight, Ordering::Relaxed);
        }
        // Queued with the requests held: the queue is in the order of the sequence.
        let mut queue = lock(&self.queue);
        queue.push(task);
        self.queued.store(queue.len(), Ordering::Release);
        CPA_STATUS_SUCCESS
    }
}

fn params(setup: &CpaDcSessionSetupData, call: &Call) -> Params {
    Params {
        level: setup.compLevel,
        huffman: setup.huffType,
        best: setup.autoSelectBestHuffmanTree,
        checksum: setup.checksum,
        last: call.flush == CPA_DC_FLUSH_FINAL,
        recover: call.recover,
    }
}
