//! The script at work: which submission, poll or moment a rule acts on.

use crate::script::{Action, Count, Direction, Rule, Trigger};
use qat_abi::{CpaStatus, CPA_STATUS_FAIL, CPA_STATUS_RETRY};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// What becomes of one accepted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Effect {
    /// What should.
    #[default]
    None,
    /// The callback says SUCCESS, the results this.
    Status(i32),
    /// The callback says FAIL, the results this.
    Error(i32),
    /// Carried out so many milliseconds later.
    Late(u64),
    /// A bit of the output is wrong.
    Flip,
    /// The checksum is wrong.
    Crc,
    /// The results say that so many bytes were produced.
    Produced(u32),
}

/// The script's word on one submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// To be refused with this.
    Refuse(CpaStatus),
    /// To be accepted, if nothing else is against it. `rule` is to be given back otherwise.
    Accept { effect: Effect, rule: usize },
}

/// Something that happens to instances at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deed {
    pub(crate) instance: Option<usize>,
    pub(crate) action: Action,
}

/// The rules and how far they are.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Looked at before the lock is taken: without a script nothing is paid.
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
    /// Submissions that the filter matched.
    seen: u64,
    /// `at`, `after` and `now` fire once.
    fired: bool,
    /// Submissions or polls that the action still holds for.
    left: u64,
}

const NO_RULE: usize = usize::MAX;

impl Faults {
    pub(crate) fn new(rules: &[Rule]) -> Self {
        let faults = Self::default();
        faults.set(rules);
        faults
    }

    /// Replaces all rules; counting starts anew.
    pub(crate) fn set(&self, rules: &[Rule]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = |rule: &Rule| Progress { rule: *rule, seen: 0, fired: false, left: 0 };
        *state = State { rules: rules.iter().map(progress).collect(), first_ns: None };
        self.armed.store(!rules.is_empty(), Ordering::Release);
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Relaxed)
    }

    /// One submission; `deeds` gets what happens at once.
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
            // The first rule that has something to say about this submission has it; the others
            // keep their counts.
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

    /// The submission was refused for another reason: the effect is still to come.
    pub(crate) fn give_back(&self, rule: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(progress) = state.rules.get_mut(rule) {
            progress.left = progress.left.saturating_add(1);
        }
    }

    /// One poll: true when it is to fail.
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

    /// What time alone has brought.
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
    fn at_holds_for_so_many_submissions() {
        let faults = faults("at 2 error -9 2");
        let (none, error) = (Effect::None, Effect::Error(-9));
        assert_eq!(effects(&faults, 5), [none, error, error, none, none]);
    }

    #[test]
    fn every_comes_back() {
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
    fn an_effect_given_back_comes_later() {
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
