//! The end of a source relay in doubt: whether QEMU is in postcopy for good, and the wait for the
//! peer or a person to report where the VM runs (W20c, W23, W28).

use super::last_events::Stops;
use super::shared::{Event, Shared, SourceStream, FAREWELL};
use crate::error::RelayError;
use crate::postcopy::Switchover;
use crate::return_path::{PONG_LOADED, SHUT_LOADED};
use crate::settle::{self, Settle, Settled};
use crate::sockets::is_open;
use crate::threads::spawn;
use session::{Redial, SessionError, Verdict};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::Kind;

/// How often QEMU's socket is checked while the peer is lost and the destination may run.
pub(super) const LOOK: Duration = Duration::from_millis(200);
/// How often a peer that has not answered is asked again.
const ASK: Duration = Duration::from_secs(2);
/// How many kinds of error of a question are reported.
const MAX_KINDS: usize = 8;
/// A source that shows nothing for so long is reported.
const LONG: Duration = Duration::from_secs(5);
/// The answer to a stop that comes while the source QEMU may not pause.
const SETTLES: &str =
    "the destination has the VM, and the source QEMU could still run its own, too, if this relay ended \
     now: waiting until the source QEMU shows that it pauses (interrupt again to end this relay all the \
     same)";

impl Shared {
    /// The result of a session that ends while the source QEMU is in postcopy. `never`: the peer
    /// has written nothing that starts the VM.
    pub(super) fn interrupted(&self, cause: &SessionError, never: bool) -> RelayError {
        let cause = cause.to_string();
        if never {
            RelayError::Stranded { cause }
        } else {
            RelayError::Paused { cause }
        }
    }

    /// Whether the peer has said that it has not written bytes that start the VM, and never will.
    /// A relay that recovers a paused postcopy has no such bytes to write: the VM is at the
    /// destination.
    pub(super) fn says_never(&self, error: &SessionError) -> bool {
        let never = match error {
            SessionError::Aborted { committed, .. } => !committed,
            SessionError::Over { answer, .. } => !answer.committed,
            _ => false,
        };
        never && !self.recovers()
    }

    fn recovers(&self) -> bool {
        self.streams().iter().any(|stream| stream.kind == Kind::Recovery)
    }

    /// After the session has ended: reads on in the main stream, only to see whether the source
    /// switches to postcopy.
    pub(super) fn look_for_switch(&self) {
        if !matches!(self.switchover.get(), Some(Switchover::Coming(_))) || self.has_switched() {
            return;
        }
        for stream in self.streams().iter().filter(|stream| stream.kind == Kind::Main) {
            while let Some(before) = self.switchover.get() {
                match before.read_on(stream.socket()) {
                    Ok(0) | Err(_) => break,
                    Ok(got) => match before.pass(got) {
                        Some(behind) => self.switchover.set(Some(behind)),
                        None => {
                            self.switched.store(true, Ordering::Release);
                            return;
                        }
                    },
                }
            }
        }
    }
}

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

/// The messages to the user while a source does not show that it would pause.
struct Patience {
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
    fn new(stops: &mut Stops, notice: &mut impl FnMut(&str)) -> Self {
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
    fn is_over(&mut self, notice: &mut impl FnMut(&str)) -> bool {
        let Some(answered) = self.answered else {
            self.answer(notice);
            return false;
        };
        answered.elapsed() >= AT_ONCE
    }

    /// Reports a long wait, once.
    fn look(&mut self, cause: &SessionError, notice: &mut impl FnMut(&str)) {
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

impl Shared {
    /// Whether the destination has the VM in postcopy, and memory of it is still to come. Then a
    /// source whose socket closes at the right moment pauses.
    pub(super) fn is_in_postcopy(&self) -> bool {
        (self.has_switched() || self.is_only_answered()) && !self.has_sent_all()
    }

    /// The destination QEMU reported a failure. A source in postcopy does not run its VM again.
    pub(super) fn refusal(&self, code: u32) -> RelayError {
        if self.is_in_postcopy() {
            RelayError::PostcopyRefused { code }
        } else {
            RelayError::DestinationRefused { code }
        }
    }

    /// The error of a source relay that is in doubt now.
    fn doubt(&self, cause: &Arc<SessionError>) -> RelayError {
        let cause = cause.clone();
        match self.switchover.get() {
            Some(Switchover::Unanswered | Switchover::Answered) => {
                RelayError::TurnInDoubt { cause }
            }
            Some(Switchover::Sent) => RelayError::EndInDoubt { cause },
            _ => RelayError::InDoubt { cause },
        }
    }

    /// The main stream, if the bytes written to its QEMU end with a message, and none are being
    /// written.
    fn main_between_messages(&self) -> Option<Arc<SourceStream>> {
        if self.return_paths.load(Ordering::Acquire) > 0
            || !self.between_messages.load(Ordering::Acquire)
        {
            return None;
        }
        self.streams().into_iter().find(|stream| stream.kind.is_main())
    }

    /// Gives the source QEMU the PONG of the packaged state, which the destination QEMU has loaded;
    /// the links were lost before its own PONG came. Returns false when the source QEMU cannot have
    /// the PONG, or does not wait for it.
    fn hand_pong(&self) -> bool {
        let main = self.is_unanswered().then(|| self.main_between_messages()).flatten();
        main.is_some_and(|main| {
            self.answer(&main, true);
            { main.socket() }.write_all(&PONG_LOADED).is_ok()
        })
    }

    /// Gives the source QEMU SHUT(0), since the destination QEMU has confirmed; the links were lost
    /// before its own SHUT(0) came. Returns false when the source QEMU cannot have it.
    fn hand_success(&self) -> bool {
        // In postcopy other messages matter too, until all memory was sent. A message that was
        // written in part cannot be completed, and a thread that is still writing must not be
        // interrupted.
        let in_postcopy = self.switchover.get().is_some() || self.has_switched();
        if in_postcopy && !self.has_sent_all() {
            return false;
        }
        let Some(main) = self.main_between_messages() else { return false };
        self.handing_shut.store(true, Ordering::Release);
        let mut socket = main.socket();
        if socket.write_all(&SHUT_LOADED).is_err() {
            return false;
        }
        // QEMU closes when it has read it. If this end closes first, nothing is lost either.
        let deadline = Instant::now() + FAREWELL;
        while is_open(socket) && Instant::now() < deadline {
            std::thread::sleep(LOOK / 10);
        }
        true
    }
}
