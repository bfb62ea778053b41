use super::*;
use std::process::{Child, Command};

fn turn(of: &str) -> Turn {
    let name = format!("a domain of test {} {of}", std::process::id());
    let entry = Entry::domain(&name).unwrap();
    let found = Found::made(&entry);
    Turn { entry, found, words: Vec::new(), report: VmReport::new(&name, "there") }
}

/// The drive of one VM, whose process runs, and of which nobody listens.
fn drive<'a>(turns: &'a mut [Turn], folder: &'a Path, process: Child, file: &Path) -> Drive<'a> {
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
