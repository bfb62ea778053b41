//! `save`, `restore` and `image` against the installed QEMU, with a VM that runs only its firmware:
//! refusals, fallbacks, and processes that are killed. Guests that verify their memory are in
//! tests/vm.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use player::Recovery;
use qmp::Qmp;
use serde_json::{json, Value};

#[path = "saved/access.rs"]
mod access;
#[path = "saved/clones.rs"]
mod clones;
#[path = "saved/codecs.rs"]
mod codecs;
#[path = "saved/disk.rs"]
mod disk;
#[path = "saved/hot.rs"]
mod hot;
#[path = "saved/libvirt.rs"]
mod libvirt;
#[path = "saved/mapped.rs"]
mod mapped;
#[path = "saved/remote.rs"]
mod remote;
#[path = "saved/shared.rs"]
mod shared;
#[path = "saved/snapshot.rs"]
mod snapshot;
#[path = "saved/store.rs"]
mod store;

const LONG: Duration = Duration::from_secs(300);

struct Qemu {
    child: Child,
    socket: PathBuf,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Both fail only if QEMU has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    /// Starts a VM of 16 MiB; `None` where no QEMU is installed.
    fn start(folder: &Path, name: &str, extra: &[&str]) -> Option<Self> {
        Self::start_of("qemu-system-x86_64", folder, name, extra)
    }

    /// As [`Qemu::start`], of the QEMU `program`.
    fn start_of(program: &str, folder: &Path, name: &str, extra: &[&str]) -> Option<Self> {
        let socket = folder.join(format!("{name}.qmp"));
        let mut command = Command::new(program);
        command.args([
            "-accel",
            "tcg",
            "-display",
            "none",
            "-nodefaults",
            "-m",
            "16",
            "-name",
            name,
        ]);
        for socket in [&socket, &second_monitor(&socket)] {
            command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        }
        command.args(extra).stdin(Stdio::null());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                println!("skipped: {program} cannot be started: {error}");
                return None;
            }
        };
        let qemu = Self { child, socket };
        let deadline = Instant::now() + LONG;
        // The path exists before QEMU listens there.
        while !listens(&qemu.socket) {
            assert!(Instant::now() < deadline, "QEMU does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        Some(qemu)
    }

    fn monitor(&self) -> Qmp {
        Qmp::connect(&self.socket, LONG).unwrap()
    }

    fn address(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    /// Saves the VM, which is in `state`.
    fn save(self, folder: &Path, state: &str) -> Self {
        let image = folder.join("image").display().to_string();
        let (_, report) = works(folder, &["save", &image, "--qmp", &self.address()]);
        assert_eq!((&report["status"], &report["vm"]), (&json!("completed"), &json!(state)));
        self
    }

    /// Stops the VM, whose memory then stays as it is. A VM that runs its firmware may ask for all
    /// of its memory while it is restored, however slow the background is.
    fn stop(&self) {
        self.monitor().execute("stop", None).unwrap();
    }

    /// Waits until the VM is `paused`: only then does QEMU wait for another player if this one
    /// dies. The restore has the first monitor.
    fn wait_paused(&self) {
        let mut monitor = Qmp::connect(&second_monitor(&self.socket), LONG).unwrap();
        let deadline = Instant::now() + LONG;
        loop {
            let state = monitor.query_status().unwrap().status;
            if state == "paused" {
                return;
            }
            assert!(Instant::now() < deadline, "the VM is {state}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn second_monitor(socket: &Path) -> PathBuf {
    socket.with_extension("second.qmp")
}

/// Whether a process listens on this socket: flag `__SO_ACCEPTCON` in the kernel's list.
fn listens(socket: &Path) -> bool {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.to_str().unwrap();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some("00010000") && fields.last() == Some(path)
    })
}

/// Runs `platen`; returns its output and its report.
fn platen(folder: &Path, words: &[&str]) -> (Output, Value) {
    let json = folder.join("report");
    let _ = fs::remove_file(&json);
    let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
    command.args(words);
    if words[0] != "image" {
        command.arg("--json").arg(&json);
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = fs::read_to_string(&json).unwrap_or_default();
    (output, serde_json::from_str(&text).unwrap_or_default())
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn works(folder: &Path, words: &[&str]) -> (String, Value) {
    let (output, report) = platen(folder, words);
    assert!(output.status.success(), "{words:?}: {}", said(&output));
    (String::from_utf8_lossy(&output.stdout).into_owned(), report)
}

#[track_caller]
fn fails(folder: &Path, words: &[&str], expected: &str) {
    let (output, _) = platen(folder, words);
    let said = said(&output);
    assert!(!output.status.success() && said.contains(expected), "{words:?}: {said}");
}

const MACHINE: [&str; 2] = ["-machine", "pc"];
const WAITS: [&str; 2] = ["-incoming", "defer"];

/// Starts and saves a VM; returns it and its image.
fn saved(folder: &Path) -> Option<(Qemu, String)> {
    let source = Qemu::start(folder, "source", &MACHINE)?;
    Some((source.save(folder, "running"), folder.join("image").display().to_string()))
}

/// Starts, stops and saves a VM; returns it and its image.
fn saved_paused(folder: &Path) -> Option<(Qemu, String)> {
    let source = Qemu::start(folder, "source", &MACHINE)?;
    source.stop();
    Some((source.save(folder, "paused"), folder.join("image").display().to_string()))
}

#[test]
fn an_image_is_shown_verified_exported_and_imported() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((_source, image)) = saved(folder) else { return };
    let (text, _) = works(folder, &["image", "info", &image]);
    assert!(text.contains("VM source") && text.contains("pc.ram"), "{text}");
    let (text, _) = works(folder, &["image", "info", "--json", &image]);
    let info: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&info["facts"]["running"], &info["page-size"]), (&json!(true), &json!(4096)));
    assert!(works(folder, &["image", "verify", &image]).0.contains("sound"));
    let stream = folder.join("stream");
    works(folder, &["image", "export", &image, stream.to_str().unwrap()]);
    // The stream holds the guest's memory.
    let mode = fs::metadata(&stream).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    fails(folder, &["image", "export", &image, stream.to_str().unwrap()], "cannot create");
    // An export to standard output is the same stream.
    let (output, _) = platen(folder, &["image", "export", &image, "-"]);
    assert!(output.stdout == fs::read(&stream).unwrap() && output.stdout.starts_with(b"QEVM"));
    let again = folder.join("again").display().to_string();
    works(folder, &["image", "import", stream.to_str().unwrap(), &again]);
    let (mut first, mut second) = (Value::Null, Value::Null);
    for (image, info) in [(&image, &mut first), (&again, &mut second)] {
        *info =
            serde_json::from_str(&works(folder, &["image", "info", "--json", image]).0).unwrap();
    }
    assert_eq!(first["blocks"], second["blocks"]);
    // A stream that lacks its last byte, and an image with one changed byte.
    let len = fs::metadata(&stream).unwrap().len();
    File::options().write(true).open(&stream).unwrap().set_len(len - 1).unwrap();
    let none = folder.join("none").display().to_string();
    fails(folder, &["image", "import", stream.to_str().unwrap(), &none], "is cut off");
    assert!(!Path::new(&none).exists());
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 1000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
    fails(folder, &["image", "verify", &image], "unit 0");
}

#[test]
fn memory_that_cannot_be_loaded_late_is_loaded_first_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let memory = folder.join("memory").display().to_string();
    let object = format!("memory-backend-file,id=mem,size=16M,mem-path={memory},share=on");
    // This option names the RAM block after the backend's id instead of its object path.
    let object = format!("{object},x-use-canonical-path-for-ramblock-id=off");
    let flags = ["-object", &object, "-machine", "pc,memory-backend=mem"];
    let Some(source) = Qemu::start(folder, "file", &flags) else { return };
    let image_of_file = folder.join("image2").display().to_string();
    works(folder, &["save", &image_of_file, "--qmp", &source.address(), "--then", "quit"]);
    drop(source);
    let waiting = Qemu::start(folder, "waits", &[&flags[..], &WAITS].concat()).unwrap();
    let mut monitor = waiting.monitor();
    // With x-ignore-shared QEMU would read another block table.
    monitor.set_capabilities(&[("x-ignore-shared", true), ("multifd", true)]).unwrap();
    let before = monitor.execute("query-migrate-capabilities", None).unwrap();
    drop(monitor);
    let (_, report) = works(folder, &["restore", &image_of_file, "--qmp", &waiting.address()]);
    assert_eq!((&report["mode"], &report["vm"]), (&json!("load"), &json!("running")));
    assert!(report["fallback"].as_str().unwrap().contains("backend mem is a file"), "{report}");
    let after = waiting.monitor().execute("query-migrate-capabilities", None).unwrap();
    assert_eq!(before, after);
    // The first image, of a VM without such a backend, has a RAM block of another name, which does
    // not fit.
    let waiting = Qemu::start(folder, "other", &[&flags[..], &WAITS].concat()).unwrap();
    fails(folder, &["restore", &image, "--qmp", &waiting.address()], "its log has the reason");
}

#[test]
fn an_image_that_does_not_fit_is_refused_before_anything_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    let mut monitor = source.monitor();
    monitor.set_capabilities(&[("dirty-bitmaps", true)]).unwrap();
    drop(monitor);
    let other = folder.join("other").display().to_string();
    fails(folder, &["save", &other, "--qmp", &source.address()], "dirty-bitmaps");
    assert!(!Path::new(&other).exists());
    source.monitor().set_capabilities(&[("dirty-bitmaps", false)]).unwrap();
    fails(folder, &["save", &image, "--qmp", &source.address()], "exists");
    fails(folder, &["restore", &image, "--qmp", &source.address()], "-incoming defer");
    fails(folder, &["save", "/nowhere/image", "--qmp", &source.address()], "/nowhere/image");
    let waiting = Qemu::start(folder, "q35", &[&["-machine", "q35"][..], &WAITS].concat()).unwrap();
    fails(folder, &["restore", &image, "--qmp", &waiting.address()], "q35");
    assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
    fs::write(&other, "no image").unwrap();
    fails(folder, &["restore", &other, "--qmp", &waiting.address()], "not an image of platen");
    let mut whole = Vec::new();
    File::open(&image).unwrap().read_to_end(&mut whole).unwrap();
    let words = ["restore", &image, "--qmp", &waiting.address(), "--copy", &other];
    fails(folder, &words, "not an image of platen");
    fs::write(&other, &whole[..whole.len() / 2]).unwrap();
    fails(folder, &["restore", &other, "--qmp", &waiting.address()], "cut off");
    assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
}

#[test]
fn a_paused_vm_stays_paused_and_one_that_is_to_end_ends() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(mut source) = Qemu::start(folder, "paused", &[&MACHINE[..], &["-S"]].concat()) else {
        return;
    };
    source.monitor().execute("cont", None).unwrap();
    source.monitor().execute("stop", None).unwrap();
    let image = folder.join("image").display().to_string();
    let words = ["save", &image, "--qmp", &source.address(), "--then", "quit", "--stop"];
    let (_, report) = works(folder, &words);
    assert!(report["vm"].as_str().unwrap().contains("gone"), "{report}");
    assert!(source.child.wait().unwrap().success());
    for (mode, flags) in [("load", &["--load"][..]), ("instant", &[])] {
        let waiting = Qemu::start(folder, mode, &[&MACHINE[..], &WAITS].concat()).unwrap();
        let address = waiting.address();
        let words = [&["restore", &image, "--qmp", &address][..], flags].concat();
        let (_, report) = works(folder, &words);
        assert_eq!((&report["mode"], &report["vm"]), (&json!(mode), &json!("paused")));
    }
}

/// Starts `platen save`, and kills it after `wait`.
fn save_killed_after(folder: &Path, source: &Qemu, image: &str, then: &str, wait: Duration) {
    let mut save = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["save", image, "--qmp", &source.address(), "--then", then])
        .current_dir(folder)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    thread::sleep(wait);
    let _ = save.kill();
    save.wait().unwrap();
}

/// Waits until the VM is in one of `states` and no migration is in progress.
#[track_caller]
fn comes_to(source: &Qemu, states: &[&str]) -> String {
    let mut monitor = source.monitor();
    let deadline = Instant::now() + LONG;
    loop {
        let vm = monitor.query_status().unwrap().status;
        let info = monitor.query_migrate().unwrap();
        let over = info.is_over() || info.status() == "none";
        if over && states.contains(&vm.as_str()) {
            return vm;
        }
        assert!(Instant::now() < deadline, "the VM is {vm}, its migration {}", info.status());
        thread::sleep(Duration::from_millis(5));
    }
}

/// QEMU's migration capabilities and parameters. The monitor is free again when this returns.
fn settings(qemu: &Qemu) -> (Value, Value) {
    let mut monitor = qemu.monitor();
    let capabilities = monitor.execute("query-migrate-capabilities", None).unwrap();
    (capabilities, monitor.query_parameters().unwrap())
}

/// Waits until QEMU's settings are as they were. The process that restores them needs the monitor.
#[track_caller]
fn settings_come_back(qemu: &Qemu, before: &(Value, Value)) {
    let deadline = Instant::now() + LONG;
    while settings(qemu) != *before {
        assert!(Instant::now() < deadline, "the settings are not as they were before");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Whenever the save is killed, QEMU's settings come back. A VM with `--then continue` runs on, and
/// a file at the image's path is complete. A VM with `--then pause` is paused only if its image
/// exists.
#[test]
fn a_save_killed_at_any_moment_leaves_the_vm_and_no_half_of_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let mut monitor = source.monitor();
    monitor.set_capabilities(&[("multifd", true), ("xbzrle", true)]).unwrap();
    monitor.set_parameters(json!({ "max-bandwidth": 1 << 30, "downtime-limit": 123 })).unwrap();
    drop(monitor);
    let before = settings(&source);
    let (mut whole, mut none) = (0, 0);
    for step in 0..50 {
        let then = if step % 2 == 0 { "continue" } else { "pause" };
        let image = folder.join(format!("image{step}")).display().to_string();
        save_killed_after(folder, &source, &image, then, Duration::from_micros(step * 600));
        let states = if then == "pause" { &["running", "postmigrate"][..] } else { &["running"] };
        let vm = comes_to(&source, states);
        settings_come_back(&source, &before);
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
    println!("{whole} saves were finished, {none} were not");
    let left = fs::read_dir(folder).unwrap().count();
    assert_eq!(left, whole + 2, "files beside the images and the monitors' sockets");
}

/// Whenever a player is killed, the restore reports that the VM has not run, or another player
/// continues and sends everything.
#[test]
fn a_player_killed_at_any_moment_is_replaced_or_the_vm_has_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let (mut replaced, mut not_run, mut ended, mut late) = (0, 0, 0, 0);
    for step in 0..16 {
        let waiting =
            Qemu::start(folder, &format!("waits{step}"), &[&MACHINE[..], &WAITS].concat()).unwrap();
        let mut restore = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["restore", &image, "--qmp", &waiting.address(), "--push-rate", "2M"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(restore.stderr.take().unwrap());
        let mut text = String::new();
        let mut killed = false;
        loop {
            let begin = text.len();
            if std::io::BufRead::read_line(&mut lines, &mut text).unwrap() == 0 {
                break;
            }
            let pid = text[begin..].strip_prefix("platen: player ");
            let pid = pid.and_then(|rest| rest.trim_end().strip_suffix(" begins"));
            if let (Some(pid), false) = (pid, killed) {
                thread::sleep(Duration::from_micros(step * step * 500));
                let _ = Command::new("kill").args(["-9", pid]).stderr(Stdio::null()).status();
                killed = true;
            }
        }
        let status = restore.wait().unwrap();
        let has_ended = text.contains("this QEMU has ended");
        assert_eq!(status.success(), !text.contains("before the VM ran") && !has_ended, "{text}");
        if text.contains("before the VM ran") {
            not_run += 1;
        } else if has_ended {
            // QEMU has noticed the death before it came to RUN, and ends after it.
            assert!(text.contains("the VM has run"), "{text}");
            ended += 1;
        } else {
            assert!(text.contains("the image is not needed any more"), "{text}");
            assert_eq!(comes_to(&waiting, &["running"]), "running");
            if text.contains("another goes on") {
                replaced += 1;
            } else {
                late += 1;
            }
        }
    }
    println!(
        "{replaced} replaced, {not_run} before the VM ran, {ended} as it ran, {late} too late"
    );
}

/// A restore that has not ended.
struct Restore {
    child: Child,
    lines: std::io::BufReader<std::process::ChildStderr>,
    text: String,
}

impl Drop for Restore {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Restore {
    /// Starts a restore of a paused VM whose background is so slow that it does not end by itself,
    /// and waits until the VM could run.
    fn held(image: &str, qemu: &Qemu, flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["restore", image, "--qmp", &qemu.address(), "--push-rate", "1"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(child.stderr.take().unwrap());
        let mut this = Self { child, lines, text: String::new() };
        this.wait_for("the VM is paused");
        qemu.wait_paused();
        this
    }

    /// Waits until it has printed `words`.
    #[track_caller]
    fn wait_for(&mut self, words: &str) {
        while !self.text.contains(words) {
            assert!(
                !self.text.contains("the VM runs") || !words.contains("paused"),
                "{}",
                self.text
            );
            let read = std::io::BufRead::read_line(&mut self.lines, &mut self.text).unwrap();
            assert!(read > 0, "no '{words}': {}", self.text);
        }
    }

    /// Process id of the last player.
    fn player(&self) -> i32 {
        let mut begun = self.text.lines().filter_map(|line| {
            line.strip_prefix("platen: player ")?.strip_suffix(" begins")?.parse().ok()
        });
        begun.next_back().unwrap()
    }
}

/// Kills a process, and waits until the kernel has released its lock of the image.
fn kill(pid: i32, image: &str) {
    let process = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let file = File::open(image).unwrap();
    let deadline = Instant::now() + LONG;
    while rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
        assert!(Instant::now() < deadline, "process {pid} does not end");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_image_in_use_is_not_restored_again_unless_all_share_it() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let waits = |name| Qemu::start(folder, name, &[&MACHINE[..], &WAITS].concat()).unwrap();
    let (first, second) = (waits("first"), waits("second"));
    let mut restore = Restore::held(&image, &first, &[]);
    let player = restore.player();
    let words = ["restore", &image, "--qmp", &second.address()];
    let named = format!("image {image} is in use by process");
    fails(folder, &words, &named);
    fails(folder, &words, &format!("{player} (platen)"));
    fails(folder, &[&words[..], &["--shared"]].concat(), &named);
    fails(folder, &["restore", &image, "--qmp", &first.address(), "--recover"], &named);
    // The player continues alone, and holds the image.
    restore.child.kill().unwrap();
    restore.child.wait().unwrap();
    fails(folder, &words, &format!("in use by process {player} (platen)"));
    assert_eq!(second.monitor().query_status().unwrap().status, "inmigrate");
    kill(player, &image);
    drop(first);
    let sharing = Restore::held(&image, &second, &["--shared"]);
    let third = waits("third");
    let words = ["restore", &image, "--qmp", &third.address()];
    fails(folder, &words, &named);
    works(folder, &[&words[..], &["--shared"]].concat());
    drop(sharing);
}

/// A player asks QEMU for the pages that it has, and then resumes it. One that dies in between must
/// not cost the VM: QEMU 7.2 crashes if it loses its connection then.
#[test]
fn a_player_killed_before_qemu_has_resumed_costs_no_vm() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let mut restore = Restore::held(&image, &waiting, &[]);
    let player = restore.player();
    restore.child.kill().unwrap();
    restore.child.wait().unwrap();
    kill(player, &image);
    // Its name tells `--recover` the image.
    let mut monitor = Qmp::connect(&second_monitor(&waiting.socket), LONG).unwrap();
    let info = monitor.execute("query-migrate", None).unwrap();
    let name = Path::new(info["socket-address"][0]["path"].as_str().unwrap()).file_name().unwrap();
    drop(monitor);
    for nth in 0..2 {
        assert_eq!(migration(&waiting), "postcopy-paused");
        let socket = folder.join(nth.to_string()).join(name);
        fs::create_dir(socket.parent().unwrap()).unwrap();
        let mut monitor = Qmp::connect_out_of_band(&second_monitor(&waiting.socket), LONG).unwrap();
        let uri = json!({ "uri": format!("unix:{}", socket.display()) });
        monitor.execute_out_of_band("migrate-recover", Some(uri)).unwrap();
        let connection = UnixStream::connect(&socket).unwrap();
        let mut player = connection.try_clone().unwrap();
        let recovery = Recovery::new(connection);
        if nth == 1 {
            // RECV_BITMAP for pc.ram; the first bytes of the answer.
            player.write_all(b"\x08\0\x0a\0\x07\x06pc.ram").unwrap();
            player.read_exact(&mut [0; 8]).unwrap();
        }
        drop(player);
        drop(recovery);
    }
    assert_eq!(migration(&waiting), "postcopy-paused");
    works(folder, &["restore", &image, "--qmp", &waiting.address(), "--recover"]);
    clones::has_ram_of(folder, &waiting, &image);
}

/// The state of QEMU's migration once it is neither active nor about to be recovered.
fn migration(qemu: &Qemu) -> String {
    let mut monitor = Qmp::connect(&second_monitor(&qemu.socket), LONG).unwrap();
    let deadline = Instant::now() + LONG;
    loop {
        let state = monitor.execute("query-migrate", None).unwrap()["status"].clone();
        let state = state.as_str().unwrap_or_default().to_owned();
        if !["postcopy-active", "postcopy-recover", "postcopy-recover-setup"].contains(&&*state) {
            return state;
        }
        assert!(Instant::now() < deadline, "QEMU's migration stays {state}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A VM gets pages of its own image only: not of another one of the same VM, given to `--recover`
/// or put in the image's place.
#[test]
fn a_vm_that_runs_gets_no_page_of_another_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    source.monitor().execute("cont", None).unwrap();
    source.stop();
    let other = folder.join("other").display().to_string();
    works(folder, &["save", &other, "--qmp", &source.address()]);
    drop(source);
    let copy = folder.join("copy").display().to_string();
    fs::copy(&image, &copy).unwrap();
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let mut restore = Restore::held(&image, &waiting, &["--copy", &copy]);
    fs::rename(&image, folder.join("kept")).unwrap();
    fs::copy(&other, &image).unwrap();
    let player = rustix::process::Pid::from_raw(restore.player()).unwrap();
    rustix::process::kill_process(player, rustix::process::Signal::KILL).unwrap();
    restore.wait_for(&format!(
        "image {image} was replaced by another one; another goes on from {copy}"
    ));
    restore.wait_for("the VM goes on");
    let player = restore.player();
    restore.child.kill().unwrap();
    restore.child.wait().unwrap();
    kill(player, &copy);
    let words =
        |image| ["restore", image, "--qmp", &waiting.address(), "--recover"].map(str::to_owned);
    let refused = "was not restored from this image";
    fails(folder, &words(&other).each_ref().map(String::as_str), refused);
    works(folder, &words(&copy).each_ref().map(String::as_str));
    assert_eq!(comes_to(&waiting, &["paused"]), "paused");
    fails(folder, &words(&copy).each_ref().map(String::as_str), "nothing to recover");
}

#[test]
fn a_damaged_unit_is_found_before_qemu_is_touched_if_told_to_verify() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let copy = folder.join("copy").display().to_string();
    fs::copy(&image, &copy).unwrap();
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 1000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let before = settings(&waiting);
    let words = ["restore", &image, "--qmp", &waiting.address(), "--verify"];
    fails(folder, &words, "unit 0 (bytes 64 to");
    assert!(settings(&waiting) == before);
    let (output, report) = platen(folder, &[&words[..], &["--copy", &copy]].concat());
    assert!(output.status.success() && said(&output).contains("unit 0"), "{}", said(&output));
    assert_eq!((&report["mode"], &report["deaths"]), (&json!("instant"), &json!(0)));
}

/// The bytes of a RAM block in an image.
fn block(image: &str, name: &str) -> Vec<u8> {
    let image = image::Image::open(Path::new(image)).unwrap();
    let block = image.index().blocks.iter().find(|block| block.name == name).unwrap();
    let (size, pages) = (image.shape().page_size(), image.shape().unit_pages());
    let mut plain = vec![0; image.shape().unit_bytes()];
    let bytes = |page| match block.content(page).unwrap() {
        image::Content::Zero => vec![0; size],
        image::Content::Filled(word) => word.repeat(size / 8),
        image::Content::Slot(slot) => {
            image::Units::new().read(&image, slot / pages, &mut plain).unwrap();
            let at = usize::try_from(slot % pages).unwrap() * size;
            plain[at..at + size].to_vec()
        }
    };
    (0..block.pages).flat_map(bytes).collect()
}

/// RAM that is saved, restored into a QEMU with -S and saved again is the same, in memory of each
/// kind, restored at once and loaded first.
#[test]
fn ram_that_is_restored_and_saved_again_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    for (kind, backend) in [
        ("ram", "memory-backend-ram"),
        ("memfd", "memory-backend-memfd,share=off"),
        ("shared", "memory-backend-memfd,share=on"),
    ] {
        let object = format!("{backend},id=pc.ram,size=16M");
        let machine = ["-machine", "pc,memory-backend=pc.ram", "-object", &object];
        let Some(source) = Qemu::start(folder, kind, &machine) else { return };
        // Any state will do; after a while the firmware has written more of it.
        thread::sleep(Duration::from_millis(300));
        let image = folder.join(format!("{kind}.image")).display().to_string();
        works(folder, &["save", &image, "--qmp", &source.address(), "--then", "quit"]);
        drop(source);
        for (mode, flags) in [("instant", &[][..]), ("load", &["--load"])] {
            let name = format!("{kind}-{mode}");
            let waiting =
                Qemu::start(folder, &name, &[&machine[..], &WAITS, &["-S"]].concat()).unwrap();
            let words = ["restore", &image, "--qmp", &waiting.address()];
            let (_, report) = works(folder, &[&words[..], flags].concat());
            assert_eq!(
                (&report["mode"], &report["vm"]),
                (&json!(mode), &json!("paused")),
                "{kind}"
            );
            let again = folder.join(format!("{name}.image")).display().to_string();
            works(folder, &["save", &again, "--qmp", &waiting.address(), "--then", "quit"]);
            let saved = image::Image::open(Path::new(&image)).unwrap();
            for block_of in &saved.index().blocks {
                let name = &block_of.name;
                assert!(block(&image, name) == block(&again, name), "{kind}, {mode}: {name}");
            }
        }
    }
}

/// Zero pages replace what QEMU itself has put into a ROM, whether they are sent or QEMU discards
/// its RAM first.
#[test]
fn roms_that_qemu_has_loaded_do_not_survive_a_load() {
    const ROM: &str = "0000:00:02.0/e1000.rom";
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let rom = |name: &str, byte: u8| {
        let path = folder.join(name);
        let mut bytes = vec![byte; 64 << 10];
        bytes[5000..5100].fill(7);
        fs::write(&path, bytes).unwrap();
        format!("e1000,addr=2,romfile={}", path.display())
    };
    let ram = |prealloc: &str| format!("memory-backend-ram,id=pc.ram,size=16M,prealloc={prealloc}");
    let flags = |object: &str, device: &str| {
        ["-machine", "pc,memory-backend=pc.ram", "-object", object, "-device", device]
            .map(str::to_owned)
    };
    let start = |name: &str, flags: &[String], more: &[&str]| {
        let flags: Vec<&str> =
            flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Qemu::start(folder, name, &flags)
    };
    let Some(source) = start("source", &flags(&ram("off"), &rom("zeros", 0)), &[]) else { return };
    let image = folder.join("image").display().to_string();
    works(folder, &["save", &image, "--qmp", &source.address(), "--then", "quit"]);
    drop(source);
    let expected = block(&image, ROM);
    assert!(expected[..4096].iter().all(|&byte| byte == 0) && expected[5000] == 7);
    let mut sent = Vec::new();
    for prealloc in ["off", "on"] {
        let flags = flags(&ram(prealloc), &rom("others", 0xee));
        let waiting = start(prealloc, &flags, &WAITS).unwrap();
        let words = ["restore", &image, "--qmp", &waiting.address(), "--load"];
        let (_, report) = works(folder, &words);
        assert_eq!((&report["mode"], &report["fallback"]), (&json!("load"), &Value::Null));
        sent.push(report["bytes"].as_u64().unwrap());
        let again = folder.join(prealloc).display().to_string();
        works(folder, &["save", &again, "--qmp", &waiting.address(), "--then", "quit"]);
        assert!(block(&again, ROM) == expected, "preallocated: {prealloc}");
    }
    // The VM has thousands of zero pages.
    assert!(sent[0] + 10_000 < sent[1], "{sent:?}");
}
