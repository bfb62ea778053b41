//! `save --snapshot`: the VM at the beginning of the save, while the VM runs on.

use super::*;
use std::os::fd::AsRawFd;

/// The image is whole, and the VM goes on with its former settings.
#[test]
fn a_snapshot_is_restored_and_its_vm_runs_on() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    // QEMU permits none of these beside background-snapshot.
    let others = [("multifd", true), ("xbzrle", true), ("auto-converge", true)];
    source.monitor().set_capabilities(&others).unwrap();
    let before = settings(&source);
    let image = folder.join("image").display().to_string();
    let words = ["save", &image, "--qmp", &source.address(), "--snapshot"];
    let (_, report) = works(folder, &words);
    assert_eq!((&report["vm"], &report["superseded"]), (&json!("running"), &json!(0)), "{report}");
    assert!(report["unsent"] == 0 && report["stopped-ms"].is_u64(), "{report}");
    assert_eq!(comes_to(&source, &["running"]), "running");
    assert_eq!(settings(&source), before);
    assert!(works(folder, &["image", "verify", &image]).0.contains("sound"));
    for (mode, flags) in [("load", &["--load"][..]), ("instant", &[])] {
        let waiting = Qemu::start(folder, mode, &[&MACHINE[..], &WAITS].concat()).unwrap();
        let address = waiting.address();
        let words = [&["restore", &image, "--qmp", &address][..], flags].concat();
        let (_, report) = works(folder, &words);
        assert_eq!((&report["mode"], &report["vm"]), (&json!(mode), &json!("running")));
    }
}

/// The settings do not change for a save that is refused.
#[test]
fn a_snapshot_that_cannot_be_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let before = settings(&source);
    let image = folder.join("image").display().to_string();
    let (path, address) = (&image[..], &source.address()[..]);
    let save = |then| ["save", path, "--qmp", address, "--snapshot", "--then", then];
    fails(folder, &save("pause"), "leave --snapshot out");
    fails(folder, &save("quit"), "leave --snapshot out");
    source.stop();
    fails(folder, &save("continue"), "the VM is 'paused': leave --snapshot out");
    assert_eq!(settings(&source), before);
    assert!(!Path::new(path).exists());
}

/// A process of platen's with this file as its standard error.
fn has_as_stderr(file: &Path) -> Option<String> {
    let of = |process: fs::DirEntry| {
        let words = fs::read(process.path().join("cmdline")).ok()?;
        let stderr = fs::read_link(process.path().join("fd/2")).ok()?;
        // Not one that another test is starting: it is this program until its exec.
        (words.starts_with(b"platen\0") && stderr == file)
            .then(|| String::from_utf8_lossy(&words).replace('\0', " "))
    };
    fs::read_dir("/proc").unwrap().flatten().find_map(of)
}

/// A QEMU that refuses to migrate leaves no process behind that waits for its connection.
#[test]
fn a_snapshot_that_qemu_refuses_ends_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    // QEMU 7.2 cannot migrate this device, and says so when it is told to migrate.
    let disk = ["-drive", "if=none,id=disk,file=null-co://,format=raw"];
    let nvme = ["-device", "nvme,serial=1,drive=disk"];
    let words = [&MACHINE[..], &disk, &nvme].concat();
    let Some(source) = Qemu::start(folder, "source", &words) else { return };
    let before = settings(&source);
    let image = folder.join("image").display().to_string();
    let mut save = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["save", &image, "--qmp", &source.address(), "--snapshot"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = save.stderr.take().unwrap();
    let pipe = fs::read_link(format!("/proc/self/fd/{}", said.as_raw_fd())).unwrap();
    assert!(!save.wait().unwrap().success());
    assert_eq!(has_as_stderr(&pipe), None, "a process is left behind");
    let mut text = String::new();
    said.read_to_string(&mut text).unwrap();
    assert!(text.contains("QEMU refused migrate: State blocked by non-migratable"), "{text}");
    assert_eq!(settings(&source), before);
    assert_eq!(comes_to(&source, &["running"]), "running");
}

/// Whenever the save is killed, the VM runs, QEMU's settings come back, and a file at the image's
/// path is complete.
#[test]
fn a_snapshot_killed_at_any_moment_leaves_the_vm_running() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let before = settings(&source);
    let mut whole = 0;
    for step in 0..24_u64 {
        let image = folder.join(format!("image{step}")).display().to_string();
        let mut save = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["save", &image, "--qmp", &source.address(), "--snapshot"])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_micros(step * 2500));
        let _ = save.kill();
        save.wait().unwrap();
        comes_to(&source, &["running"]);
        settings_come_back(&source, &before);
        if Path::new(&image).exists() {
            works(folder, &["image", "verify", &image]);
            whole += 1;
        }
    }
    println!("{whole} of 24 saves were finished");
}

/// A stream that QEMU itself has written with background-snapshot on becomes an image.
#[test]
fn a_stream_of_qemus_own_background_snapshot_is_imported() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let mut monitor = source.monitor();
    monitor.set_capabilities(&[("background-snapshot", true)]).unwrap();
    drop(monitor);
    let stream = streamed(folder, &source);
    comes_to(&source, &["running"]);
    let image = folder.join("image").display().to_string();
    works(folder, &["image", "import", &stream, &image]);
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let (_, report) = works(folder, &["restore", &image, "--qmp", &waiting.address()]);
    assert_eq!((&report["mode"], &report["vm"]), (&json!("instant"), &json!("running")));
}

/// Has QEMU write its stream to a file, and returns the file's path.
fn streamed(folder: &Path, source: &Qemu) -> String {
    let stream = folder.join("stream").display().to_string();
    let mut monitor = source.monitor();
    // QEMU's migration may be over before this process has written everything.
    monitor.migrate(&format!("exec:cat > {stream}.part && mv {stream}.part {stream}")).unwrap();
    drop(monitor);
    let deadline = Instant::now() + LONG;
    while !Path::new(&stream).exists() {
        assert!(Instant::now() < deadline, "the stream does not end");
        thread::sleep(Duration::from_millis(5));
    }
    stream
}

/// QEMU does not send RAM that virtio-mem has unplugged.
#[test]
fn a_stream_without_unplugged_ram_is_imported() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let plugged = ["-m", "64M,maxmem=1G", "-object", "memory-backend-ram,id=plug,size=128M"];
    let device = ["-device", "virtio-mem-pci,memdev=plug,requested-size=0"];
    let machine = [&MACHINE[..], &plugged, &device].concat();
    let Some(source) = Qemu::start(folder, "source", &machine) else { return };
    let stream = streamed(folder, &source);
    drop(source);
    let image = folder.join("image").display().to_string();
    works(folder, &["image", "import", &stream, &image]);
    let waiting = Qemu::start(folder, "waits", &[&machine[..], &WAITS].concat()).unwrap();
    let (_, report) = works(folder, &["restore", &image, "--qmp", &waiting.address(), "--load"]);
    assert_eq!(report["vm"], "running");
}
