//! Polls: turns responses of the device, in the order of their delivery, into answers and
//! callbacks.

use super::requests::{Answer, Cookie, CookieState, Poller, Waiting};
use super::{lock, Instance, State};
use crate::counters::{add, Tally};
use crate::script::Order;
use qat_abi::*;
use std::sync::atomic::Ordering;

impl Instance {
    /// `icp_sal_DcPollInstance`, after the script's rules were applied.
    pub(crate) fn poll(
        &self,
        quota: u32,
        now_ns: &mut dyn FnMut() -> u64,
        tally: &Tally,
    ) -> CpaStatus {
        if self.state() == State::Restarting {
            return CPA_STATUS_RESTARTING;
        }
        // Another thread holds the lock, or the poll whose callback this is.
        let Ok(mut poller) = self.poller.try_lock() else { return CPA_STATUS_RETRY };
        let quota = if quota == 0 { usize::MAX } else { quota as usize };
        let mut answers = std::mem::take(&mut poller.answers);
        answers.clear();
        if self.orphans.load(Ordering::Acquire)
            && (self.state() == State::Error || !self.silent.load(Ordering::Acquire))
        {
            let dead = self.state() == State::Error;
            self.walking.store(dead, Ordering::SeqCst);
            if dead {
                add(&tally.violations, u64::from(self.inside.load(Ordering::SeqCst) > 1));
                // Walking all requests takes the real library a while.
                std::thread::yield_now();
            }
            self.take_orphans(quota, &mut answers);
            self.walking.store(false, Ordering::SeqCst);
            add(&tally.dummies, answers.len() as u64);
        }
        if answers.is_empty() {
            if self.state() == State::Error || self.silent.load(Ordering::Acquire) {
                poller.answers = answers;
                return CPA_STATUS_RETRY;
            }
            self.take_responses(&mut poller, quota, now_ns, &mut answers);
        }
        if answers.is_empty() {
            poller.answers = answers;
            return CPA_STATUS_RETRY;
        }

        for answer in &answers {
            if let Some(values) = answer.values {
                // SAFETY: results stay valid until the callback, which is still to come.
                unsafe { answer.results.write(values) };
            }
            if let Some(callback) = answer.callback {
                // SAFETY: the callback and tag of this very request.
                unsafe { callback(answer.tag, answer.status) };
            }
        }
        add(&tally.callbacks, answers.len() as u64);

        let mut requests = lock(&self.requests);
        for answer in &answers {
            let cookie = &mut requests.cookies[answer.slot];
            assert_eq!(cookie.state, CookieState::Answered, "an entry is given back once");
            cookie.state = CookieState::Free;
            requests.free.push(answer.slot);
            if let Some(session) = &mut requests.sessions[answer.session] {
                session.pending = session.pending.saturating_sub(1);
            }
        }
        drop(requests);
        let count = u32::try_from(answers.len()).expect("no more than the ring has");
        self.in_flight.fetch_sub(count, Ordering::Relaxed);
        poller.answers = answers;
        CPA_STATUS_SUCCESS
    }

    /// Makes dummy answers for requests that died with an epoch.
    fn take_orphans(&self, quota: usize, answers: &mut Vec<Answer>) {
        let mut requests = lock(&self.requests);
        let epoch = self.epoch();
        let dead = |cookie: &Cookie| cookie.state == CookieState::InFlight && cookie.epoch != epoch;
        for slot in 0..requests.cookies.len() {
            if answers.len() < quota && dead(&requests.cookies[slot]) {
                answers.push(requests.cookies[slot].answer(slot, CPA_STATUS_FAIL, None));
            }
        }
        if !requests.cookies.iter().any(dead) {
            self.orphans.store(false, Ordering::Release);
        }
    }

    fn take_responses(
        &self,
        poller: &mut Poller,
        quota: usize,
        now_ns: &mut dyn FnMut() -> u64,
        answers: &mut Vec<Answer>,
    ) {
        // Pairs with the Release of the engine's push.
        if self.done_count.load(Ordering::Acquire) > 0 {
            let mut done = lock(&self.done);
            std::mem::swap(&mut *done, &mut poller.gathered);
            self.done_count.store(0, Ordering::Relaxed);
            drop(done);
            let mut gathered = std::mem::take(&mut poller.gathered);
            for response in gathered.drain(..) {
                if response.due_ns == 0 && self.order == Order::Shuffled {
                    poller.ready.push_back(response);
                } else {
                    poller.waiting.push(Waiting(response));
                }
            }
            poller.gathered = gathered;
        }
        if !poller.waiting.is_empty() {
            let now = now_ns();
            while let Some(Waiting(response)) = poller.waiting.peek().copied() {
                if response.due_ns > now {
                    break;
                }
                poller.waiting.pop();
                poller.ready.push_back(response);
            }
        }
        if poller.ready.is_empty() {
            return;
        }
        let mut requests = lock(&self.requests);
        let epoch = self.epoch();
        while answers.len() < quota {
            let Some(response) = poller.ready.pop_front() else { break };
            if response.epoch != epoch {
                continue;
            }
            let cookie = &mut requests.cookies[response.slot];
            assert!(
                cookie.state == CookieState::InFlight && cookie.sequence == response.sequence,
                "instance {}: a request is answered exactly once",
                self.index
            );
            answers.push(cookie.answer(response.slot, response.status, Some(response.results)));
        }
    }
}
