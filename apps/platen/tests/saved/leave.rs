//! The end of a save after which the VM does not continue: a process that dies there leaves the VM
//! running and no image, or the VM stopped and an image.

use super::hung::{with_held, Hung};
use super::*;

use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// How the save is begun: with one stream, and by channels.
const HOW: [&[&str]; 2] = [&["--then", "quit"], &["--then", "pause", "--channels", "2"]];

/// Starts a save for which these calls wait, and waits until one of them does.
fn save_held_at(
    calls: &[(i64, Vec<SeccompRule>)],
    source: &Qemu,
    image: &Path,
    how: &[&str],
) -> (Child, Hung) {
    let mut save = Command::new(env!("CARGO_BIN_EXE_platen"));
    save.arg("save").arg(image).args(["--qmp", &source.address()]).args(how);
    save.stderr(Stdio::null());
    let (save, hung) = with_held(calls.to_vec(), || save.spawn().unwrap());
    assert!(hung.wait(), "{how:?} makes no such call");
    (save, hung)
}

/// Rules for all calls of these numbers.
fn rules(calls: &[i64]) -> Vec<(i64, Vec<SeccompRule>)> {
    calls.iter().map(|&call| (call, Vec::new())).collect()
}

fn kill(mut save: Child) {
    save.kill().unwrap();
    save.wait().unwrap();
}

/// The status of the VM, by the monitor that the save has not.
fn status(source: &Qemu) -> String {
    let mut monitor = Qmp::connect(&second_monitor(&source.socket), LONG).unwrap();
    monitor.query_status().unwrap().status
}

/// QEMU lets a VM run if the save ends before QEMU has been answered. The image has its name only
/// behind that: QEMU has stopped the VM for good while the name is made durable.
#[test]
fn a_vm_never_runs_beside_its_complete_image() {
    for how in HOW {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
        let before = settings(&source);
        let image = folder.join("image");
        let (save, hung) = save_held_at(&rules(&[libc::SYS_fsync]), &source, &image, how);
        while !image.exists() {
            hung.pass();
            assert!(hung.wait(), "{how:?} does not make the name durable");
        }
        assert_eq!(status(&source), "postmigrate", "{how:?}");
        kill(save);
        drop(hung);
        settings_come_back(&source, &before);
        assert_eq!(status(&source), "postmigrate", "{how:?}");
        works(folder, &["image", "verify", image.to_str().unwrap()]);
    }
}

/// The disk fails when the name is made durable, and when it is removed. The image is complete: the
/// VM does not go on beside it.
#[test]
fn a_vm_does_not_run_beside_an_image_whose_name_can_neither_be_made_durable_nor_removed() {
    #[cfg(target_arch = "x86_64")]
    const REMOVE: [i64; 2] = [libc::SYS_unlink, libc::SYS_unlinkat];
    #[cfg(not(target_arch = "x86_64"))]
    const REMOVE: [i64; 1] = [libc::SYS_unlinkat];
    for how in HOW {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
        let before = settings(&source);
        let image = folder.join("image");
        let mut save = Command::new(env!("CARGO_BIN_EXE_platen"));
        save.arg("save").arg(&image).args(["--qmp", &source.address()]).args(how);
        save.stderr(Stdio::piped());
        let calls = rules(&[&REMOVE[..], &[libc::SYS_fsync]].concat());
        let (save, hung) = with_held(calls, || save.spawn().unwrap());
        let mut failed = [false; 2];
        // Until the save and its helpers have ended.
        while hung.wait() {
            hung.answer(|call| {
                let nth = usize::from(REMOVE.contains(&call));
                let fails = image.exists() && !std::mem::replace(&mut failed[nth], true);
                fails.then_some(libc::EIO)
            });
        }
        let output = save.wait_with_output().unwrap();
        let said = said(&output);
        assert!(failed == [true; 2] && !output.status.success(), "{how:?} {failed:?}: {said}");
        assert!(said.contains("or remove it and let the VM go on"), "{how:?}: {said}");
        assert!(said.contains("the VM is 'postmigrate'"), "{how:?}: {said}");
        settings_come_back(&source, &before);
        assert_eq!(status(&source), "postmigrate", "{how:?}");
        works(folder, &["image", "verify", image.to_str().unwrap()]);
    }
}

/// The VM is stopped, and its image has no name yet. A VM that was paused stays so.
#[test]
fn a_save_killed_before_its_image_has_a_name_lets_the_vm_continue() {
    for (how, paused) in HOW.into_iter().flat_map(|how| [(how, false), (how, true)]) {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
        if paused {
            source.stop();
        }
        let before = settings(&source);
        let image = folder.join("image");
        let names = [libc::SYS_linkat, libc::SYS_renameat2];
        let (save, hung) = save_held_at(&rules(&names), &source, &image, how);
        assert_eq!(status(&source), "postmigrate", "{how:?}");
        kill(save);
        drop(hung);
        settings_come_back(&source, &before);
        let expected = if paused { "postmigrate" } else { "running" };
        assert_eq!(status(&source), expected, "{how:?}");
        assert!(!image.exists(), "{how:?}");
    }
}

/// A save that has looked at its VM, and waits before it tells QEMU to migrate: QEMU is told when
/// there is a socket for it. An earlier one claims QEMU's settings.
fn save_held_before_it_begins(source: &Qemu, image: &Path, how: &[&str]) -> (Child, Hung) {
    let (save, hung) = save_held_at(&rules(&[libc::SYS_bind]), source, image, how);
    hung.pass();
    assert!(hung.wait(), "{how:?} makes no socket for QEMU");
    (save, hung)
}

/// Another client stops the VM once the save has begun.
#[test]
fn a_vm_that_is_paused_while_it_is_saved_is_paused_after_its_restore() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let image = folder.join("image");
    let (mut save, hung) = save_held_before_it_begins(&source, &image, &["--then", "quit"]);
    let mut monitor = Qmp::connect(&second_monitor(&source.socket), LONG).unwrap();
    monitor.execute("stop", None).unwrap();
    hung.pass();
    assert!(save.wait().unwrap().success());
    let waiting = Qemu::start(folder, "waiting", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let words = ["restore", image.to_str().unwrap(), "--qmp", &waiting.address()];
    let (_, report) = works(folder, &words);
    assert_eq!((&report["mode"], &report["vm"]), (&json!("instant"), &json!("paused")));
}

/// As above. The save waited for a VM that runs, for two minutes, and made no image.
#[test]
fn a_vm_that_is_paused_while_it_is_saved_stays_paused_beside_its_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let image = folder.join("image");
    let (mut save, hung) = save_held_before_it_begins(&source, &image, &[]);
    let mut monitor = Qmp::connect(&second_monitor(&source.socket), LONG).unwrap();
    monitor.execute("stop", None).unwrap();
    hung.pass();
    assert!(save.wait().unwrap().success());
    // QEMU 7.2 calls this state `postmigrate`, as that of any VM that was paused when it was saved.
    assert!(!monitor.query_status().unwrap().running);
    works(folder, &["image", "verify", image.to_str().unwrap()]);
}

/// QEMU dies as it is answered. Nobody knows whether it has read the answer: this image may be all
/// that is left of the VM.
#[test]
fn an_image_stays_if_its_qemu_dies_before_it_has_confirmed_the_end() {
    const SHUT: u64 = 8;
    for how in HOW {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(mut source) = Qemu::start(folder, "source", &MACHINE) else { return };
        let image = folder.join("image");
        let len = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, SHUT);
        let rule = SeccompRule::new(vec![len.unwrap()]).unwrap();
        let calls = vec![(libc::SYS_sendto, vec![rule])];
        let (mut save, hung) = save_held_at(&calls, &source, &image, how);
        assert_eq!(status(&source), "finish-migrate", "{how:?}");
        source.child.kill().unwrap();
        source.child.wait().unwrap();
        hung.pass();
        assert!(!save.wait().unwrap().success());
        works(folder, &["image", "verify", image.to_str().unwrap()]);
    }
}
