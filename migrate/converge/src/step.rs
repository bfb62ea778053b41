//! The result of an observation: actions, and the decisions behind them.

use crate::decision::{Decision, Why};
use crate::sample::Sample;
use crate::switchover::Switchover;

/// An action for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Set these parameters.
    StopAt(Switchover),
    /// Slow the guest's vCPUs down by this many per cent.
    Throttle(u8),
    /// Start postcopy.
    StartPostcopy,
    /// Cancel the migration, if that is still safe.
    Cancel,
}

/// The result of a sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Actions, in the order in which they are to be done.
    pub actions: Vec<Action>,
    /// The decisions behind the actions.
    pub decisions: Vec<Decision>,
}

impl Step {
    /// Notes a decision.
    pub(crate) fn note(&mut self, sample: &Sample, why: Why) {
        self.decisions.push(Decision { at: sample.at, why });
    }
}
