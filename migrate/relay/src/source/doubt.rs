//! The end of a source relay in doubt: whether QEMU is in postcopy for good, and the wait for the
//! peer or a person to report where the VM runs (W20c, W23, W28).

mod evidence;
mod patience;

use super::last_events::Stops;
use super::shared::{Event, Shared};
use crate::error::RelayError;
use crate::settle::{self, Settle, Settled};
use crate::sockets::is_open;
use crate::threads::spawn;
use patience::Patience;
use session::{Redial, SessionError, Verdict};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often QEMU's socket is checked while the peer is lost and the destination may run.
pub(super) const LOOK: Duration = Duration::from_millis(200);
/// How often a peer that has not answered is asked again.
const ASK: Duration = Duration::from_secs(2);
/// How many kinds of error of a question are reported.
const MAX_KINDS: usize = 8;
/// The questions of a source in doubt, and the errors that kept them from an answer.
#[derive(Default)]
struct Questions {
    first: Option<Instant>,
    failed: Vec<String>,
    /// Gets the answer to the present question.
    answer: Option<Receiver<Result<Verdict, SessionError>>>,
}

impl Questions {
    /// Asks on a thread of its own: a peer that cannot be reached takes seconds, in which the
    /// caller has to look after QEMU and the user. At most one question is under way.
    fn ask(&mut self, redial: &Redial) {
        if self.answer.is_some() {
            return;
        }
        let passed = self.first.get_or_insert_with(Instant::now).elapsed();
        let (redial, (answer, answers)) = (redial.clone(), channel());
        let begun = spawn("question", move || {
            let _ = answer.send(redial.ask_after(passed));
        });
        // Without a thread the next question may get one.
        self.answer = begun.is_ok().then_some(answers);
    }

    /// The answer, once it is there.
    fn answer(&mut self) -> Option<Result<Verdict, SessionError>> {
        let answer = self.answer.as_ref()?.try_recv().ok()?;
        self.answer = None;
        Some(answer)
    }

    /// Reports that a question got no answer, unless one has failed in this way before. A doubt may
    /// last for days: beyond some kinds of error nothing is reported.
    fn report(&mut self, error: &SessionError, peer: &str, notice: &mut impl FnMut(&str)) {
        let error = error.with_causes();
        if self.failed.len() < MAX_KINDS && !self.failed.contains(&error) {
            notice(&format!("cannot ask {peer} where the VM is ({error}); asking again"));
            self.failed.push(error);
        }
    }
}

/// W23, W28: the peer is lost and the destination may run. QEMU's sockets stay open until QEMU or a
/// person closes them, or the peer answers that it will never start the VM, or that it runs it.
///
/// # Errors
/// Every end but one: the peer runs the VM, and the source QEMU has been informed.
pub(super) fn hold(
    shared: &Shared,
    redial: &Redial,
    (events, stops): (&Receiver<Event>, &mut Stops),
    cause: Arc<SessionError>,
    notice: &mut impl FnMut(&str),
) -> Result<(), RelayError> {
    if stops.force(notice) {
        return Err(RelayError::LeftInDoubt);
    }
    notice(&shared.doubt(&cause).to_string());
    // `look_for_switch` takes bytes, then, that no parser has seen.
    let is_parsed = !shared.turns_to_postcopy();
    // Only `look_for_switch` may read on in QEMU's main connection.
    shared.session.fail(SessionError::Local { reason: cause.to_string() });
    // A reader may wait for a codec thread that hangs.
    shared.submitter.pool().close();
    shared.close_return_paths();
    let mut asked = Some(Instant::now());
    let mut questions = Questions::default();
    loop {
        shared.drop_urgent();
        if shared.has_switched() && !shared.has_sent_all() {
            return settle(shared, redial, (events, stops), (cause, is_parsed), notice);
        }
        match events.recv_timeout(LOOK) {
            Ok(Event::Stop(_)) | Err(RecvTimeoutError::Disconnected) => {
                return Err(RelayError::LeftInDoubt)
            }
            // Its answer had arrived, and its QEMU read it only now.
            Ok(Event::Shut(0)) => {
                notice(&format!("the peer left before its report: {cause}"));
                return Ok(());
            }
            Ok(Event::Shut(code)) => return Err(shared.refusal(code)),
            Ok(Event::Notice(text)) => notice(&text),
            // The readers have ended with the session, so QEMU's socket is checked here.
            _ if !shared.main_is_open() => return Err(shared.doubt(&cause)),
            _ => shared.look_for_switch(),
        }
        let may_ask = !shared.has_switched() || shared.has_sent_all();
        if may_ask && asked.is_some_and(|last| last.elapsed() >= ASK) {
            questions.ask(redial);
        }
        if let Some(answer) = questions.answer() {
            asked = match answer {
                Ok(Verdict { committed: false, .. }) if !shared.recovers() => {
                    shared.look_for_switch();
                    if shared.has_switched() {
                        return Err(shared.interrupted(&cause, true));
                    }
                    return Err(RelayError::NeverCommitted);
                }
                Ok(Verdict { loaded: true, .. }) if shared.hand_pong() => {
                    notice("the peer is back: its QEMU has loaded the VM and runs it");
                    return pause(shared, redial, (events, stops), cause, notice);
                }
                Ok(Verdict { confirmed: true, .. }) if is_loss(&cause) && shared.hand_success() => {
                    notice("the peer is back: its QEMU has confirmed and runs the VM");
                    return Ok(());
                }
                Ok(Verdict { pending: true, .. }) => Some(Instant::now()),
                Ok(Verdict { confirmed, loaded, .. }) => {
                    notice(match (confirmed, loaded) {
                        (true, _) => "the peer is back: its QEMU has confirmed and runs the VM. Quit the source QEMU",
                        (_, true) => "the peer is back: its QEMU has loaded the VM, and the source QEMU cannot be told",
                        _ => "the peer is back, but cannot say whether its QEMU runs the VM: look there",
                    });
                    None
                }
                Err(error) => {
                    questions.report(&error, &shared.session.peer, notice);
                    Some(Instant::now())
                }
            };
        }
    }
}

/// W20c: the session has ended, and the destination has the VM in postcopy. Waits until the source
/// QEMU pauses when its socket closes, and does not run its VM.
///
/// # Errors
/// Every end but that of [`hold`].
pub(super) fn pause(
    shared: &Shared,
    redial: &Redial,
    (events, stops): (&Receiver<Event>, &mut Stops),
    cause: Arc<SessionError>,
    notice: &mut impl FnMut(&str),
) -> Result<(), RelayError> {
    settle(shared, redial, (events, stops), (cause, true), notice)
}

/// As [`pause`]; `is_parsed`: the parser of the main stream's reader has seen every byte that was
/// read.
fn settle(
    shared: &Shared,
    redial: &Redial,
    (events, stops): (&Receiver<Event>, &mut Stops),
    (cause, is_parsed): (Arc<SessionError>, bool),
    notice: &mut impl FnMut(&str),
) -> Result<(), RelayError> {
    let never = shared.says_never(&cause);
    // Only this function may read on in QEMU's main connection.
    shared.session.fail(SessionError::Local { reason: cause.to_string() });
    // A reader may wait for a codec thread that hangs.
    shared.submitter.pool().close();
    shared.close_return_paths();
    let streams = shared.streams();
    let Some(main) = streams.iter().find(|stream| stream.kind.is_main()) else {
        return Err(shared.interrupted(&cause, never));
    };
    let mut settle = None;
    let mut patience = Patience::new(stops, notice);
    loop {
        shared.drop_urgent();
        if let (None, Some(parser)) = (&settle, main.read_by.get()) {
            let parser = is_parsed.then(|| parser.clone());
            settle = Some(Settle::new(shared.is_only_answered(), parser));
        }
        // The reader takes bytes until it ends.
        let settled = match &mut settle {
            Some(settle) => settle.look(main.socket()),
            None => (!is_open(main.socket())).then_some(Settled::Closed),
        };
        if settled == Some(Settled::Sent) {
            shared.sent_all(main);
        }
        // Or its reader has seen that before.
        if shared.has_sent_all() {
            return hold(shared, redial, (events, stops), cause, notice);
        }
        if settled == Some(Settled::Closed) && shared.is_only_answered() {
            return Err(RelayError::SourceGone);
        }
        if settled.is_some() {
            return Err(shared.interrupted(&cause, never));
        }
        match events.recv_timeout(settle::LOOK) {
            Ok(Event::Stop(_)) if patience.is_over(notice) => return Err(RelayError::LeftInDoubt),
            Ok(Event::Notice(text)) => notice(&text),
            _ => {}
        }
        patience.look(&cause, notice);
    }
}

/// Whether the session ended only because the links were lost. After any other end, such as hashes
/// that differ, a person has to look at the destination.
fn is_loss(cause: &SessionError) -> bool {
    matches!(
        cause,
        SessionError::NotResumed { .. }
            | SessionError::LinkLost { .. }
            | SessionError::Silent { .. }
            | SessionError::Over { .. }
    )
}
