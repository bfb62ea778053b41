//! A source relay from its first connection to its end. One thread decides ([`Source::run`]): all
//! others tell it what they saw.

use super::doubt::{hold, last_words, peer_reason, says_never, LOOK};
use super::handle::SourceHandle;
use super::keeper::Keeper;
use super::shared::{Event, Shared};
use crate::accelerator::{AcceleratorCounters, AcceleratorSnapshot};
use crate::auto::AutoReport;
use crate::counters::Counters;
use crate::error::RelayError;
use crate::threads::spawn;
use crate::unix::UnixAddress;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use session::{Redial, Session, SessionError};
use std::sync::atomic::{fence, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a QEMU that has its answer, or a peer that has our report, may take to end its side.
const FAREWELL: Duration = Duration::from_secs(10);

/// A source relay with its session open and its socket listening.
pub struct Source {
    pub(super) shared: Arc<Shared>,
    pub(super) redial: Redial,
    /// Taken by `run`; the lock only makes the type shareable.
    pub(super) events: Mutex<Receiver<Event>>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("session", &self.shared.session).finish_non_exhaustive()
    }
}

/// How it ended well.
#[derive(Debug)]
pub struct SourceEnd {
    /// From QEMU's first connection to its last byte.
    pub total: Duration,
    /// The peer's report, JSON; empty when it did not come in time.
    pub peer_report: Vec<u8>,
    /// The source had a return path, so that success means the destination runs.
    pub return_path: bool,
    /// How long the last bytes took from QEMU's socket here to QEMU's there: at most that is what
    /// the relays and the link added to the downtime. `None` in postcopy, where the VM runs before
    /// them.
    pub hidden_downtime: Option<Duration>,
}

impl Source {
    /// Starts to accept QEMU's connections.
    ///
    /// # Errors
    /// The path cannot be listened on.
    pub fn listen(&self, address: &UnixAddress) -> Result<(), RelayError> {
        let listening = address.listen()?;
        listening
            .listener
            .set_nonblocking(true)
            .map_err(|source| RelayError::Listen { address: address.to_string(), source })?;
        let _ = self.shared.listening.set(listening);
        let shared = self.shared.clone();
        spawn("accept", move || {
            while !shared.over.load(Ordering::Acquire) {
                if let Some(listening) = shared.listening.get() {
                    let mut fds = [PollFd::new(&listening.listener, PollFlags::IN)];
                    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 200_000_000 }));
                }
                shared.accept_waiting();
            }
        })
    }

    /// Has `keeper` hold QEMU's main socket while the destination may be running and the source
    /// does not know yet. To be called before [`Source::listen`], once.
    pub fn kept_by(&self, keeper: Keeper) {
        let _ = self.shared.keeper.set(keeper);
    }

    /// A handle for other threads.
    pub fn handle(&self) -> SourceHandle {
        SourceHandle(self.shared.clone())
    }

    /// The session, for its byte counters.
    pub fn session(&self) -> &Arc<Session> {
        &self.shared.session
    }

    /// What it has counted.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// What the codec threads' accelerators did; empty without any.
    pub fn accelerators(&self) -> Vec<AcceleratorSnapshot> {
        self.shared.accelerators.iter().map(AcceleratorCounters::snapshot).collect()
    }

    /// How `auto` chose, if it did.
    pub fn auto(&self) -> Option<AutoReport> {
        self.shared.auto.as_ref().map(|auto| auto.report())
    }

    /// QEMU's busy and busy-rate over the whole migration.
    pub fn busy(&self) -> (u64, f64) {
        let counters = self.shared.submitter.counters();
        (counters.busy_pages, counters.busy_rate_since(&pipeline::Counters::default()))
    }

    /// Carries the migration to its end. `notice` gets sentences a person should read meanwhile;
    /// `report` makes the JSON that the peer gets.
    ///
    /// # Errors
    /// Everything but a migration that the destination has confirmed (or, without a return path,
    /// has fully taken).
    pub fn run(
        &self,
        mut notice: impl FnMut(&str),
        report: impl FnOnce() -> Vec<u8>,
    ) -> Result<SourceEnd, RelayError> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &self.shared;
        let result =
            Decision::new(self, &events, &mut notice).run().map(|()| self.finish(&events, report));
        shared.over.store(true, Ordering::Release);
        if let Err(error) = &result {
            // Nothing that is queued may still reach the destination as if all were well (W21).
            shared
                .session
                .fail(SessionError::Local { reason: format!("the source relay ends: {error}") });
        }
        shared.close_sockets();
        if result.is_err() && !shared.session.is_linked() && shared.session.resume_timeout() > LOOK
        {
            // Nobody could be told: the peer waits for links that will not come. It need not be
            // reached.
            let _ = self.redial.ask();
        }
        shared.submitter.lanes().close();
        shared.close_return_paths();
        shared.session.join();
        result
    }

    /// The migration has ended well: exchanges reports.
    fn finish(&self, events: &Receiver<Event>, report: impl FnOnce() -> Vec<u8>) -> SourceEnd {
        let shared = &self.shared;
        let total = shared.started.get().map_or(Duration::ZERO, Instant::elapsed);
        shared.over.store(true, Ordering::Release);
        let hidden = !shared.has_switched();
        let mut end = SourceEnd {
            total,
            peer_report: Vec::new(),
            return_path: shared.return_path.load(Ordering::Acquire),
            hidden_downtime: hidden.then(|| shared.session.credits().last_delay()),
        };
        if shared.session.failure().is_some() {
            return end;
        }
        shared.session.send_finish(report());
        let deadline = Instant::now() + FAREWELL;
        loop {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Finished(report)) => {
                    end.peer_report = report;
                    return end;
                }
                Ok(Event::Closed(_)) | Err(_) => return end,
                Ok(_) => {}
            }
        }
    }
}

/// Whether the migration goes on after an event.
enum Course {
    On,
    /// It has ended well.
    Well,
}

/// What the deciding thread knows.
struct Decision<'a, N> {
    shared: &'a Shared,
    redial: &'a Redial,
    events: &'a Receiver<Event>,
    notice: &'a mut N,
    /// The source QEMU has closed its main connection.
    main_eof: bool,
    /// SHUT's value, once the source QEMU has it.
    shut: Option<u32>,
    /// Somebody wanted it to end while the destination might have been starting the VM.
    stop_asked: bool,
    /// The source QEMU has SHUT and need not say more.
    deadline: Option<Instant>,
}

impl<'a, N: FnMut(&str)> Decision<'a, N> {
    fn new(source: &'a Source, events: &'a Receiver<Event>, notice: &'a mut N) -> Self {
        Self {
            shared: &source.shared,
            redial: &source.redial,
            events,
            notice,
            main_eof: false,
            shut: None,
            stop_asked: false,
            deadline: None,
        }
    }

    /// Looks at events until the migration has ended.
    fn run(mut self) -> Result<(), RelayError> {
        loop {
            let event = match self.deadline {
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => {
                    self.events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
                }
            };
            let course = match event {
                Ok(Event::SourceEof { is_main: true }) => self.source_eof()?,
                Ok(Event::Shut(code)) => self.shut(code),
                Ok(Event::ShutRefused) => return Err(RelayError::SourceEnded),
                Ok(Event::DestinationEof) => self.destination_eof()?,
                Ok(Event::Closed(error)) => self.closed(error)?,
                Ok(Event::Notice(text)) => {
                    (self.notice)(&text);
                    Course::On
                }
                Ok(Event::Stop) => self.stop()?,
                Ok(Event::SourceEof { is_main: false } | Event::Finished(_) | Event::BackDone) => {
                    Course::On
                }
                // QEMU has its answer and keeps its socket: nothing more depends on it.
                Err(_) => match self.shut {
                    Some(code) if code != 0 => return Err(RelayError::DestinationRefused { code }),
                    _ => Course::Well,
                },
            };
            if let Course::Well = course {
                return Ok(());
            }
        }
    }

    fn has_return_path(&self) -> bool {
        self.shared.return_path.load(Ordering::Acquire)
    }

    fn shut(&mut self, code: u32) -> Course {
        self.shut = Some(code);
        self.deadline = Some(Instant::now() + FAREWELL);
        if self.main_eof && code == 0 {
            Course::Well
        } else {
            Course::On
        }
    }

    /// The source QEMU has closed its main connection.
    fn source_eof(&mut self) -> Result<Course, RelayError> {
        let shared = self.shared;
        self.main_eof = true;
        match self.shut {
            Some(0) => Ok(Course::Well),
            Some(code) => Err(RelayError::DestinationRefused { code }),
            // Without a return path this is how a migration ends; the destination says when it has
            // all.
            None if !self.has_return_path() && shared.tail_read.load(Ordering::Acquire) => {
                Ok(Course::On)
            }
            // It closed because the session ended, whose own event says why.
            None if shared.session.failure().is_some() => Ok(Course::On),
            None if shared.handing_shut.load(Ordering::Acquire) => Ok(Course::On),
            None if shared.has_switched() => {
                let cause = "the source QEMU closed its migration socket".into();
                Err(RelayError::Paused { cause })
            }
            None => Err(RelayError::SourceEnded),
        }
    }

    /// The destination QEMU has closed its main connection.
    fn destination_eof(&mut self) -> Result<Course, RelayError> {
        let shared = self.shared;
        match self.shut {
            Some(0) => return Ok(Course::On),
            Some(code) => return Err(RelayError::DestinationRefused { code }),
            None if self.main_eof && !self.has_return_path() => return Ok(Course::Well),
            None => {}
        }
        let reason = peer_reason(self.events).unwrap_or(RelayError::DestinationEnded);
        let cause = match &reason {
            RelayError::Ended(error) => error.clone(),
            _ => {
                let reason = "the destination QEMU closed its migration socket";
                Arc::new(SessionError::Local { reason: reason.into() })
            }
        };
        let never = says_never(&cause);
        if shared.has_switched() {
            return Err(shared.interrupted(&cause, never));
        }
        if shared.switchover.get().is_some() && shared.may_run_there() && !never {
            // It may have the packaged state, and have paused with its VM running.
            return Err(hold(shared, self.redial, self.events, cause, self.notice));
        }
        Err(reason)
    }

    /// The session has ended before its time.
    fn closed(&mut self, error: Arc<SessionError>) -> Result<Course, RelayError> {
        let shared = self.shared;
        // What the destination QEMU said before the end may still be on its way to the source QEMU,
        // and decides.
        let last = last_words(shared, self.events);
        self.main_eof |= last.main_eof;
        match self.shut.or(last.shut) {
            Some(0) => {
                (self.notice)(&format!("the peer left before its report: {error}"));
                return Ok(Course::Well);
            }
            Some(code) => return Err(RelayError::DestinationRefused { code }),
            None => {}
        }
        // Pairs with the fences in `Sink::still_open` and `set_switched`.
        fence(Ordering::SeqCst);
        let never = says_never(&error);
        if shared.has_switched() {
            return Err(shared.interrupted(&error, never));
        }
        if shared.may_run_there() && !never && self.has_return_path() && !self.main_eof {
            return Err(hold(shared, self.redial, self.events, error, self.notice));
        }
        Err(RelayError::Ended(error))
    }

    /// Somebody wants the relay to end.
    fn stop(&mut self) -> Result<Course, RelayError> {
        let shared = self.shared;
        let doubtful = |shut: Option<u32>| shut.is_none() && shared.may_run_there();
        if doubtful(self.shut) && !self.stop_asked {
            self.stop_asked = true;
            (self.notice)(if shared.has_switched() {
                "the destination has the VM, and pages of it are still to come; if this relay ends, the VM \
                 pauses there until its migration is taken up again (interrupt again to end it all the \
                 same)"
            } else {
                "the destination may be starting the VM just now; waiting for its answer (interrupt \
                 again to end this relay all the same)"
            });
            return Ok(Course::On);
        }
        let reason = "interrupted by the user";
        let error = || SessionError::Local { reason: reason.into() };
        // No link sends STILL_OPEN from here on, and what was sent is seen (`Sink::still_open`,
        // `set_switched`).
        shared.session.fail(error());
        fence(Ordering::SeqCst);
        if shared.has_switched() && self.shut.is_none() {
            return Err(RelayError::Paused { cause: reason.into() });
        }
        if doubtful(self.shut) && self.has_return_path() {
            if self.stop_asked {
                return Err(RelayError::LeftInDoubt);
            }
            // Sent in this very moment.
            return Err(hold(shared, self.redial, self.events, Arc::new(error()), self.notice));
        }
        Err(error().into())
    }
}
