//! Runs the migrations of an evacuation, and follows each to its end.

mod outcome;

use super::child::{is_of_moved, Migration, Told};
use super::entry::{Entry, Way};
use super::order::Found;
use super::patience::Patience;
use super::report::{Outcome, VmReport};
use super::schedule::{AtOnce, Schedule};
use crate::say::say;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

/// The interval between two looks at the processes.
const TICK: Duration = Duration::from_millis(200);
/// How long messages of a process that has ended may still arrive: on a busy host the thread that
/// reads them may get no CPU for a while. They end with the last process that has its standard
/// error; one that keeps QEMU's settings may outlive the migration.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// The advice about a VM in doubt.
const LOOK: &str = "Look at both hosts before you start or quit anything (docs/failures.md, the \
                    case in doubt)";

/// A VM and its turn.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) entry: Entry,
    pub(super) found: Found,
    /// The words of its `platen migrate`, or `virsh migrate`.
    pub(super) words: Vec<OsString>,
    pub(super) report: VmReport,
}

#[derive(Debug)]
enum State {
    Waiting,
    Running(Migration),
    /// The VM has moved. Its process goes on, to write a seed, and asks no source QEMU any more.
    Moved(Migration),
    /// Reported as in doubt, and not waited for. Its process goes on.
    Left(Migration),
    /// The process has ended at this time, and its last messages may still arrive.
    Ended(Migration, ExitStatus, Instant),
    /// Its source QEMU is asked where the VM is.
    Judged,
    Done,
}

/// An evacuation in progress.
struct Drive<'a> {
    turns: &'a mut [Turn],
    states: Vec<State>,
    said: Vec<String>,
    /// Whether all messages have arrived.
    heard_all: Vec<bool>,
    schedule: Schedule,
    patience: Patience,
    folder: &'a Path,
    begun: Instant,
    tell: Sender<(usize, Told)>,
    verdicts: Sender<(usize, Outcome, String)>,
    is_interrupted: bool,
}

/// Migrates the VMs, each in its turn, until each has an outcome. Returns the largest number of VMs
/// that migrated at once.
pub(super) fn drive(
    turns: &mut [Turn],
    at_once: AtOnce,
    (folder, begun): (&Path, Instant),
    interrupts: &AtomicU32,
) -> usize {
    let (tell, told) = mpsc::channel();
    let (verdicts, judged) = mpsc::channel();
    let mut drive = Drive {
        states: turns.iter().map(|_| State::Waiting).collect(),
        said: vec![String::new(); turns.len()],
        heard_all: vec![false; turns.len()],
        schedule: Schedule::new(turns.len(), at_once),
        patience: Patience::new(turns.len()),
        turns,
        folder,
        begun,
        tell,
        verdicts,
        is_interrupted: false,
    };
    let (mut seen, mut last) = (0, Instant::now());
    while !drive.is_over() {
        let now = interrupts.load(Ordering::Acquire);
        if now > seen {
            drive.interrupt(seen == 0);
            seen = now;
        }
        while let Some(vm) = drive.schedule.next(begun.elapsed()) {
            drive.start(vm);
        }
        drive.listen(&told, &judged);
        let now = Instant::now();
        drive.patience.pass(now.saturating_duration_since(std::mem::replace(&mut last, now)));
        for vm in 0..drive.states.len() {
            drive.look(vm);
        }
    }
    drive.schedule.most()
}

impl Drive<'_> {
    fn is_over(&self) -> bool {
        self.states.iter().all(|state| matches!(state, State::Done | State::Left(_)))
    }

    fn say(&self, vm: usize, text: &str) {
        say(&format!("{}: {text}", self.turns[vm].entry.name));
    }

    /// The first interrupt cancels the running migrations; a process whose VM may be at the other
    /// host heeds only an interrupt of its own. A second signal would force them, which may leave
    /// VMs in doubt, or in postcopy a VM at neither host. So a further interrupt only tells the
    /// user how to force each migration.
    fn interrupt(&mut self, is_first: bool) {
        self.is_interrupted = true;
        for vm in self.schedule.interrupt() {
            self.end(vm, Outcome::NotStarted, Some("interrupted before its turn".into()));
        }
        for vm in 0..self.states.len() {
            match &mut self.states[vm] {
                // It ends at once, and there is nothing to force.
                State::Moved(migration) => migration.cancel(),
                // None has been left because of an interrupt.
                State::Running(migration) | State::Left(migration) if is_first => {
                    migration.cancel();
                    self.patience.ordered(vm);
                    self.say(vm, "cancelling");
                }
                State::Running(migration) | State::Left(migration) => {
                    let id = migration.id();
                    self.say(
                        vm,
                        &format!("is not over yet; `kill -INT {id}` forces its migration"),
                    );
                }
                _ => {}
            }
        }
    }

    fn start(&mut self, vm: usize) {
        let turn = &mut self.turns[vm];
        let started = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let migration = match &turn.entry.way {
            Way::Monitor { .. } => Migration::start(vm, &turn.words, self.folder, &self.tell),
            Way::Domain => Migration::start_domain(vm, &turn.entry.name, &turn.words, &self.tell),
        };
        match migration {
            Ok(migration) => {
                turn.report.started = Some(started);
                let id = migration.id();
                self.states[vm] = State::Running(migration);
                if self.turns[vm].entry.way == Way::Domain {
                    self.patience.started(vm);
                }
                self.say(vm, &format!("starts (process {id})"));
            }
            Err(error) => {
                self.schedule.ended(vm, self.begun.elapsed());
                self.end(vm, Outcome::Stayed, Some(format!("{error:#}")));
            }
        }
    }

    /// Handles the messages of the migrations within a tick.
    fn listen(
        &mut self,
        told: &Receiver<(usize, Told)>,
        judged: &Receiver<(usize, Outcome, String)>,
    ) {
        let until = Instant::now() + TICK;
        while let Ok((vm, told)) =
            told.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            match told {
                Told::Line(line) => {
                    self.say(vm, &line);
                    self.said[vm] = line;
                }
                Told::Answer => self.patience.heard(vm),
                Told::NoMoreLines => self.heard_all[vm] = true,
                Told::Sample { sample, answers } => {
                    self.patience.started(vm);
                    if answers {
                        self.patience.answered(vm);
                    }
                    self.patience.sent(vm, sample.bytes);
                    if self.turns[vm].entry.way == Way::Domain {
                        self.turns[vm].report.transferred = Some(sample.bytes);
                    }
                    self.schedule.tells(vm, sample, self.begun.elapsed());
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        for (vm, outcome, text) in judged.try_iter() {
            let cause = self.turns[vm].report.error.take().unwrap_or_default();
            let error = match outcome {
                Outcome::InDoubt => format!("{cause}; {text}. {LOOK}"),
                _ => cause,
            };
            self.end(vm, outcome, Some(error));
        }
    }

    /// Checks whether a process has ended, and whether its last messages have had their time.
    fn look(&mut self, vm: usize) {
        let state = std::mem::replace(&mut self.states[vm], State::Judged);
        self.states[vm] = match state {
            State::Running(mut migration) => match migration.ended() {
                Some(status) => self.ended(vm, migration, status),
                // The next VM does not wait for a seed.
                None if migration.has_moved() => {
                    self.schedule.ended(vm, self.begun.elapsed());
                    State::Moved(migration)
                }
                None if self.patience.is_over(vm) => self.leave(vm, migration),
                None if self.is_interrupted
                    && self.schedule.waits_in_doubt(vm, self.begun.elapsed()) =>
                {
                    self.leave_in_doubt(vm, migration)
                }
                None => State::Running(migration),
            },
            State::Moved(mut migration) => match migration.ended() {
                Some(status) => State::Ended(migration, status, Instant::now()),
                // The disk of the seed may hang.
                None if self.is_interrupted => {
                    self.turns[vm].report.take(&migration.report());
                    self.end(vm, Outcome::Moved, None);
                    return;
                }
                None => State::Moved(migration),
            },
            // The outcome is better than the doubt, as long as other VMs keep the evacuation here.
            State::Left(mut migration) => match migration.ended() {
                Some(status) => self.ended(vm, migration, status),
                None if migration.has_moved() => State::Moved(migration),
                None => State::Left(migration),
            },
            State::Ended(migration, status, at)
                if self.heard_all[vm] || at.elapsed() >= LAST_WORDS =>
            {
                let report = migration.report();
                match self.turns[vm].entry.way {
                    Way::Monitor { .. } => self.turns[vm].report.take(&report),
                    Way::Domain => self.turns[vm].report.total_time = self.took(vm, at),
                }
                // Whatever has ended the process behind its report: the VM has moved.
                if status.success() || is_of_moved(&report) {
                    self.end(vm, Outcome::Moved, None);
                    return;
                }
                let cause = self.cause(vm, status, &report["error"]);
                // A source that runs its VM proves nothing then: there may be two.
                if report["may-run-there"] == true {
                    self.end(vm, Outcome::InDoubt, Some(format!("{cause}. {LOOK}")));
                    return;
                }
                self.turns[vm].report.error = Some(cause);
                self.ask(vm);
                State::Judged
            }
            other => other,
        };
    }

    fn ended(&mut self, vm: usize, migration: Migration, status: ExitStatus) -> State {
        self.schedule.ended(vm, self.begun.elapsed());
        State::Ended(migration, status, Instant::now())
    }

    fn end(&mut self, vm: usize, outcome: Outcome, error: Option<String>) {
        let words = outcome.words();
        match &error {
            Some(error) => self.say(vm, &format!("{words}: {error}")),
            None => self.say(vm, words),
        }
        let report = &mut self.turns[vm].report;
        (report.outcome, report.error) = (outcome, error);
        self.states[vm] = State::Done;
    }
}

#[cfg(test)]
mod tests;
