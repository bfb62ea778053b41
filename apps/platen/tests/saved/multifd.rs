//! `save --channels`: the pages come by several multifd channels.

use super::*;

/// The RAM of these VMs, which begins with the low memory of a PC. ROMs lie over the pages from
/// there to 1 MiB.
const RAM: u64 = mapped::RAM;
const LOW: u64 = 0xa_0000;
const HIGH: u64 = 1 << 20;

/// The installed QEMU, and those that `scripts/fetch-qemu` has fetched.
pub(super) fn qemus() -> Vec<String> {
    let fetched = [10, 11].into_iter().filter_map(mapped::fetched);
    ["qemu-system-x86_64".to_owned()].into_iter().chain(fetched).collect()
}

/// Settings that the user has made for migrations of another kind.
fn set_others(source: &Qemu) {
    let mut monitor = source.monitor();
    monitor.set_capabilities(&[("multifd", true)]).unwrap();
    let others =
        json!({ "multifd-channels": 5, "multifd-compression": "zlib", "downtime-limit": 123 });
    monitor.set_parameters(others).unwrap();
}

/// Whether this is a part of `make test`: fewer moments and ways than in `make proof`.
pub(super) fn is_quick() -> bool {
    std::env::var_os("PLATEN_QUICK").is_some()
}

/// The guest writes meanwhile; the image has the RAM of the moment at which it stops.
#[test]
fn a_vm_that_writes_is_saved_by_several_channels_with_every_byte() {
    for (nth, program) in qemus().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = mapped::start_busy_of(&program, folder) else { continue };
        set_others(&source);
        let before = settings(&source);
        let ways = [("4", &["--codec", "lz4"][..]), ("255", &[]), ("1", &[]), ("4", &["--stop"])];
        // One way of each program in `make test`, all in `make proof`.
        let (first, most) = if is_quick() { (usize::from(nth > 0), 1) } else { (0, ways.len()) };
        let chosen = ways.into_iter().enumerate().skip(first).take(most);
        for (nth, (channels, flags)) in chosen {
            let image = folder.join(format!("image{nth}")).display().to_string();
            let address = source.address();
            let words =
                ["save", &image, "--qmp", &address, "--then", "pause", "--channels", channels];
            let (_, report) = works(folder, &[&words[..], flags].concat());
            assert_eq!(report["vm"], json!("paused"), "{report}");
            assert_eq!(settings(&source), before);
            assert!(works(folder, &["image", "verify", &image]).0.contains("sound"));
            let saved = block(&image, "pc.ram");
            for (first, len) in [(0, LOW), (HIGH, RAM - HIGH)] {
                let bytes =
                    &saved[usize::try_from(first).unwrap()..][..usize::try_from(len).unwrap()];
                let is_same = mapped::memory(folder, &source, first, len) == bytes;
                assert!(is_same, "{program}, {channels} channels: RAM from {first:#x} on");
            }
            source.monitor().execute("cont", None).unwrap();
        }
    }
}

/// The VM goes on, and its image is restored at once and loaded first.
#[test]
fn a_vm_saved_by_several_channels_goes_on_and_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let before = settings(&source);
    let image = folder.join("image").display().to_string();
    let words = ["save", &image, "--qmp", &source.address(), "--multifd-channels", "3"];
    let (_, report) = works(folder, &words);
    assert_eq!((&report["vm"], &report["unsent"]), (&json!("running"), &json!(0)), "{report}");
    assert_eq!(comes_to(&source, &["running"]), "running");
    assert_eq!(settings(&source), before);
    for (mode, flags) in [("load", &["--load"][..]), ("instant", &[])] {
        let waiting = Qemu::start(folder, mode, &[&MACHINE[..], &WAITS].concat()).unwrap();
        let address = waiting.address();
        let words = [&["restore", &image, "--qmp", &address][..], flags].concat();
        let (_, report) = works(folder, &words);
        assert_eq!((&report["mode"], &report["vm"]), (&json!(mode), &json!("running")));
    }
    let snapshot = ["save", &image, "--qmp", &source.address(), "--snapshot", "--channels", "2"];
    fails(folder, &snapshot, "cannot be used with");
}

/// As with a single stream, also by Ctrl-C. QEMU 7.2 and 10.0 would hold a migration for ever whose
/// channels end while it begins; QEMU 7.2 would abort if its settings came back before it has
/// released them.
#[test]
fn a_save_by_several_channels_killed_at_any_moment_leaves_the_vm() {
    for program in qemus() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = mapped::start_busy_of(&program, folder) else { continue };
        // QEMU 7.2 that was cancelled in its last moment may leave its disks inactive, and abort in
        // the next migration (`bdrv_inactivate_recurse`). The guest needs its disk no more.
        let disk = json!({ "device": "floppy0", "force": true });
        source.monitor().execute("eject", Some(disk)).unwrap();
        set_others(&source);
        let before = settings(&source);
        let (mut whole, mut none) = (0, 0);
        for step in (0..36_u64).step_by(if is_quick() { 5 } else { 1 }) {
            let then = if step % 2 == 0 { "continue" } else { "pause" };
            let image = folder.join(format!("image{step}")).display().to_string();
            let mut save = Command::new(env!("CARGO_BIN_EXE_platen"))
                .args(["save", &image, "--qmp", &source.address(), "--then", then])
                .args(["--channels", "4"])
                .current_dir(folder)
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            thread::sleep(Duration::from_micros(step * step * 500));
            let pid = rustix::process::Pid::from_child(&save);
            let signal = match step % 3 {
                0 => rustix::process::Signal::INT,
                _ => rustix::process::Signal::KILL,
            };
            // It may have ended.
            let _ = rustix::process::kill_process(pid, signal);
            save.wait().unwrap();
            let states =
                if then == "pause" { &["running", "postmigrate"][..] } else { &["running"] };
            comes_to(&source, states);
            // The helper that restores them has let a VM without an image continue before.
            settings_come_back(&source, &before);
            let vm = comes_to(&source, states);
            if Path::new(&image).exists() {
                works(folder, &["image", "verify", &image]);
                whole += 1;
            } else {
                assert_eq!(vm, "running", "paused, and no image");
                none += 1;
            }
            if vm == "postmigrate" {
                source.monitor().execute("cont", None).unwrap();
            }
        }
        println!("{program}: {whole} saves were finished, {none} were not");
    }
}

/// Whenever QEMU is killed, the save fails or is complete.
#[test]
fn a_qemu_killed_while_its_channels_are_read_leaves_no_half_of_an_image() {
    let (mut whole, mut none) = (0, 0);
    for (program, step) in
        qemus().iter().flat_map(|program| (0..8_u64).map(move |at| (program, at)))
    {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(mut source) = mapped::start_busy_of(program, folder) else { continue };
        let image = folder.join("image").display().to_string();
        let save = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["save", &image, "--qmp", &source.address(), "--channels", "4"])
            .current_dir(folder)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_millis(15 + step * step * 8));
        source.child.kill().unwrap();
        let output = save.wait_with_output().unwrap();
        // The settings of a QEMU that has ended cannot come back, even if its image is complete.
        if Path::new(&image).exists() {
            works(folder, &["image", "verify", &image]);
            whole += 1;
        } else {
            assert!(!output.status.success(), "{}", said(&output));
            none += 1;
        }
    }
    println!("{whole} saves were finished, {none} were not");
}
