//! The messages of a service's doors. Other users can cause any number of them.

use crate::say::say;
use relay::Allowance;
use std::time::Instant;

/// Limits the messages. Refusals, which any local user can cause, leave the service's own failures
/// their share.
pub(super) struct Said {
    refusals: Allowance,
    failures: Allowance,
}

impl Said {
    pub(super) fn new(now: Instant) -> Self {
        Self { refusals: Allowance::new(now), failures: Allowance::new(now) }
    }

    /// Reports that a connection was refused.
    pub(super) fn refused(&mut self, text: &str) {
        tell(self.refusal(Instant::now(), text));
    }

    /// Reports that something has failed.
    pub(super) fn failed(&mut self, text: &str) {
        tell(self.failure(Instant::now(), text));
    }

    fn refusal(&mut self, now: Instant, text: &str) -> Option<String> {
        self.refusals.take(now, text)
    }

    fn failure(&mut self, now: Instant, text: &str) -> Option<String> {
        self.failures.take(now, text)
    }
}

fn tell(text: Option<String>) {
    if let Some(text) = text {
        say(&text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_hide_no_failure() {
        let now = Instant::now();
        let mut said = Said::new(now);
        let refused = (0..100).filter(|_| said.refusal(now, "reset").is_some()).count();
        assert_eq!(refused, 10);
        assert_eq!(said.failure(now, "the door is shut").as_deref(), Some("the door is shut"));
    }
}
