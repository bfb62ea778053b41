//! Runs the migrations of an evacuation, and follows each to its end.

use super::child::{is_of_moved, Migration, Told};
use super::domain;
use super::entry::{Entry, Way};
use super::order::Found;
use super::patience::{Patience, SILENCE};
use super::report::{Outcome, VmReport};
use super::schedule::{AtOnce, Schedule};
use super::verdict::verdict;
use crate::say::say;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
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

    /// Reports a migration whose source does not answer as in doubt, and goes on with the others.
    /// Its process gets no signal: a first one is for the interrupt, and a second one would force
    /// the end.
    fn leave(&mut self, vm: usize, migration: Migration) -> State {
        let (source, program) = match self.turns[vm].entry.way {
            Way::Monitor { .. } => ("its source QEMU's monitor", "platen migrate"),
            Way::Domain => ("libvirt", "virsh migrate"),
        };
        let (silence, id) = (SILENCE.as_secs(), migration.id());
        let text = if self.is_interrupted {
            format!(
                "interrupted, but {source} has not answered for {silence} s: its {program} \
                 (process {id}) goes on, and cancels when it can. {LOOK}"
            )
        } else {
            format!(
                "{source} has not answered for {silence} s, and nothing was sent: its {program} \
                 (process {id}) goes on, and completes the migration when it can. {LOOK}"
            )
        };
        self.go_on_without(vm, migration, text)
    }

    /// Reports a VM that may be at the other host, and whose migration waits, after an interrupt.
    /// Its process goes on: only a person who has looked there can tell where the VM is to run.
    fn leave_in_doubt(&mut self, vm: usize, migration: Migration) -> State {
        let id = migration.id();
        let text = format!(
            "interrupted, but the other host may have the VM: its platen migrate (process {id}) goes \
             on. {LOOK}"
        );
        self.go_on_without(vm, migration, text)
    }

    fn go_on_without(&mut self, vm: usize, migration: Migration, text: String) -> State {
        self.schedule.ended(vm, self.begun.elapsed());
        self.end(vm, Outcome::InDoubt, Some(text));
        State::Left(migration)
    }

    /// The duration of a migration that has ended at `at`, ms.
    fn took(&self, vm: usize, at: Instant) -> Option<u64> {
        let at = u64::try_from(at.saturating_duration_since(self.begun).as_millis()).ok()?;
        Some(at.saturating_sub(self.turns[vm].report.started?))
    }

    /// Why a migration has failed.
    fn cause(&self, vm: usize, status: ExitStatus, error: &serde_json::Value) -> String {
        let said = &self.said[vm];
        let program = match self.turns[vm].entry.way {
            Way::Monitor { .. } => "platen migrate",
            Way::Domain => "virsh migrate",
        };
        match (status.signal(), error.as_str()) {
            (Some(signal), _) => format!("its {program} was ended by signal {signal}"),
            _ if !said.is_empty() => said.clone(),
            (None, Some(error)) => error.to_owned(),
            (None, None) => format!("its {program} ended with {status}"),
        }
    }

    /// Asks the source QEMU where the VM is, on a thread, so that the others continue.
    fn ask(&mut self, vm: usize) {
        let turn = &self.turns[vm];
        let (entry, before) = (turn.entry.clone(), turn.found.state.clone());
        let verdicts = self.verdicts.clone();
        let body = move || {
            let (outcome, text) = match &entry.way {
                Way::Monitor { monitor, .. } => verdict(monitor, &before),
                Way::Domain => domain::verdict(&entry.name, &before),
            };
            let _ = verdicts.send((vm, outcome, text));
        };
        if let Err(error) = std::thread::Builder::new().name("verdict".into()).spawn(body) {
            let text = format!("cannot start a thread to ask its source QEMU: {error}");
            let _ = self.verdicts.send((vm, Outcome::InDoubt, text));
        }
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
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn turn(of: &str) -> Turn {
        let name = format!("a domain of test {} {of}", std::process::id());
        let entry = Entry::domain(&name).unwrap();
        let found = Found::made(&entry);
        Turn { entry, found, words: Vec::new(), report: VmReport::new(&name, "there") }
    }

    /// The drive of one VM, whose process runs, and of which nobody listens.
    fn drive<'a>(
        turns: &'a mut [Turn],
        folder: &'a Path,
        process: Child,
        file: &Path,
    ) -> Drive<'a> {
        Drive {
            states: vec![State::Running(Migration::made(process, file.into()))],
            said: vec![String::new()],
            heard_all: vec![true],
            schedule: Schedule::new(2, AtOnce::Fixed(1)),
            patience: Patience::new(1),
            turns,
            folder,
            begun: Instant::now(),
            tell: mpsc::channel().0,
            verdicts: mpsc::channel().0,
            is_interrupted: false,
        }
    }

    /// Its source QEMU runs the VM, and so may the destination.
    #[test]
    fn a_vm_that_may_run_at_the_destination_is_in_doubt_whatever_its_source_says() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("report");
        let failed = r#"{"status":"failed","error":"look at both","may-run-there":true}"#;
        std::fs::write(&file, failed).unwrap();
        let mut turns = [turn("that may run twice")];
        let process = Command::new("false").spawn().unwrap();
        let mut drive = drive(&mut turns, folder.path(), process, &file);
        assert_eq!(drive.schedule.next(Duration::ZERO), Some(0));
        drive.patience.started(0);
        while !matches!(drive.states[0], State::Done | State::Judged) {
            drive.look(0);
        }
        assert_eq!(turns[0].report.outcome, Outcome::InDoubt);
        let error = turns[0].report.error.as_deref().unwrap();
        assert!(error.starts_with("look at both. Look at both hosts"), "{error}");
    }

    /// It asks its source QEMU nothing, for longer than a source QEMU may be silent.
    #[test]
    fn a_vm_whose_process_writes_a_seed_has_moved_and_keeps_no_other_from_its_turn() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("report");
        let mut turns = [turn("that writes a seed")];
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let mut drive = drive(&mut turns, folder.path(), process, &file);
        assert_eq!(drive.schedule.next(Duration::ZERO), Some(0));
        drive.patience.started(0);
        drive.look(0);
        assert_eq!(drive.schedule.next(Duration::ZERO), None);
        std::fs::write(&file, r#"{"status":"completed"}"#).unwrap();
        (0..100).for_each(|_| drive.patience.pass(Duration::from_secs(1)));
        drive.look(0);
        assert!(matches!(drive.states[0], State::Moved(_)), "{:?}", drive.states[0]);
        assert_eq!(drive.schedule.next(Duration::ZERO), Some(1), "the next VM");
        // One that was left as in doubt before has moved, too.
        let State::Moved(migration) = std::mem::replace(&mut drive.states[0], State::Judged) else {
            unreachable!()
        };
        drive.states[0] = State::Left(migration);
        drive.look(0);
        assert!(matches!(drive.states[0], State::Moved(_)), "{:?}", drive.states[0]);
        // The interrupt ends the process by a signal, which is no failure of the migration.
        drive.interrupt(true);
        while !drive.is_over() {
            drive.look(0);
        }
        assert_eq!(turns[0].report.outcome, Outcome::Moved);
    }
}
