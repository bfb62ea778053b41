//! The pauses before servers that die are replaced.

use std::time::Duration;

/// How long to wait before another server is started.
#[derive(Debug, Default)]
pub struct Backoff {
    pub(super) crashes: u32,
}

impl Backoff {
    /// A server that was up for so long is not taken for one that dies as fast as it is started.
    const STEADY: Duration = Duration::from_secs(30);

    /// So many in a row are replaced, and the next one is not: the pauses between them are 6 s
    /// together.
    const MOST: u32 = 8;

    /// A server has died that had been ready for so long; `None` when there is to be no other.
    pub fn died(&mut self, ready: Duration) -> Option<Duration> {
        if ready >= Self::STEADY {
            self.crashes = 0;
        }
        self.crashes += 1;
        match self.crashes {
            1 => Some(Duration::ZERO),
            crashes if crashes > Self::MOST => None,
            crashes => Some(Duration::from_millis(50) * 2_u32.pow(crashes - 2)),
        }
    }
}
