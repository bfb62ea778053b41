//! Whether QATzip may still be called in this process, and which results may still be believed.
//!
//! QATzip keeps one set of buffers per device instance and lends instances to sessions call by
//! call. When a call fails, requests of it may still be with the device, and the next call on that
//! instance, of whichever session, takes their answers for its own and returns success. So the
//! first error closes the gate for good, for all sessions.
//!
//! That leaves a call that took the instance over before the failed call had returned to us. If
//! that one is back first, it finds the failed one still running. So a result counts only once
//! every call that was running at its end has ended well: [`Gate::finish`].

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::{Closed, QatZipError};

#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    closed: Option<Closed>,
    next: u64,
    /// Calls that have not returned, oldest first: at most one a session.
    running: Vec<u64>,
}

impl Gate {
    /// A call begins; `Err` if there must not be any more.
    pub(crate) fn enter(&self) -> Result<u64, QatZipError> {
        let mut state = self.lock();
        if let Some(closed) = &state.closed {
            return Err(closed.clone().into());
        }
        let ticket = state.next;
        state.next += 1;
        state.running.push(ticket);
        Ok(ticket)
    }

    /// The call has ended without having asked anything of the device.
    pub(crate) fn leave(&self, ticket: u64) {
        self.lock().running.retain(|&running| running != ticket);
        self.changed.notify_all();
    }

    /// The call has ended badly: there must not be another one. The first reason stays.
    pub(crate) fn fail(&self, ticket: u64, reason: Closed) {
        let mut state = self.lock();
        state.running.retain(|&running| running != ticket);
        // In one step with the end of the call: see `finish`.
        state.closed.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// The call has ended well. Waits for those that run at this moment to end as well, and fails
    /// if one does not.
    ///
    /// Bounded by the deadlines of those calls: whoever waits for a silent one closes the gate.
    pub(crate) fn finish(&self, ticket: u64) -> Result<(), QatZipError> {
        let mut state = self.lock();
        state.running.retain(|&running| running != ticket);
        self.changed.notify_all();
        let later = state.next;
        loop {
            if let Some(closed) = &state.closed {
                return Err(closed.clone().into());
            }
            if state.running.first().is_none_or(|&oldest| oldest >= later) {
                return Ok(());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No more calls. The first reason stays.
    pub(crate) fn close(&self, reason: Closed) {
        self.lock().closed.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// Why there are no more calls.
    pub(crate) fn closed(&self) -> Option<Closed> {
        self.lock().closed.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    fn reason(why: &str) -> Closed {
        Closed::new("qzCompress", why)
    }

    #[test]
    fn after_the_first_error_nothing_is_called_and_its_reason_stays() {
        let gate = Gate::default();
        let ticket = gate.enter().unwrap();
        assert!(gate.closed().is_none());
        gate.fail(ticket, reason("first"));
        gate.close(reason("second"));
        assert_eq!(gate.closed(), Some(reason("first")));
        assert_eq!(gate.enter(), Err(reason("first").into()));
        assert_eq!(gate.finish(ticket), Err(reason("first").into()));
    }

    /// Waits in another thread for the end of `ticket`, and checks that it does wait.
    fn waits(gate: &Arc<Gate>, ticket: u64) -> thread::JoinHandle<Result<(), QatZipError>> {
        let waiter = thread::spawn({
            let gate = Arc::clone(gate);
            move || gate.finish(ticket)
        });
        thread::sleep(Duration::from_millis(20));
        assert!(!waiter.is_finished(), "did not wait for a call that was running");
        waiter
    }

    #[test]
    fn a_result_waits_for_the_calls_that_run_at_its_end_and_for_no_others() {
        let gate = Arc::new(Gate::default());
        let [earlier, ours, later] = [0; 3].map(|_| gate.enter().unwrap());
        let waiter = waits(&gate, ours);
        let _after = gate.enter().unwrap();
        gate.leave(earlier);
        thread::sleep(Duration::from_millis(20));
        assert!(!waiter.is_finished(), "did not wait for the later of two");
        gate.leave(later);
        assert_eq!(waiter.join().unwrap(), Ok(()));
    }

    #[test]
    fn a_result_is_dropped_when_a_call_that_ran_ends_badly() {
        for first in [true, false] {
            let gate = Arc::new(Gate::default());
            let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
            let (ours, bad) = if first { (one, two) } else { (two, one) };
            let waiter = waits(&gate, ours);
            gate.fail(bad, reason("poll"));
            assert_eq!(waiter.join().unwrap(), Err(reason("poll").into()));
        }
    }

    #[test]
    fn giving_up_on_a_silent_call_wakes_those_who_wait_for_it() {
        let gate = Arc::new(Gate::default());
        let (_silent, ours) = (gate.enter().unwrap(), gate.enter().unwrap());
        let waiter = waits(&gate, ours);
        gate.close(reason("silent"));
        assert_eq!(waiter.join().unwrap(), Err(reason("silent").into()));
    }
}
