//! The messages to the user while a source does not show that it would pause.

use crate::source::last_events::Stops;
use session::SessionError;
use std::time::{Duration, Instant};

/// A source that shows nothing for so long is reported.
const LONG: Duration = Duration::from_secs(5);
/// The answer to a stop that comes while the source QEMU may not pause.
const SETTLES: &str =
    "the destination has the VM, and the source QEMU could still run its own, too, if this relay ended \
     now: waiting until the source QEMU shows that it pauses (interrupt again to end this relay all the \
     same)";

/// The messages to the user while a source does not show that it would pause.
pub(super) struct Patience {
    since: Instant,
    /// When a request to end was answered.
    answered: Option<Instant>,
    /// The user has been told how long the relay waits.
    told: bool,
}

/// Requests to end that come so soon behind the answer to one were made before it.
const AT_ONCE: Duration = Duration::from_secs(1);

impl Patience {
    /// Answers the requests to end that came before. They ask for the end of a migration, and not
    /// for two copies of its VM: none of them ends the relay here.
    pub(super) fn new(stops: &mut Stops, notice: &mut impl FnMut(&str)) -> Self {
        let mut this = Self { since: Instant::now(), answered: None, told: false };
        if stops.take_first().is_some() {
            this.answer(notice);
        }
        this
    }

    fn answer(&mut self, notice: &mut impl FnMut(&str)) {
        self.answered = Some(Instant::now());
        notice(SETTLES);
    }

    /// Answers a request to end; true if an earlier one was answered before this one was made.
    pub(super) fn is_over(&mut self, notice: &mut impl FnMut(&str)) -> bool {
        let Some(answered) = self.answered else {
            self.answer(notice);
            return false;
        };
        answered.elapsed() >= AT_ONCE
    }

    /// Reports a long wait, once.
    pub(super) fn look(&mut self, cause: &SessionError, notice: &mut impl FnMut(&str)) {
        if self.since.elapsed() >= LONG && !std::mem::replace(&mut self.told, true) {
            notice(&format!(
                "the session is over ({cause}), and the source QEMU has not shown for {} s that it would pause if its \
                 connection closed: it would run its VM beside the destination's. It shows that by what it writes. \
                 Waiting on; see that it is not stopped",
                LONG.as_secs()
            ));
        }
    }
}
