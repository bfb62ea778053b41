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

/// A monitor that answers nothing up to the command `last`, and closes at the next one.
fn monitor(last: Option<&'static str>) -> (Qmp, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let monitor = thread::spawn(move || {
        let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
        let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
        writeln!(theirs, "{greeting}").unwrap();
        let mut lines = BufReader::new(theirs.try_clone().unwrap()).lines();
        let mut next =
            || -> Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
        writeln!(theirs, "{}", json!({ "return": {}, "id": next()["id"] })).unwrap();
        let mut is_over = last.is_none();
        loop {
            let command = next();
            if is_over {
                return;
            }
            is_over = command["execute"].as_str() == last;
        }
    });
    (Qmp::over(ours, WATCHDOG).unwrap(), monitor)
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
