//! The consequence of each event for the migration (W21 to W23, W28).

use super::doubt::{hold, pause};
use super::last_events::{final_events, peer_reason, Stops, WAITS};
use super::shared::{Event, Shared, FAREWELL};
use crate::error::{error_chain, RelayError};
use crate::sockets::LAST_EOF;
use session::{Redial, SessionError};
use std::sync::atomic::{fence, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a source without a return path, whose destination QEMU has closed, looks for the
/// acknowledgement of all bytes: an outage of the links may have delayed it.
const ACKS: Duration = Duration::from_secs(1);

/// Whether the migration continues after an event.
enum Course {
    On,
    /// It has ended in success.
    Well,
}

/// The state of the deciding thread.
pub(super) struct Decision<'a, N> {
    shared: &'a Shared,
    redial: &'a Redial,
    events: &'a Receiver<Event>,
    notice: &'a mut N,
    /// The source QEMU has closed its main connection.
    main_eof: bool,
    /// The destination QEMU has closed. It may have read the whole stream of a source without a
    /// return path.
    destination_closed: bool,
    /// SHUT's value, once the source QEMU has it.
    shut: Option<u32>,
    /// The requests to end that came while the destination might have been starting the VM, or
    /// while other events were awaited.
    stops: Stops,
    /// The source QEMU has SHUT, or the destination QEMU has closed: how long to wait for the rest.
    deadline: Option<Instant>,
}

impl<'a, N: FnMut(&str)> Decision<'a, N> {
    pub(super) fn new(
        shared: &'a Shared,
        redial: &'a Redial,
        events: &'a Receiver<Event>,
        notice: &'a mut N,
    ) -> Self {
        Self {
            shared,
            redial,
            events,
            notice,
            main_eof: false,
            destination_closed: false,
            shut: None,
            stops: Stops::default(),
            deadline: None,
        }
    }

    /// Handles events until the migration has ended.
    pub(super) fn run(mut self) -> Result<(), RelayError> {
        loop {
            let event = match self.deadline {
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.events.recv_timeout(if self.awaits_acks() { left.min(ACKS) } else { left })
                }
            };
            let course = match event {
                Ok(Event::SourceEof { is_main: true }) => self.source_eof()?,
                Ok(Event::Shut(code)) => self.shut(code)?,
                Ok(Event::ShutRefused(0)) => return Err(RelayError::SourceGone),
                Ok(Event::ShutRefused(_)) => return Err(RelayError::SourceEnded),
                Ok(Event::DestinationEof) => self.destination_eof()?,
                Ok(Event::Closed(error)) => self.closed(error)?,
                Ok(Event::Notice(text)) => {
                    (self.notice)(&text);
                    Course::On
                }
                Ok(Event::Stop(reason)) => self.stop(reason)?,
                Ok(Event::Fatal(error)) if !self.shared.has_main() => return Err(error),
                // The end of the session decides what happens to the VM.
                Ok(Event::Fatal(error)) => {
                    let reason = error_chain(&error);
                    self.shared.session.fail(SessionError::Local { reason });
                    // A reader may wait for a codec thread that never takes its chunk.
                    self.shared.submitter.pool().close();
                    Course::On
                }
                Ok(Event::SourceEof { is_main: false } | Event::Finished(_) | Event::BackDone) => {
                    Course::On
                }
                // QEMU has its answer and leaves its socket open: nothing more depends on it.
                Err(_) => match self.shut {
                    Some(code) if code != 0 => return Err(self.shared.refusal(code)),
                    None if self.destination_closed => self.look_for_acks()?,
                    _ => Course::Well,
                },
            };
            if let Course::Well = course {
                return Ok(());
            }
        }
    }

    /// Holds QEMU's sockets: the destination may be starting the VM, and this end gets no answer.
    fn hold(&mut self, cause: Arc<SessionError>) -> Result<Course, RelayError> {
        let events = (self.events, &mut self.stops);
        hold(self.shared, self.redial, events, cause, self.notice).map(|()| Course::Well)
    }

    /// Makes the source QEMU pause in postcopy.
    fn pause(&mut self, cause: Arc<SessionError>) -> Result<Course, RelayError> {
        let events = (self.events, &mut self.stops);
        pause(self.shared, self.redial, events, cause, self.notice).map(|()| Course::Well)
    }

    fn has_return_path(&self) -> bool {
        self.shared.return_path.load(Ordering::Acquire)
    }

    fn shut(&mut self, code: u32) -> Result<Course, RelayError> {
        self.shut = Some(code);
        self.deadline = Some(Instant::now() + FAREWELL);
        match (self.main_eof, code) {
            (false, _) => Ok(Course::On),
            (true, 0) => Ok(Course::Well),
            (true, code) => Err(self.shared.refusal(code)),
        }
    }

    /// Reacts to the end of the source QEMU's main connection.
    fn source_eof(&mut self) -> Result<Course, RelayError> {
        let shared = self.shared;
        self.main_eof = true;
        match self.shut {
            Some(0) => Ok(Course::Well),
            Some(code) => Err(self.shared.refusal(code)),
            // Without a return path a migration ends like this; the destination reports when it has
            // all bytes.
            None if shared.ended_whole.load(Ordering::Acquire) => {
                if !self.destination_closed {
                    return Ok(Course::On);
                }
                match shared.session.credits().drained(Instant::now() + FAREWELL) {
                    true => Ok(Course::Well),
                    false => self.look_for_acks(),
                }
            }
            // QEMU closed because the session ended; the session's own event has the reason.
            None if shared.session.failure().is_some() => Ok(Course::On),
            None if shared.handing_shut.load(Ordering::Acquire) => Ok(Course::On),
            // All memory is on its way to a destination that runs the VM, and will arrive.
            None if shared.has_sent_all() && !shared.cut_short.load(Ordering::Acquire) => {
                Ok(Course::On)
            }
            None if shared.has_switched() => {
                let cause = "the source QEMU closed its migration socket".into();
                Err(RelayError::Paused { cause })
            }
            None if !self.has_return_path() && shared.tail_read.load(Ordering::Acquire) => {
                Err(RelayError::Truncated)
            }
            None if shared.may_run_there() => Err(RelayError::SourceGone),
            None => Err(RelayError::SourceEnded),
        }
    }

    /// Whether the destination QEMU has closed, and the acknowledgement of all bytes that a source
    /// without a return path has written is to come.
    fn awaits_acks(&self) -> bool {
        self.destination_closed && self.shared.ended_whole.load(Ordering::Acquire)
    }

    /// Whether the destination QEMU, which has closed, had taken all bytes.
    fn look_for_acks(&self) -> Result<Course, RelayError> {
        let now = Instant::now();
        if self.awaits_acks() && self.main_eof && self.shared.session.credits().drained(now) {
            return Ok(Course::Well);
        }
        if self.deadline.is_some_and(|deadline| now < deadline) {
            return Ok(Course::On);
        }
        Err(RelayError::DestinationEnded)
    }

    /// Reacts to the end of the destination QEMU's main connection.
    fn destination_eof(&mut self) -> Result<Course, RelayError> {
        let shared = self.shared;
        match self.shut {
            Some(0) => return Ok(Course::On),
            Some(code) => return Err(self.shared.refusal(code)),
            // QEMU has closed with all bytes, or before it took them all. In the second case its
            // socket's error is under way.
            None if shared.ended_whole.load(Ordering::Acquire)
                && shared.session.credits().drained(Instant::now() + FAREWELL) =>
            {
                return Ok(Course::Well)
            }
            // QEMU may have read the whole stream, and this end not its end. If QEMU has not, the
            // peer reports that.
            None if shared.tail_read.load(Ordering::Acquire) && !self.has_return_path() => {
                self.destination_closed = true;
                self.deadline = Some(Instant::now() + LAST_EOF);
                return Ok(Course::On);
            }
            None => {}
        }
        let reason = peer_reason(self.events, &mut self.stops, self.notice);
        let reason = reason.unwrap_or(RelayError::DestinationEnded);
        let cause = match &reason {
            RelayError::Ended(error) => error.clone(),
            _ => {
                let reason = "the destination QEMU closed its migration socket";
                Arc::new(SessionError::Local { reason: reason.into() })
            }
        };
        let never = shared.says_never(&cause);
        if shared.is_in_postcopy() {
            return self.pause(cause);
        }
        if shared.switchover.get().is_some() && shared.may_run_there() && !never {
            // The destination QEMU may have the packaged state, and have paused the migration with
            // its VM running.
            return self.hold(cause);
        }
        Err(reason)
    }

    /// Reacts to the early end of the session.
    fn closed(&mut self, error: Arc<SessionError>) -> Result<Course, RelayError> {
        let shared = self.shared;
        // A last message of the destination QEMU may still be under way to the source QEMU. That
        // message decides.
        let last = final_events(shared, self.events, &mut self.stops, self.notice);
        self.main_eof |= last.main_eof;
        match self.shut.or(last.shut) {
            Some(0) => {
                (self.notice)(&format!("the peer left before its report: {error}"));
                return Ok(Course::Well);
            }
            Some(code) => return Err(self.shared.refusal(code)),
            None => {}
        }
        // Pairs with the fences in `Sink::still_open` and `set_switched`.
        fence(Ordering::SeqCst);
        let never = shared.says_never(&error);
        if shared.is_in_postcopy() {
            return self.pause(error);
        }
        if shared.may_run_there() && !never && self.has_return_path() && !self.main_eof {
            return self.hold(error);
        }
        match self.stops.take_first() {
            // Its user does not want another session.
            Some(reason) if !shared.has_main() => Err(interrupted(reason).into()),
            _ => Err(RelayError::Ended(error)),
        }
    }

    /// Ends the relay, at the user's request or for another reason.
    fn stop(&mut self, reason: Option<String>) -> Result<Course, RelayError> {
        // The source QEMU has its success, and only the reports are to be exchanged.
        if self.shut == Some(0) {
            return Ok(Course::Well);
        }
        let shared = self.shared;
        let doubtful = |shut: Option<u32>| shut.is_none() && shared.may_run_there();
        if doubtful(self.shut) && !self.stops.told {
            self.stops.told = true;
            let in_postcopy = shared.is_in_postcopy();
            (self.notice)(if in_postcopy {
                "the destination has the VM, and pages of it are still to come; if this relay ends, the VM \
                 pauses there until its migration is taken up again (interrupt again to end it all the \
                 same)"
            } else {
                WAITS
            });
            return Ok(Course::On);
        }
        let error = || interrupted(reason.clone());
        if self.stops.told {
            // It ends in any case, and asks nothing.
            shared.over.store(true, Ordering::Release);
        }
        // From here on no link sends STILL_OPEN, and one that was sent is visible
        // (`Sink::still_open`, `set_switched`).
        shared.session.fail(error());
        fence(Ordering::SeqCst);
        if shared.is_in_postcopy() && self.shut.is_none() {
            return self.pause(Arc::new(error()));
        }
        if doubtful(self.shut) && self.has_return_path() {
            if self.stops.told {
                return Err(RelayError::LeftInDoubt);
            }
            // STILL_OPEN was sent at this very moment.
            return self.hold(Arc::new(error()));
        }
        Err(error().into())
    }
}

/// The error of a session that ends at the user's request, or for the reason given.
fn interrupted(reason: Option<String>) -> SessionError {
    SessionError::Local { reason: reason.unwrap_or_else(|| "interrupted by the user".into()) }
}
