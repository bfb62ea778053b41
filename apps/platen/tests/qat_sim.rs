//! `platen qat sim`: the command's own exit status, and nothing left behind when it is interrupted.

use rustix::process::{kill_process, Pid, Signal};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn platen(folder: &Path, command: &[&str]) -> Command {
    let mut platen = Command::new(env!("CARGO_BIN_EXE_platen"));
    platen.args(["qat", "sim", "--libraries"]).arg(qat_sim::libraries()).arg("--");
    platen.args(command).env("TMPDIR", folder).stdout(Stdio::null()).stderr(Stdio::null());
    platen
}

fn left(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn the_exit_status_is_that_of_the_command() {
    let folder = tempfile::tempdir().unwrap();
    for (command, code) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 128 + 9)] {
        let status = platen(folder.path(), &["sh", "-c", command]).status().unwrap();
        assert_eq!(status.code(), Some(code), "{command}");
    }
    let status = platen(folder.path(), &["/nonexistent"]).status().unwrap();
    assert_eq!(status.code(), Some(1));
    assert_eq!(left(folder.path()), 0);
}

#[test]
fn an_interrupt_ends_the_command_and_its_processes() {
    let folder = tempfile::tempdir().unwrap();
    let begun = folder.path().join("begun");
    let script = format!("touch {}; exec sleep 1000", begun.display());
    let mut child = platen(folder.path(), &["sh", "-c", &script]).spawn().unwrap();
    let start = Instant::now();
    while !begun.exists() {
        assert!(start.elapsed() < Duration::from_secs(180), "the command does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    assert_eq!(left(folder.path()), 1, "more than the command's own file");
}
