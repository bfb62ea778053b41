//! Decisions with the figures behind them, for `--explain` and for messages.

use std::fmt;
use std::time::Duration;

/// A decision, and when it was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Time since the migration's start.
    pub at: Duration,
    /// The decision and its figures.
    pub why: Why,
}

/// A decision's kind, with its figures.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Why {
    /// No rate is known yet: QEMU is to stop the VM only when next to nothing is left.
    Held {
        /// QEMU's downtime-limit meanwhile.
        limit: Duration,
    },
    /// QEMU is to stop the VM when this much is left.
    StopAt {
        /// The downtime wanted.
        goal: Duration,
        /// The part of it for bytes under way and for the device state.
        fixed: Duration,
        /// Bytes of pages per second that drain.
        drain: f64,
        /// Bytes of pages left.
        left: u64,
    },
    /// Too much is left: a longer downtime is wanted.
    Raised {
        /// The downtime wanted so far.
        from: Duration,
        /// The downtime wanted now.
        to: Duration,
        /// Bytes of pages left after the last synchronisation.
        left: u64,
        /// The downtime that they would take.
        needs: Duration,
    },
    /// So little is left that QEMU should have stopped the VM: its own bandwidth is too small,
    /// because it makes pauses, and its threshold is raised.
    Underestimated {
        /// Bytes of pages left after the last synchronisation.
        left: u64,
        /// By this factor.
        factor: u32,
    },
    /// Another client has set QEMU's downtime-limit, which is the operator's from now on.
    LimitChanged {
        /// The new longest downtime.
        max: Duration,
    },
    /// The guest is slowed down.
    Throttled {
        /// By this many per cent.
        percent: u8,
        /// Bytes of pages that it dirties per second.
        dirty: Option<f64>,
        /// Bytes of pages per second that drain.
        drain: f64,
    },
    /// The migration turns to postcopy at the time given for it.
    PostcopyAfter {
        /// That time.
        after: Duration,
    },
    /// The migration turns to postcopy, because nothing else ends it.
    PostcopyNeeded(Stuck),
    /// The migration does not converge.
    Stuck(Stuck),
    /// The migration is cancelled.
    Deadline {
        /// The time that it had.
        after: Duration,
    },
    /// The time is up, and the migration cannot be cancelled any more.
    TooLate {
        /// The time that it had.
        after: Duration,
    },
}

/// Why a migration does not end.
#[derive(Clone, Debug, PartialEq)]
pub struct Stuck {
    /// Bytes of pages left after a synchronisation.
    pub left: u64,
    /// Bytes of pages per second that drain.
    pub drain: f64,
    /// Bytes per second on the links.
    pub wire: f64,
    /// Bytes of pages that the guest dirties per second, if QEMU has measured it.
    pub dirty: Option<f64>,
    /// The downtime that the rest would take now.
    pub needs: Duration,
    /// The part of it for bytes under way and device state.
    pub fixed: Duration,
    /// The longest downtime allowed.
    pub max: Duration,
    /// Per cent by which the guest is slowed down.
    pub throttle: u8,
    /// Changes of which each would end it by itself.
    pub would: Vec<Remedy>,
}

/// A change that would end a migration.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Remedy {
    /// A longer downtime.
    Downtime(Duration),
    /// A guest slowed down by about this many per cent.
    Throttle(u8),
    /// Postcopy.
    Postcopy,
    /// Links of this many bytes per second.
    Link(f64),
}

fn megabytes(bytes: f64) -> String {
    format!("{:.1} MB", bytes / 1e6)
}

fn megabits(rate: f64) -> String {
    format!("{:.1} Mbit/s", rate * 8.0 / 1e6)
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Downtime(time) => write!(f, "--max-downtime {}", time.as_millis()),
            Self::Throttle(percent) => {
                write!(f, "--throttle auto (the guest slowed by about {percent} %)")
            }
            Self::Postcopy => f.write_str("--postcopy when-needed"),
            Self::Link(rate) => write!(f, "a link of {}", megabits(*rate)),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(dirty) = self.dirty {
            write!(f, "the guest dirties {}/s", megabytes(dirty))?;
            // By 1 % every guest is that may be slowed.
            if self.throttle > 1 {
                write!(f, " although it is slowed by {} %", self.throttle)?;
            }
            f.write_str(", ")?;
        }
        write!(
            f,
            "{}/s drain ({} on the network), and {} are left after each pass: a downtime of {} ms \
             where {} ms are allowed",
            megabytes(self.drain),
            megabits(self.wire),
            megabytes(self.left as f64),
            self.needs.as_millis(),
            self.max.as_millis(),
        )?;
        if self.fixed >= self.max {
            let fixed = self.fixed.as_millis();
            write!(f, ", of which bytes under way and device state alone take {fixed} ms")?;
        }
        let would: Vec<_> = self.would.iter().map(Remedy::to_string).collect();
        match would.as_slice() {
            [] => Ok(()),
            [one] => write!(f, ". It would end with {one}"),
            [most @ .., last] => write!(f, ". It would end with {}, or {last}", most.join(", ")),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} s: ", self.at.as_secs_f64())?;
        match &self.why {
            Why::Held { limit } => write!(
                f,
                "no rate is known yet: QEMU is held back (downtime-limit {} ms)",
                limit.as_millis()
            ),
            Why::StopAt { goal, fixed, drain, left } => write!(
                f,
                "QEMU is to stop the VM when {} are left: {}/s drain, and {} ms of {} ms go to bytes \
                 under way and device state",
                megabytes(*left as f64),
                megabytes(*drain),
                fixed.as_millis(),
                goal.as_millis()
            ),
            Why::Raised { from, to, left, needs } => write!(
                f,
                "{} are left after a pass and do not become less, {} ms of downtime: a downtime of {} ms \
                 instead of {} ms",
                megabytes(*left as f64),
                needs.as_millis(),
                to.as_millis(),
                from.as_millis()
            ),
            Why::Underestimated { left, factor } => write!(
                f,
                "{} are left after a pass, and QEMU takes them for too much: its own bandwidth is too small, \
                 so its downtime-limit becomes {factor} times as large",
                megabytes(*left as f64),
            ),
            Why::LimitChanged { max } => write!(
                f,
                "somebody else has set QEMU's downtime-limit: at most {} ms from now on",
                max.as_millis()
            ),
            Why::Throttled { percent, dirty, drain } => {
                write!(f, "the guest is slowed by {percent} %: ")?;
                if let Some(dirty) = dirty {
                    write!(f, "it dirties {}/s, and ", megabytes(*dirty))?;
                }
                write!(f, "{}/s drain", megabytes(*drain))
            }
            Why::PostcopyAfter { after } => {
                write!(f, "postcopy begins after {} s", after.as_secs())
            }
            Why::PostcopyNeeded(stuck) => write!(f, "postcopy begins: {stuck}"),
            Why::Stuck(stuck) => write!(f, "the migration does not converge: {stuck}"),
            Why::Deadline { after } => {
                write!(f, "not over after {} s: the migration is cancelled", after.as_secs())
            }
            Why::TooLate { after } => write!(
                f,
                "not over after {} s, and too late to cancel: the VM has stopped, or the destination \
                 has it",
                after.as_secs()
            ),
        }
    }
}
