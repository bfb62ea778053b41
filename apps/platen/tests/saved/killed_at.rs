//! Players that are killed at a chosen call.

use super::hung::with_held;
use super::*;
use rustix::process::{kill_process, Pid, Signal};

/// Whether this thread is one of a player.
fn is_player(thread: i32) -> bool {
    let line = fs::read(format!("/proc/{thread}/cmdline")).unwrap_or_default();
    line.split(|&byte| byte == 0).nth(1) == Some(b"play")
}

/// Restores `image`, and kills the first player before its call number `nth` that writes: to QEMU,
/// or to the restore. Returns the outcome, what the restore has said, and whether there was such a
/// call.
fn restore_killed_at(image: &str, to: &Qemu, nth: usize) -> (bool, String, bool) {
    let calls = [libc::SYS_write, libc::SYS_writev, libc::SYS_sendto, libc::SYS_sendmsg];
    let mut restore = Command::new(env!("CARGO_BIN_EXE_platen"));
    restore.args(["restore", image, "--qmp", &to.address(), "--no-hot-set"]);
    restore.stderr(Stdio::piped());
    let (restore, hung) =
        with_held(calls.map(|call| (call, Vec::new())).to_vec(), || restore.spawn().unwrap());
    let (mut seen, mut is_killed) = (0, false);
    hung.pass_all(|thread| {
        if is_killed || !is_player(thread) {
            return false;
        }
        seen += 1;
        is_killed = seen == nth;
        if is_killed {
            kill_process(Pid::from_raw(thread).unwrap(), Signal::KILL).unwrap();
        }
        is_killed
    });
    let output = restore.wait_with_output().unwrap();
    (output.status.success(), said(&output), is_killed)
}

/// Regression: players were killed at moments of the clock, which on a slow machine were all before
/// the VM ran, and the RAM was not compared.
///
/// A player is killed before each of its writes in turn: before it says that it connects, before
/// its opening with the devices, before each answer and each batch of pages, before the end of the
/// stream, and after QEMU has everything. The VM has not run, or another player goes on and the VM
/// has the RAM of the image.
#[test]
fn a_player_killed_before_any_of_its_writes_costs_neither_the_vm_nor_a_byte() {
    for program in multifd::qemus() {
        let dir = tempfile::tempdir().unwrap();
        kill_at_every_write(dir.path(), &program);
    }
}

fn kill_at_every_write(folder: &Path, program: &str) {
    // Pages for some more batches than those of the firmware.
    let page = |nth: u64| (0..512).flat_map(move |at| (nth * 1_000_003 + at * at).to_le_bytes());
    let pages = folder.join("pages");
    fs::write(&pages, (0..200).flat_map(page).collect::<Vec<u8>>()).unwrap();
    let loads = format!("loader,file={},addr=0x200000,force-raw=on", pages.display());
    let machine = [&MACHINE[..], &["-device", &loads]].concat();
    let Some(source) = Qemu::start_of(program, folder, "source", &machine) else { return };
    source.stop();
    drop(source.save(folder, "paused"));
    let image = folder.join("image").display().to_string();
    // All in `make proof`; in `make test` those up to the devices, and each third after them.
    let step = if multifd::is_quick() { 3 } else { 1 };
    let (mut not_run, mut replaced, mut ended, mut late) = (0, 0, 0, 0);
    for nth in (1..5).chain((5..).step_by(step)) {
        let (name, flags) = (format!("waits{nth}"), [&MACHINE[..], &WAITS].concat());
        let waiting = Qemu::start_of(program, folder, &name, &flags).unwrap();
        let (works, text, is_killed) = restore_killed_at(&image, &waiting, nth);
        let has_run = text.contains("the VM is paused");
        if works {
            assert_eq!(comes_to(&waiting, &["paused"]), "paused", "write {nth}: {text}");
            clones::has_ram_of(folder, &waiting, &image);
            match text.matches("platen: player ").count() {
                1 => late += 1,
                _ => replaced += 1,
            }
        } else if text.contains("before the VM ran") {
            assert!(!has_run, "write {nth}: {text}");
            not_run += 1;
        } else {
            // QEMU has noticed the death before it came to RUN, and ends after it.
            assert!(text.contains("this QEMU has ended") && !has_run, "write {nth}: {text}");
            ended += 1;
        }
        if !is_killed {
            break;
        }
    }
    let counts = format!("{not_run} before, {replaced} replaced, {ended} ended, {late} late");
    println!("{program}: {counts}");
    assert!(not_run > 0 && replaced > 3 && late > 0, "{program}: {counts}");
}
