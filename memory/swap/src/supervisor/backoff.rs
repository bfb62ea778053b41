//! The pauses before servers that die are replaced.

use std::time::Duration;

/// How long to wait before another server is started: not at all for one that has died once, and
/// longer the more of them die as fast as they are started. There is always another one: what the
/// dead ones have stored is worth more than the CPU time that is lost.
#[derive(Debug, Default)]
pub struct Backoff {
    crashes: u32,
    /// The pause before the last one.
    pause: Duration,
}

impl Backoff {
    /// A server that was up for so long is not taken for one that dies as fast as it is started.
    /// The pause before it counts too: a server that is killed every so often is none.
    const STEADY: Duration = Duration::from_secs(30);

    /// The longest pause, after ten deaths in a row: a host that swaps waits as long.
    const LONGEST: Duration = Duration::from_secs(10);

    /// A server has died that had been ready for so long: the pause before the next one.
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
