//! Executes the script: decides on which submission, poll or time a rule acts.

use crate::script::{Action, Count, Direction, Rule, Trigger};
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

    /// Decides on one poll. Returns true if the poll fails.
    pub(crate) fn poll(&self, instance: usize, now_ns: u64, deeds: &mut Vec<Deed>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.tick(now_ns, deeds);
        let failing = state.rules.iter_mut().find(|progress| {
            matches!(progress.rule.action, Action::PollFail(_))
                && progress.left > 0
                && progress.rule.instance.is_none_or(|only| only == instance)
        });
        failing.map(Progress::spend).is_some()
    }

    /// Collects the faults that are due by time.
    pub(crate) fn tick(&self, now_ns: u64, deeds: &mut Vec<Deed>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).tick(now_ns, deeds);
    }
}

impl State {
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
            | Action::Produced(_, count) => {
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
mod tests {
    use super::*;
    use crate::script::Script;

    fn faults(text: &str) -> Faults {
        Faults::new(Script::parse(text).expect("the script is good").rules())
    }

    fn submit(faults: &Faults, instance: usize, direction: Direction) -> Verdict {
        faults.submission(instance, direction, 0, &mut Vec::new())
    }

    fn effects(faults: &Faults, count: usize) -> Vec<Effect> {
        let effect = |_| match submit(faults, 0, Direction::Compress) {
            Verdict::Accept { effect, .. } => effect,
            Verdict::Refuse(_) => panic!("refused"),
        };
        (0..count).map(effect).collect()
    }

    #[test]
    fn at_affects_the_stated_number_of_submissions() {
        let faults = faults("at 2 error -9 2");
        let (none, error) = (Effect::None, Effect::Error(-9));
        assert_eq!(effects(&faults, 5), [none, error, error, none, none]);
    }

    #[test]
    fn every_affects_each_nth_submission() {
        let faults = faults("every 3 flip");
        let (none, flip) = (Effect::None, Effect::Flip);
        assert_eq!(effects(&faults, 7), [none, none, flip, none, none, flip, none]);
    }

    #[test]
    fn filters_count_only_what_they_match() {
        let faults = faults("at 2 instance=1 op=decompress fail");
        let refused = Verdict::Refuse(CPA_STATUS_FAIL);
        assert_ne!(submit(&faults, 1, Direction::Decompress), refused);
        assert_ne!(submit(&faults, 0, Direction::Decompress), refused);
        assert_ne!(submit(&faults, 1, Direction::Compress), refused);
        assert_eq!(submit(&faults, 1, Direction::Decompress), refused);
        assert_ne!(submit(&faults, 1, Direction::Decompress), refused);
    }

    #[test]
    fn an_effect_given_back_affects_the_next_submission() {
        let faults = faults("at 1 crc");
        let Verdict::Accept { effect: Effect::Crc, rule } = submit(&faults, 0, Direction::Compress)
        else {
            panic!("no effect")
        };
        faults.give_back(rule);
        assert_eq!(effects(&faults, 2), [Effect::Crc, Effect::None]);
    }

    #[test]
    fn time_and_polls() {
        let faults = faults("after 5 silence\nnow pollfail 2");
        let mut deeds = Vec::new();
        assert!(faults.poll(0, 0, &mut deeds));
        faults.tick(10_000_000, &mut deeds);
        assert_eq!(deeds, [], "time runs from the first submission");
        faults.submission(0, Direction::Compress, 10_000_000, &mut deeds);
        faults.tick(14_999_999, &mut deeds);
        assert_eq!(deeds, []);
        assert!(faults.poll(3, 15_000_000, &mut deeds));
        assert_eq!(deeds, [Deed { instance: None, action: Action::Silence }]);
        assert!(!faults.poll(0, 16_000_000, &mut deeds));
        assert_eq!(deeds.len(), 1);
    }
}
