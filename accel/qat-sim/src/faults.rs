//! Executes the script: decides on which submission, poll or time a rule acts.

use crate::script::{Action, Count, Direction, Entry, Rule, Stuck, Trigger};
use qat_abi::{CpaStatus, CPA_STATUS_FAIL, CPA_STATUS_RETRY};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The effect on one accepted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Effect {
    /// No fault.
    #[default]
    None,
    /// The callback has SUCCESS; the results have this status.
    Status(i32),
    /// The callback has FAIL; the results have this status.
    Error(i32),
    /// The request is executed this many milliseconds late.
    Late(u64),
    /// One bit of the output is flipped.
    Flip,
    /// The checksum is wrong.
    Crc,
    /// The results report this many produced bytes.
    Produced(u32),
}

/// The script's decision on one submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Refuse with this status.
    Refuse(CpaStatus),
    /// Accept, if nothing else prevents it; otherwise return `rule` with `give_back`.
    Accept { effect: Effect, rule: usize },
    /// The call never returns.
    Hang(Stuck),
}

/// The script's decision on a poll that does not work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    Fails,
    Hangs(Stuck),
}

/// A fault of whole instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deed {
    pub(crate) instance: Option<usize>,
    pub(crate) action: Action,
}

/// The rules and their progress.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Checked before the lock is taken, so that a device without a script pays nothing.
    armed: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Progress>,
    first_ns: Option<u64>,
}

#[derive(Debug)]
struct Progress {
    rule: Rule,
    /// Submissions that matched the filter.
    seen: u64,
    /// Whether an `at`, `after` or `now` has fired; they fire once.
    fired: bool,
    /// Submissions or polls for which the action still applies.
    left: u64,
}

const NO_RULE: usize = usize::MAX;

impl Faults {
    pub(crate) fn new(rules: &[Rule]) -> Self {
        let faults = Self::default();
        faults.set(rules);
        faults
    }

    /// Replaces all rules and resets their counts.
    pub(crate) fn set(&self, rules: &[Rule]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = |rule: &Rule| Progress { rule: *rule, seen: 0, fired: false, left: 0 };
        *state = State { rules: rules.iter().map(progress).collect(), first_ns: None };
        self.armed.store(!rules.is_empty(), Ordering::Release);
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    /// Decides on one submission; `deeds` gets immediate faults.
    pub(crate) fn submission(
        &self,
        instance: usize,
        direction: Direction,
        now_ns: u64,
        deeds: &mut Vec<Deed>,
    ) -> Verdict {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.first_ns.get_or_insert(now_ns);
        state.tick(now_ns, deeds);
        let mut verdict = Verdict::Accept { effect: Effect::None, rule: NO_RULE };
        for (index, progress) in state.rules.iter_mut().enumerate() {
            let rule = progress.rule;
            if rule.instance.is_some_and(|only| only != instance)
                || rule.direction.is_some_and(|only| only != direction)
            {
                continue;
            }
            progress.seen += 1;
            match rule.trigger {
                Trigger::At(number) if progress.seen == number => progress.fire(deeds),
                Trigger::Every(number) if progress.seen % number == 0 => progress.fire(deeds),
                _ => {}
            }
            // The first matching rule decides; the others retain their counts.
            if verdict != (Verdict::Accept { effect: Effect::None, rule: NO_RULE })
                || progress.left == 0
            {
                continue;
            }
            let accept = |effect| Verdict::Accept { effect, rule: index };
            verdict = match rule.action {
                Action::Retry(_) => Verdict::Refuse(CPA_STATUS_RETRY),
                Action::Fail(_) => Verdict::Refuse(CPA_STATUS_FAIL),
                Action::Status(code, _) => accept(Effect::Status(code)),
                Action::Error(code, _) => accept(Effect::Error(code)),
                Action::Late(ms, _) => accept(Effect::Late(ms)),
                Action::Flip(_) => accept(Effect::Flip),
                Action::Crc(_) => accept(Effect::Crc),
                Action::Produced(bytes, _) => accept(Effect::Produced(bytes)),
                Action::Hang(Entry::Submit, stuck, _) => Verdict::Hang(stuck),
                _ => continue,
            };
            progress.spend();
        }
        verdict
    }

    /// Returns the effect of a submission that was refused for another reason: it applies to a
    /// later one.
    pub(crate) fn give_back(&self, rule: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(progress) = state.rules.get_mut(rule) {
            progress.left = progress.left.saturating_add(1);
        }
    }

    /// Decides on one poll; `None` if it works.
    pub(crate) fn poll(
        &self,
        instance: usize,
        now_ns: u64,
        deeds: &mut Vec<Deed>,
    ) -> Option<Broken> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.tick(now_ns, deeds);
        state.spend(instance, |action| match action {
            Action::PollFail(_) => Some(Broken::Fails),
            Action::Hang(Entry::Poll, stuck, _) => Some(Broken::Hangs(stuck)),
            _ => None,
        })
    }

    /// Decides whether a call of `entry` never returns.
    pub(crate) fn hangs(&self, entry: Entry, instance: usize) -> Option<Stuck> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.spend(instance, |action| match action {
            Action::Hang(of, stuck, _) if of == entry => Some(stuck),
            _ => None,
        })
    }

    /// Collects the faults that are due by time.
    pub(crate) fn tick(&self, now_ns: u64, deeds: &mut Vec<Deed>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).tick(now_ns, deeds);
    }
}

impl State {
    /// The effect of the first rule that still applies to a call for `instance`.
    fn spend<T>(&mut self, instance: usize, effect: impl Fn(Action) -> Option<T>) -> Option<T> {
        self.rules.iter_mut().find_map(|progress| {
            let rule = progress.rule;
            let here = rule.instance.is_none_or(|only| only == instance);
            let effect = effect(rule.action).filter(|_| here && progress.left > 0)?;
            progress.spend();
            Some(effect)
        })
    }

    fn tick(&mut self, now_ns: u64, deeds: &mut Vec<Deed>) {
        for progress in self.rules.iter_mut().filter(|progress| !progress.fired) {
            match (progress.rule.trigger, self.first_ns) {
                (Trigger::Now, _) => progress.fire(deeds),
                (Trigger::After(ms), Some(first)) if now_ns >= first + ms * 1_000_000 => {
                    progress.fire(deeds);
                }
                _ => {}
            }
        }
    }
}

impl Progress {
    fn fire(&mut self, deeds: &mut Vec<Deed>) {
        self.fired = true;
        match self.rule.action {
            Action::Retry(count)
            | Action::Fail(count)
            | Action::Status(_, count)
            | Action::Error(_, count)
            | Action::PollFail(count)
            | Action::Late(_, count)
            | Action::Flip(count)
            | Action::Crc(count)
            | Action::Produced(_, count)
            | Action::Hang(_, _, count) => {
                self.left = match count {
                    Count::Times(times) => times,
                    Count::Forever => u64::MAX,
                };
            }
            action => deeds.push(Deed { instance: self.rule.instance, action }),
        }
    }

    fn spend(&mut self) {
        if self.left != u64::MAX {
            self.left -= 1;
        }
    }
}

#[cfg(test)]
mod tests;
