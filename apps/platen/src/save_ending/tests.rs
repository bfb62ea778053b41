use super::*;
use crate::save::put_back_unless;
use crate::save_args::SaveArgs;
use clap::Parser;
use image::{Options, RamBlock};
use qmp::Qmp;
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Nothing here takes this long unless it hangs.
const WATCHDOG: Duration = Duration::from_secs(60);
/// How long a monitor has to be silent.
const SHORT: Duration = Duration::from_millis(50);

#[derive(Parser)]
struct Words {
    #[command(flatten)]
    args: SaveArgs,
}

/// A monitor that has answered the first command, the requests that it gets, and a client of it.
fn greeted() -> (Qmp, UnixStream, impl FnMut() -> Value) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(WATCHDOG)).unwrap();
    let mut monitor = theirs.try_clone().unwrap();
    let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
    let mut next =
        move || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let client = thread::spawn(|| Qmp::over(ours, WATCHDOG).unwrap());
    let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
    let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
    writeln!(monitor, "{greeting}").unwrap();
    writeln!(monitor, "{}", json!({ "return": {}, "id": next()["id"] })).unwrap();
    (client.join().unwrap(), theirs, next)
}

/// A monitor that answers nothing up to the command `last`, and closes at the next one.
fn monitor(last: Option<&'static str>) -> (Qmp, JoinHandle<()>) {
    let (qmp, theirs, mut next) = greeted();
    let monitor = thread::spawn(move || {
        let _open = theirs;
        let mut is_over = last.is_none();
        loop {
            let command = next();
            if is_over {
                return;
            }
            is_over = command["execute"].as_str() == last;
        }
    });
    (qmp, monitor)
}

/// A recorded save into `image`, and QEMU's end of its stream.
fn recorded(image: &Path) -> (Intake, UnixStream) {
    let (ours, qemu) = UnixStream::pair().unwrap();
    let mut writer = Writer::create(image, Options::default()).unwrap();
    let blocks = [RamBlock { name: "pc.ram".into(), len: 4096, host_page: 0 }];
    writer.blocks(4096, &blocks).unwrap();
    writer.page(0, 0, &[3; 4096]).unwrap();
    qemu.set_read_timeout(Some(WATCHDOG)).unwrap();
    (Intake::recorded_from(ours, writer), qemu)
}

fn args(image: &Path, then: &str) -> SaveArgs {
    let image = image.to_str().unwrap();
    Words::parse_from(["save", image, "--qmp", "unix:/none", "--then", then]).args
}

fn saving<'a>(args: &'a SaveArgs, qmp: &'a mut Qmp) -> Saving<'a> {
    Saving { patience: SHORT, ..Saving::new(args, qmp, Arc::default(), false) }
}

/// Regression: the image got its name although QEMU, which was only silent, had not taken SHUT. Its
/// VM could go on beside the image. A QEMU that has ended leaves its VM in the image.
#[test]
fn a_qemu_that_is_silent_gets_no_image_and_one_that_has_ended_does() {
    for (then, last) in [("pause", Some("query-status")), ("quit", None)] {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let (intake, qemu) = recorded(&image);
        // It does not read SHUT.
        qemu.shutdown(Shutdown::Read).unwrap();
        let (mut qmp, monitor) = monitor(last);
        let args = args(&image, then);
        let mut saving = saving(&args, &mut qmp);
        let left = saving.leave(intake, State::default(), &mut Before::default());
        // QEMU may take it later, and stop its VM: the keeper has to look.
        assert_eq!(saving.is_stuck, last.is_some());
        let error = format!("{:#}", left.unwrap_err());
        assert!(error.contains("cannot answer QEMU"), "{error}");
        assert_eq!(image.exists(), last.is_none(), "{error}");
        monitor.join().unwrap();
    }
}

/// Regression: the save waited two minutes for a QEMU that did not know of its end, and whose VM
/// was stopped.
#[test]
fn a_monitor_that_closes_as_the_vm_is_to_go_on_ends_the_connection() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image");
    let (intake, mut qemu) = recorded(&image);
    let (mut qmp, monitor) = monitor(None);
    // QEMU ends its connection only behind the other end's.
    let ends = thread::spawn(move || qemu.read(&mut [0]).map_err(|error| error.to_string()));
    let args = args(&image, "continue");
    let gone = saving(&args, &mut qmp).go_on(intake, State::default());
    assert_eq!(ends.join().unwrap(), Ok(0), "the VM stays stopped");
    let error = format!("{:#}", gone.unwrap_err());
    assert!(error.contains("closed its monitor during migrate_cancel"), "{error}");
    assert!(!image.exists());
    monitor.join().unwrap();
}

/// Regression: a QEMU that answered again just before the settings were restored, and then stopped
/// its VM for the save, had no helper process any more.
#[test]
fn a_save_that_does_not_know_its_vm_s_state_leaves_all_to_the_helper() {
    let changed = || {
        let mut settings = Before::default();
        settings.note_capability("multifd", false);
        settings
    };
    // It closes at the first command.
    let (mut qmp, monitor) = monitor(None);
    put_back_unless(true, changed(), &mut qmp).unwrap();
    put_back_unless(false, changed(), &mut qmp).unwrap_err();
    monitor.join().unwrap();
}

/// Regression: a save heard an interrupt up to 10 s late, and the VM was stopped as long: during
/// the switchover QEMU answers nothing.
#[test]
fn a_silent_qemu_is_asked_once_and_has_a_second_to_answer() {
    let folder = tempfile::tempdir().unwrap();
    let args = args(&folder.path().join("image"), "continue");
    let (mut qmp, mut theirs, mut next) = greeted();
    let mut saving = saving(&args, &mut qmp);
    let silent = |saving: &mut Saving| match saving.migration() {
        Err(QmpError::TimedOut { seconds, .. }) => assert_eq!(seconds, ANSWERS.as_secs_f64()),
        other => panic!("{other:?}"),
    };
    silent(&mut saving);
    for _ in 0..3 {
        assert!(saving.migration().unwrap().is_none());
    }
    let first = next();
    assert_eq!(first["execute"], "query-migrate");
    theirs.set_nonblocking(true).unwrap();
    assert!(theirs.read(&mut [0]).is_err(), "it is asked a second time");
    theirs.set_nonblocking(false).unwrap();
    let status = json!({ "status": "active" });
    writeln!(theirs, "{}", json!({ "return": status, "id": first["id"] })).unwrap();
    let mut answers = theirs.try_clone().unwrap();
    let second = thread::spawn(move || {
        writeln!(answers, "{}", json!({ "return": status, "id": next()["id"] })).unwrap();
    });
    assert_eq!(saving.migration().unwrap().unwrap().status(), "active");
    second.join().unwrap();
    // A monitor that closes is noticed without a question.
    silent(&mut saving);
    theirs.shutdown(Shutdown::Both).unwrap();
    assert!(matches!(saving.migration(), Err(QmpError::Closed { .. })));
}
