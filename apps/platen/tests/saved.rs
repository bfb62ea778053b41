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

#[path = "saved/absent.rs"]
mod absent;
#[path = "saved/access.rs"]
mod access;
#[path = "saved/again.rs"]
mod again;
#[path = "saved/clones.rs"]
mod clones;
#[path = "saved/codecs.rs"]
mod codecs;
#[path = "saved/disk.rs"]
mod disk;
#[path = "saved/hot.rs"]
mod hot;
#[path = "saved/hung.rs"]
mod hung;
#[path = "saved/hung_restore.rs"]
mod hung_restore;
#[path = "saved/imported.rs"]
mod imported;
#[path = "saved/interrupted.rs"]
mod interrupted;
#[path = "saved/killed.rs"]
mod killed;
#[path = "saved/killed_at.rs"]
mod killed_at;
#[path = "saved/leave.rs"]
mod leave;
#[path = "saved/libvirt.rs"]
mod libvirt;
#[path = "saved/mapped.rs"]
mod mapped;
#[path = "saved/multifd.rs"]
mod multifd;
#[path = "saved/names.rs"]
mod names;
#[path = "saved/refusals.rs"]
mod refusals;
#[path = "saved/remote.rs"]
mod remote;
#[path = "saved/reports.rs"]
mod reports;
#[path = "saved/shared.rs"]
mod shared;
#[path = "saved/snapshot.rs"]
mod snapshot;
#[path = "saved/store.rs"]
mod store;
#[path = "saved/userfault.rs"]
mod userfault;
#[path = "saved/zoo.rs"]
mod zoo;

const LONG: Duration = Duration::from_secs(300);

/// Whether `make proof`, or `make test` if it does that, too, has set up what this test needs. A
/// missing part is a failure then, and not a reason to skip the test.
fn is_set_up(by_test: bool) -> bool {
    let is_run_by = |variable| std::env::var_os(variable).is_some();
    is_run_by("PLATEN_PROOF") || by_test && is_run_by("PLATEN_QUICK")
}

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
                assert!(!is_set_up(true), "{program} cannot be started: {error}");
                println!("skipped: {program} cannot be started: {error}");
                return None;
            }
        };
        let qemu = Self { child, socket };
        let deadline = Instant::now() + LONG;
        // The path exists before QEMU listens there, and the first monitor before the second.
        while ![&qemu.socket, &second_monitor(&qemu.socket)].into_iter().all(|at| listens(at)) {
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
    let report = serde_json::from_str(&text).unwrap_or_default();
    match words[0] {
        "save" => reports::is_documented("Report of a save", &report),
        "restore" => reports::is_documented("Report of a restore", &report),
        _ => {}
    }
    (output, report)
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
    // Closing the file may not be enough: a process that another test is starting has a copy of it
    // until its exec.
    rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
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
