//! The thread that reopens lost links, and ends a session whose links all stay lost (W26).

use crate::error::SessionError;
use crate::hello::HELLO_TIMEOUT;
use crate::links::Missing;
use crate::redial::Redial;
use crate::session::Session;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between two attempts: a twentieth of the time since the loss, within these bounds. A peer
/// that is back after 5 s is found within 250 ms.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Once our FINISH is sent, links end because the peer closes them, and the peer's FINISH may still
/// be under way on another: a new link is opened only after this time.
const FINISH_GRACE: Duration = Duration::from_millis(300);

impl Session {
    /// Starts the thread that ends the session when all its links stay lost. With `redial` the
    /// thread also reopens lost links.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub fn supervise_links(self: &Arc<Self>, redial: Option<Redial>) -> Result<(), SessionError> {
        if !self.links.resumes_lost() {
            return Ok(());
        }
        let session = self.clone();
        // The thread is not joined: it may be in the middle of an attempt when the session ends.
        let thread = std::thread::Builder::new()
            .name("relink".into())
            .spawn(move || supervise(&session, redial.as_ref()));
        thread.map(drop).map_err(|source| SessionError::Resource {
            what: "cannot start the thread that makes a session's lost links anew".into(),
            source,
        })
    }

    fn needs_no_link(&self) -> bool {
        self.has_failed() || self.is_finishing()
    }
}

fn supervise(session: &Arc<Session>, redial: Option<&Redial>) {
    let links = &session.links;
    let timeout = links.timeout();
    let is_over = || session.needs_no_link();
    let mut turn = 0;
    // The last attempt: when it ended, and whether it opened a link.
    let mut last: Option<(Instant, bool)> = None;
    // Why it failed.
    let mut tried = None;
    let mut told_of_shortage = false;
    loop {
        let missing = links.missing(turn);
        if is_over() {
            return;
        }
        let deadline = missing.outage.as_ref().map(|outage| outage.began + timeout);
        if let Some(outage) = missing.outage.as_ref().filter(|o| o.began.elapsed() >= timeout) {
            let (lost, seconds) = (outage.cause.clone(), timeout.as_secs());
            return session.fail(SessionError::NotResumed { lost, seconds, tried });
        }
        let (Some(redial), Some((number, place))) = (redial, &missing.place) else {
            links.wait_for_change(deadline, &missing, is_over);
            continue;
        };
        let gone = place.gone.map_or(Duration::ZERO, |gone| gone.elapsed());
        // Without any link all are tried as often as the one that was lost last.
        let passed = missing.outage.as_ref().map_or(gone, |o| gone.min(o.began.elapsed()));
        if let Some(until) = not_before(session, &missing, last, passed) {
            let until = deadline.map_or(until, |deadline| deadline.min(until));
            links.pause(until, &missing, is_over);
            continue;
        }
        let link_number = u16::try_from(*number).unwrap_or(u16::MAX);
        // An outage may begin during the attempt. With a short time-out it lasts longer by at most
        // what a step takes: other links of a slow path would never open.
        let until = deadline.unwrap_or_else(|| Instant::now() + timeout.max(HELLO_TIMEOUT));
        let link = redial.link(link_number, passed, until);
        if is_over() {
            return;
        }
        let made = link.and_then(|link| session.add_link(link_number, link));
        let now = Instant::now();
        last = Some((now, made.is_ok()));
        turn = number + 1;
        // An attempt without the time that it needs says less than the one before.
        if now < until || tried.is_none() || made.is_ok() {
            tried = made.as_ref().err().map(SessionError::with_causes);
        }
        match made {
            Ok(()) => told_of_shortage = false,
            // The server answers, but does not have the session: further attempts cannot succeed.
            Err(error @ (SessionError::Over { .. } | SessionError::Refused { .. }))
                if missing.outage.is_some() =>
            {
                return session.fail(error);
            }
            // This host has no descriptors, memory or threads now, and may have them soon.
            Err(SessionError::Resource { what, source }) => {
                if !std::mem::replace(&mut told_of_shortage, true) {
                    let peer = &session.peer;
                    session.sink.notice(&format!(
                        "cannot make a link to {peer} anew ({what}: {source}); trying again"
                    ));
                }
            }
            Err(_) => {}
        }
    }
}

/// The time until which the next attempt has to wait; `None` if it need not. `last`: when the last
/// attempt ended, and whether it opened a link. `passed`: time since the loss of the link.
fn not_before(
    session: &Session,
    missing: &Missing,
    last: Option<(Instant, bool)>,
    passed: Duration,
) -> Option<Instant> {
    let flaps = missing.place.as_ref().is_some_and(|(_, place)| place.flaps);
    let finish = session.outbound.finish().map(|_| missing.last_loss + FINISH_GRACE);
    // A failed attempt is not repeated at once, nor is one whose link was soon lost.
    let again = last.filter(|(_, made)| !made || flaps);
    let pause = again.map(|(at, _)| at + (passed / 20).clamp(PAUSE.0, PAUSE.1));
    finish.max(pause).filter(|until| *until > Instant::now())
}
