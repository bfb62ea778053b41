//! The pauses before dead servers are replaced.

use std::time::Duration;

/// The pause before the next server: none after a single death, and longer the more servers die
/// soon after their start. There is always a next server: the stored contents are worth more than
/// the CPU time.
#[derive(Debug, Default)]
pub struct Backoff {
    crashes: u32,
    /// The pause before the last server.
    pause: Duration,
}

impl Backoff {
    /// A server that ran this long, including the pause before it, ends the series: a server that
    /// is killed now and then is not failing.
    const STEADY: Duration = Duration::from_secs(30);

    /// The longest pause, after ten deaths in a row: a host that swaps waits for as long.
    const LONGEST: Duration = Duration::from_secs(10);

    /// Records the death of a server that had been ready for this long. Returns the pause before
    /// the next server.
    pub fn died(&mut self, ready: Duration) -> Duration {
        if ready + self.pause >= Self::STEADY {
            self.crashes = 0;
        }
        self.crashes = self.crashes.saturating_add(1);
        self.pause = match self.crashes {
            1 => Duration::ZERO,
            crashes => Duration::from_millis(50) * 2_u32.pow((crashes - 2).min(10)),
        };
        self.pause = self.pause.min(Self::LONGEST);
        self.pause
    }
}
