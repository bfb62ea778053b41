//! Ctrl-C at a restore: the player goes on.

use super::*;

use rustix::process::Signal;
use std::io::{BufRead, BufReader};

/// Regression: an interrupt printed nothing, and the VM ran all the same. A user who takes the
/// restore for cancelled and starts the VM elsewhere has it twice.
#[test]
fn an_interrupt_of_a_restore_says_that_its_player_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let expected = block(&image, "pc.ram");
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let mut restore = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["restore", &image, "--qmp", &waiting.address(), "--push-rate", "16384"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(restore.stderr.take().unwrap()).lines();
    let mut next = || lines.next().map(|line| line.unwrap());
    while !next().expect("a player begins").ends_with(" begins") {}
    // The VM is there, and most of its RAM is not.
    let here = next().expect("the VM is there");
    let pid = rustix::process::Pid::from_child(&restore);
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    assert_eq!(restore.wait().unwrap().code(), Some(1));
    assert_eq!(comes_to(&waiting, &["paused", "running"]), "paused");
    let deadline = Instant::now() + LONG;
    let mut monitor = Qmp::connect(&second_monitor(&waiting.socket), LONG).unwrap();
    while monitor.query_migrate().unwrap().status() != "completed" {
        assert!(Instant::now() < deadline, "the VM is not loaded");
        thread::sleep(Duration::from_millis(20));
    }
    drop(monitor);
    // Up to the end of the player, which has the pipe, too.
    let rest: Vec<String> = std::iter::from_fn(next).collect();
    let said = "interrupted: the restore goes on without this command";
    assert!(rest.iter().any(|line| line.contains(said)), "{here} {rest:?}");
    let saved = folder.join("saved").display().to_string();
    works(folder, &["save", &saved, "--qmp", &waiting.address(), "--then", "quit"]);
    assert!(block(&saved, "pc.ram") == expected);
}
