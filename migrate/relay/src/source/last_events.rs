//! The events that still come when a migration has ended at its destination or with its session:
//! the last messages of the return path, and the user's requests, of which none is lost.

use super::shared::{Event, Shared};
use crate::error::RelayError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long to wait for the last messages, and for the peer's reason once its QEMU has ended.
const REASON: Duration = Duration::from_secs(2);
/// The answer to a stop that comes while the destination may be starting the VM.
pub(super) const WAITS: &str =
    "the destination may be starting the VM just now; waiting for its answer (interrupt again to \
     end this relay all the same)";

/// The requests to end the relay that it could not obey at once.
#[derive(Default)]
pub(super) struct Stops {
    /// The user has been told why the relay does not end: the next request ends it.
    pub(super) told: bool,
    /// Those that came while other events were awaited, with their reasons.
    kept: Vec<Option<String>>,
}

impl Stops {
    /// The reason of the first request that came while other events were awaited.
    pub(super) fn take_first(&mut self) -> Option<Option<String>> {
        let first = (!self.kept.is_empty()).then(|| self.kept.swap_remove(0));
        self.kept.clear();
        first
    }

    /// Acts on the requests kept by a relay in doubt, as on one that comes then: tells the user to
    /// repeat the first. Returns whether the relay has to end.
    pub(super) fn force(&mut self, notice: &mut impl FnMut(&str)) -> bool {
        for _ in self.kept.drain(..) {
            if std::mem::replace(&mut self.told, true) {
                return true;
            }
            notice(WAITS);
        }
        false
    }

    /// Takes an event that decides nothing now: a request to end is kept, a message is shown.
    fn set_aside(&mut self, event: Event, notice: &mut impl FnMut(&str)) {
        match event {
            Event::Stop(reason) => self.kept.push(reason),
            Event::Notice(text) => notice(&text),
            _ => {}
        }
    }
}

/// The peer's reason for the end of its QEMU, if it arrives soon.
pub(super) fn peer_reason(
    events: &Receiver<Event>,
    stops: &mut Stops,
    notice: &mut impl FnMut(&str),
) -> Option<RelayError> {
    let deadline = Instant::now() + REASON;
    while let Ok(event) = events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        match event {
            Event::Closed(error) => return Some(RelayError::Ended(error)),
            Event::Shut(code) if code != 0 => return Some(RelayError::DestinationRefused { code }),
            event => stops.set_aside(event, notice),
        }
    }
    None
}

#[derive(Default)]
pub(super) struct FinalEvents {
    pub(super) shut: Option<u32>,
    pub(super) main_eof: bool,
}

/// After the session has ended: lets the bytes that have arrived on the return paths reach the
/// source QEMU, and returns the events.
pub(super) fn final_events(
    shared: &Shared,
    events: &Receiver<Event>,
    stops: &mut Stops,
    notice: &mut impl FnMut(&str),
) -> FinalEvents {
    let mut last = FinalEvents::default();
    shared.close_return_paths();
    let deadline = Instant::now() + REASON;
    loop {
        let event = if shared.return_paths.load(Ordering::Acquire) > 0 {
            events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        } else {
            // Each thread sends its events before it is counted off.
            events.try_recv().map_err(|_| RecvTimeoutError::Timeout)
        };
        match event {
            Ok(Event::Shut(code)) => last.shut = Some(code),
            Ok(Event::SourceEof { is_main: true }) => last.main_eof = true,
            Ok(event) => stops.set_aside(event, notice),
            Err(_) => return last,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use session::SessionError;
    use std::sync::mpsc;
    use std::sync::Arc;

    fn ended() -> Event {
        Event::Closed(Arc::new(SessionError::Local { reason: "the end".into() }))
    }

    /// The message to the user of a relay that gets these events while it waits for the reason of
    /// its peer, and then is in doubt; and whether it ends.
    fn in_doubt(events: Vec<Event>, stops: &mut Stops) -> (Vec<String>, bool) {
        let (sender, receiver) = mpsc::channel();
        for event in events {
            sender.send(event).unwrap();
        }
        let mut said = Vec::new();
        let mut notice = |text: &str| said.push(text.to_owned());
        assert!(matches!(peer_reason(&receiver, stops, &mut notice), Some(RelayError::Ended(_))));
        let ends = stops.force(&mut notice);
        (said, ends)
    }

    #[test]
    fn a_stop_that_comes_while_the_last_events_are_awaited_counts_as_one_in_doubt() {
        let stop = || Event::Stop(None);
        let mut stops = Stops::default();
        assert_eq!(in_doubt(vec![ended()], &mut stops), (vec![], false));
        // The first is answered, as always; the next one ends the relay.
        assert_eq!(in_doubt(vec![stop(), ended()], &mut stops), (vec![WAITS.to_owned()], false));
        assert_eq!(in_doubt(vec![stop(), ended()], &mut stops), (vec![], true));
        // Both come in this time.
        let both = in_doubt(vec![stop(), stop(), ended()], &mut Stops::default());
        assert_eq!(both, (vec![WAITS.to_owned()], true));
        // Its first was answered before.
        let mut stops = Stops { told: true, ..Stops::default() };
        assert_eq!(in_doubt(vec![stop(), ended()], &mut stops), (vec![], true));
    }

    #[test]
    fn the_reason_of_a_stop_is_kept_and_messages_are_shown() {
        let mut stops = Stops::default();
        let mut said = Vec::new();
        let mut notice = |text: &str| said.push(text.to_owned());
        stops.set_aside(Event::Notice("one".into()), &mut notice);
        stops.set_aside(Event::Stop(Some("QEMU has failed".into())), &mut notice);
        stops.set_aside(Event::Stop(None), &mut notice);
        stops.set_aside(Event::BackDone, &mut notice);
        assert_eq!(stops.take_first(), Some(Some("QEMU has failed".into())));
        assert_eq!(stops.take_first(), None);
        assert_eq!(said, ["one"]);
    }
}
