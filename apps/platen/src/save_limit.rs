//! `--live-limit`: the end of the time in which a VM runs while it is saved.

use anyhow::Context;
use std::time::{Duration, Instant};

/// Time for which QEMU may answer and the VM can nevertheless not be stopped.
const FAILS: Duration = Duration::from_secs(60);

/// The moment at which a VM that runs is stopped for the rest of its save.
#[derive(Debug)]
pub(crate) struct LiveLimit {
    /// `None` once the VM is told to stop, and for a save without a limit.
    at: Option<Instant>,
    /// The first of the attempts that have failed since QEMU answers.
    failing: Option<Instant>,
    /// Whether QEMU has answered the last question.
    answers: bool,
}

impl LiveLimit {
    pub(crate) fn new(at: Option<Instant>) -> Self {
        Self { at, failing: None, answers: true }
    }

    /// Calls `stop` if the limit is over, again at each look until it succeeds. Returns whether the
    /// VM is told to stop by this look.
    ///
    /// # Errors
    ///
    /// The error of `stop`, after [`FAILS`].
    pub(crate) fn look(
        &mut self,
        now: Instant,
        stop: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<bool> {
        // During the switchover QEMU answers nothing, and needs no larger limit.
        if !self.answers || self.at.is_none_or(|at| now < at) {
            return Ok(false);
        }
        let Err(error) = stop() else {
            self.at = None;
            return Ok(true);
        };
        let since = *self.failing.get_or_insert(now);
        if now.saturating_duration_since(since) < FAILS {
            return Ok(false);
        }
        let text = format!(
            "the VM writes faster than it is saved, and could not be stopped for {} s",
            FAILS.as_secs()
        );
        Err(error).context(text)
    }

    /// Notes whether QEMU has answered a question.
    pub(crate) fn heard(&mut self, answers: bool) {
        self.answers = answers;
        if !answers {
            self.failing = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    const SECOND: Duration = Duration::from_secs(1);

    fn fails() -> anyhow::Result<()> {
        Err(anyhow!("the helper has died"))
    }

    #[test]
    fn a_vm_that_could_not_be_stopped_is_told_again_and_only_once_after_that() {
        let at = Instant::now();
        let mut limit = LiveLimit::new(Some(at + SECOND));
        assert!(!limit.look(at, || panic!("before the limit")).unwrap());
        assert!(!limit.look(at + SECOND, fails).unwrap());
        assert!(limit.look(at + 2 * SECOND, || Ok(())).unwrap());
        assert!(!limit.look(at + 3 * SECOND, || panic!("a second time")).unwrap());
        assert!(!LiveLimit::new(None).look(at, || panic!("no limit")).unwrap());
    }

    #[test]
    fn a_vm_that_can_never_be_stopped_ends_the_save() {
        let at = Instant::now();
        let mut limit = LiveLimit::new(Some(at));
        assert!(!limit.look(at, fails).unwrap());
        assert!(!limit.look(at + FAILS - SECOND, fails).unwrap());
        let error = format!("{:#}", limit.look(at + FAILS, fails).unwrap_err());
        assert!(error.contains("could not be stopped for 60 s: the helper has died"), "{error}");
    }

    /// The switchover lasts as long as the disk needs.
    #[test]
    fn a_qemu_that_answers_nothing_does_not_end_the_save() {
        let at = Instant::now();
        let mut limit = LiveLimit::new(Some(at));
        assert!(!limit.look(at, fails).unwrap());
        limit.heard(false);
        assert!(!limit.look(at + 2 * FAILS, || panic!("QEMU is not asked")).unwrap());
        limit.heard(true);
        assert!(!limit.look(at + 3 * FAILS, fails).unwrap());
        assert!(limit.look(at + 4 * FAILS, fails).is_err());
    }
}
