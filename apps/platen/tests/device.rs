//! `platen device serve` before judges that share no line with it: libnbd's tools, QEMU's, and fio's.
//!
//! The server is a debug build here, which ends at once when an I/O thread allocates. A judge that is
//! not installed is left out with a word of it; `scripts/setup` installs all of them.

use rustix::process::{kill_process, Pid, Signal};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

#[path = "device/dictionaries.rs"]
mod dictionaries;
#[path = "device/refused.rs"]
mod refused;

const MIB: usize = 1 << 20;

/// A device that is served, in a folder of its own.
struct Served {
    child: Child,
    folder: tempfile::TempDir,
}

fn platen() -> Command {
    Command::new(env!("CARGO_BIN_EXE_platen"))
}

impl Served {
    fn new(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Self::command(folder.path(), "nbd.sock", "judged", options);
        let child = command.stderr(fs::File::create(folder.path().join("log")).unwrap()).spawn();
        let mut served = Self { child: child.unwrap(), folder };
        let start = Instant::now();
        while !served.log().contains("platen: device judged") {
            let ended = served.child.try_wait().unwrap();
            assert!(ended.is_none(), "the server has ended: {}", served.log());
            assert!(start.elapsed() < Duration::from_secs(60), "the server does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        served
    }

    fn command(folder: &Path, socket: &str, name: &str, options: &[&str]) -> Command {
        let mut command = platen();
        command.args(["device", "serve", "--name", name, "--run-dir"]);
        command
            .arg(folder.join("run"))
            .args(["--nbd", &format!("unix:{}", folder.join(socket).display())]);
        if !options.contains(&"--size") {
            command.args(["--size", "256M"]);
        }
        command.args(options).stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("nbd.sock").display())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    fn stat(&self) -> serde_json::Value {
        let mut command = platen();
        command.args(["device", "stat", "--json", "judged", "--run-dir"]).arg(self.path("run"));
        let all: serde_json::Value = serde_json::from_str(&run(&mut command)).unwrap();
        all[0].clone()
    }

    /// Ends it as systemd does, and sees that it ends well and leaves nothing behind.
    fn end(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
        assert!(!self.path("nbd.sock").exists() && !self.path("run/judged.sock").exists());
        self.log()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Ended already, or a test has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the server said:\n{}", self.log());
        }
    }
}

/// Whether all of these tools are there; says which is not.
fn have(tools: &[&str]) -> bool {
    tools.iter().all(|tool| {
        let found = Command::new("sh")
            .args(["-c", &format!("command -v {tool}")])
            .env("PATH", path())
            .stdout(Stdio::null())
            .status()
            .unwrap()
            .success();
        if !found {
            eprintln!("skipped: {tool} is not installed (scripts/setup installs it)");
        }
        found
    })
}

/// The system's Python before any other: libnbd's module is in that one.
fn path() -> String {
    format!("/usr/bin:/bin:/usr/sbin:{}", std::env::var("PATH").unwrap_or_default())
}

fn output(command: &mut Command) -> Output {
    command.env("PATH", path()).stdin(Stdio::null()).output().unwrap()
}

/// What a command prints; it must succeed.
fn run(command: &mut Command) -> String {
    let output = output(command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// An image with text, noise, repeated words and holes, `len` bytes.
fn image(len: usize) -> Vec<u8> {
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut image = Vec::with_capacity(len);
    while image.len() < len {
        let run = usize::try_from(next() % 200_000).unwrap();
        match next() % 4 {
            0 => image.extend(
                (0..run).map(|_| b"etaoin shrdlu.\n"[usize::try_from(next() % 15).unwrap()]),
            ),
            1 => image.extend((0..run).map(|_| next().to_le_bytes()[5])),
            2 => {
                let word = next().to_le_bytes();
                image.extend(word.iter().cycle().take(run));
            }
            _ => image.resize(image.len() + run, 0),
        }
    }
    image.truncate(len);
    image
}

#[test]
fn a_server_is_private_alone_and_ends_cleanly() {
    let served = Served::new(&["--codec", "lz4"]);
    let mode = fs::metadata(served.path("nbd.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for (socket, name, why) in [
        ("nbd.sock", "other", "another process listens there"),
        ("other.sock", "judged", "device judged is served already"),
    ] {
        let mut second = Served::command(served.folder.path(), socket, name, &[]);
        let refused = output(&mut second);
        assert_eq!(refused.status.code(), Some(1));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains(why), "{said}");
    }
    assert!(served.path("nbd.sock").exists() && served.path("run/judged.sock").exists());
    let log = served.end();
    assert!(log.contains("device judged of 256M") && log.contains("codec lz4 level 1"), "{log}");
}

#[test]
fn a_server_that_is_killed_is_replaced_and_has_lost_nothing() {
    let served = Served::new(&["--size", "64M"]);
    if !have(&["nbdcopy"]) {
        return;
    }
    let (image, copy) = (image(48 * MIB), served.path("copy"));
    fs::write(served.path("image"), &image).unwrap();
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    let before = served.stat();
    let pid = i32::try_from(before["pid"].as_u64().unwrap()).unwrap();
    assert_ne!(
        pid,
        Pid::from_child(&served.child).as_raw_nonzero().get(),
        "there is no supervisor"
    );
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let start = Instant::now();
    while !served.log().contains("starting another")
        || served.log().matches("platen: device judged").count() < 2
    {
        assert!(start.elapsed() < Duration::from_secs(60), "no other server: {}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let after = served.stat();
    assert_ne!(after["pid"], before["pid"]);
    assert_eq!(after["platen"]["generation"], before["platen"]["generation"].as_u64().unwrap() + 1);
    assert_eq!(after["mm_stat"]["compr_data_size"], before["mm_stat"]["compr_data_size"]);
    run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
    assert!(
        fs::read(&copy).unwrap()[..image.len()] == image,
        "what came back is not what was put in"
    );
    served.end();
}

/// Kills the server and waits until there are `count` that have begun.
fn replace(served: &Served, count: usize) {
    let pid = i32::try_from(served.stat()["pid"].as_u64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let start = Instant::now();
    while served.log().matches("platen: device judged").count() < count {
        assert!(start.elapsed() < Duration::from_secs(60), "no other server: {}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A folder that is not in memory, as the one for temporary files may be.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Waits until the policy is there to be asked.
fn wait_for_policy(served: &Served) {
    let start = Instant::now();
    while served.stat()["policy"].is_null() {
        assert!(start.elapsed() < Duration::from_secs(60), "the policy does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn write_back(served: &Served, options: &[&str]) -> Command {
    let mut command = platen();
    command.args(["device", "writeback", "judged", "huge", "--run-dir"]).arg(served.path("run"));
    command.args(options);
    command
}

#[test]
fn what_was_written_back_outlives_its_server() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let folder = on_disk();
    let (policy, backing) = (folder.path().join("policy.toml"), folder.path().join("backing"));
    let section = format!(
        "[policy]\nbacking_dev = {backing:?}\nbacking_size = 41943040\nbacking_free = 0\nwriteback_limit = 9000\n"
    );
    fs::write(&policy, &section).unwrap();
    let options = ["--size", "64M", "--policy", policy.to_str().unwrap()];
    let served = Served::new(&options);
    let (image, copy) = (image(48 * MIB), served.path("copy"));
    fs::write(served.path("image"), &image).unwrap();
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    let huge = served.stat()["mm_stat"]["huge_pages"].as_u64().unwrap();
    assert!(huge > 1000);
    wait_for_policy(&served);
    let said = run(&mut write_back(&served, &[]));
    assert_eq!(said, format!("{huge} pages written back, {huge} on the backing device\n"));
    let before = served.stat();
    assert_eq!(
        (&before["bd_stat"]["bd_count"], &before["bd_stat"]["bd_writes"]),
        (&huge.into(), &huge.into())
    );
    assert_eq!(before["mm_stat"]["huge_pages"], 0);
    assert_eq!(before["backing"]["bd_written_today"], huge);
    // As the supervisor has opened it, which says so where there is no direct I/O.
    let direct = !served.log().contains("no direct I/O");
    assert_eq!(before["backing"]["direct"], direct);
    let compare = || {
        run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
        assert!(
            fs::read(&copy).unwrap()[..image.len()] == image,
            "what came back is not what was put in"
        );
    };
    compare();
    // Nobody else may have it.
    let mut second = Served::command(served.folder.path(), "other.sock", "other", &options);
    let refused = output(&mut second);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("backing is in use by another server"), "{said}");

    // What the file says by now is for the next supervisor.
    fs::write(&policy, "[polizy]\nbacking_dev = 7").unwrap();
    replace(&served, 2);
    assert_eq!(served.stat()["bd_stat"]["bd_count"], huge);
    assert_eq!(served.stat()["backing"]["bd_written_today"], huge);
    compare();
    assert!(served.stat()["bd_stat"]["bd_reads"].as_u64().unwrap() >= huge);
    // It gets shorter, and the server is replaced: that is said, and what is in memory is there.
    fs::File::options().write(true).open(&backing).unwrap().set_len(40960).unwrap();
    fs::remove_file(&policy).unwrap();
    replace(&served, 3);
    // It is looked at beside what is served.
    let start = Instant::now();
    while !served.log().contains("backing has 10 blocks of 4096 bytes, its header says 10240") {
        assert!(start.elapsed() < Duration::from_secs(60), "{}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(served.log().contains("are read as far as it still has them"), "{}", served.log());
    let refused = served.stat()["backing"]["refused"].clone();
    assert!(refused.as_str().unwrap().contains("its header says 10240"), "{refused}");
    assert!(!output(Command::new("nbdcopy").arg(served.uri()).arg(&copy)).status.success());
    assert!(served.stat()["io_stat"]["failed_reads"].as_u64().unwrap() > 0);
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    compare();
    assert_eq!(served.stat()["bd_stat"]["bd_count"], 0);
    served.end();

    // Somebody's file system: the image may begin with zeros.
    fs::write(&policy, section).unwrap();
    fs::write(&backing, [7; MIB]).unwrap();
    let refused = output(&mut Served::command(folder.path(), "other.sock", "other", &options));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("backing is no backing device and not empty"), "{said}");
    assert!(fs::read(&backing).unwrap() == [7; MIB]);
}

#[test]
fn who_asks_for_pages_to_be_written_back_hears_of_a_server_that_was_replaced() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let folder = on_disk();
    let (policy, backing) = (folder.path().join("policy.toml"), folder.path().join("backing"));
    // As slow as can be.
    let keys = "backing_free = 0\nbacking_size = 41943040\nwriteback_batch_size = 1\ncpu = 1\ncpu_pressed = 1\n";
    fs::write(&policy, format!("[policy]\nbacking_dev = {backing:?}\n{keys}")).unwrap();
    let served = Served::new(&["--size", "64M", "--policy", policy.to_str().unwrap()]);
    fs::write(served.path("image"), image(48 * MIB)).unwrap();
    run(Command::new("nbdcopy").arg(served.path("image")).arg(served.uri()));
    wait_for_policy(&served);
    let asks = write_back(&served, &[]).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while served.stat()["bd_stat"]["bd_writes"] == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing is written back");
        std::thread::sleep(Duration::from_millis(5));
    }
    let late = output(&mut write_back(&served, &["--timeout", "0"]));
    let said = String::from_utf8_lossy(&late.stderr);
    assert!(!late.status.success() && said.contains("not done within 0 s"), "{said}");
    replace(&served, 2);
    let asked = asks.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&asked.stderr);
    assert!(!asked.status.success(), "{said}");
    assert!(said.contains("device judged: its server was replaced meanwhile"), "{said}");
    served.end();
}

#[test]
fn a_mistyped_backing_device_is_refused_and_no_file_is_made_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.toml");
    for (name, reason) in [
        ("/dev/platen-no-such-disk", "no file is made below /dev"),
        ("/dev/null", "neither a file nor a block device"),
    ] {
        fs::write(&policy, format!("[policy]\nbacking_dev = {name:?}\n")).unwrap();
        let options = ["--policy", policy.to_str().unwrap()];
        let refused = output(&mut Served::command(folder.path(), "s", "judged", &options));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success(), "{said}");
        assert!(said.contains(name), "{said}");
        assert!(said.contains(reason), "{name}: {said}");
    }
    assert!(!Path::new("/dev/platen-no-such-disk").exists());
}

#[test]
fn a_file_by_fuse_is_served_again_when_its_server_was_killed() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let name = disk.to_str().unwrap();
    if !may_mount() {
        return;
    }
    let served = Served::new(&["--size", "64M", "--fuse", name]);
    let image = image(16 * MIB);
    let open = || fs::File::options().read(true).write(true).open(&disk);
    open().unwrap().write_all_at(&image, 12345).unwrap();
    let pid = served.stat()["pid"].as_i64().unwrap();
    let killed = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    // Not there, then dead, then there again.
    let start = Instant::now();
    let mut got = vec![0; image.len()];
    while !open().is_ok_and(|file| file.read_exact_at(&mut got, 12345).is_ok()) {
        assert!(start.elapsed() < Duration::from_secs(60), "{}", served.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(got == image);
    served.end();
    assert_eq!(fs::metadata(&disk).unwrap().len(), 0, "unmounted");
}

/// More often than servers that die in a row are replaced.
#[test]
fn a_file_that_somebody_unmounts_is_mounted_again_and_has_lost_nothing() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    if !may_mount() || !have(&["umount"]) {
        return;
    }
    let served = Served::new(&["--size", "64M", "--fuse", disk.to_str().unwrap()]);
    let image = image(MIB);
    let open = || fs::File::options().read(true).write(true).open(&disk);
    open().unwrap().write_all_at(&image, 12345).unwrap();
    let pid = served.stat()["pid"].clone();
    let start = Instant::now();
    let is_mounted = || fs::metadata(&disk).is_ok_and(|file| file.len() == 64 * MIB as u64);
    let wait = |what: &dyn Fn() -> bool| {
        while !what() {
            assert!(start.elapsed() < Duration::from_secs(120), "{}", served.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    for again in 1..=10 {
        run(Command::new("umount").arg(&disk));
        wait(&|| served.log().matches("is mounted again").count() == again);
        let mut got = vec![0; image.len()];
        open().unwrap().read_exact_at(&mut got, 12345).unwrap();
        assert!(got == image);
    }
    // Now with a file in its place that it must not hide: sooner or later this one is first.
    wait(&|| {
        output(Command::new("umount").arg(&disk));
        fs::write(&disk, b"mine").is_ok_and(|()| !is_mounted())
            && served.log().contains("holds 4 bytes")
    });
    assert_eq!(fs::read(&disk).unwrap(), b"mine");
    fs::write(&disk, b"").unwrap();
    wait(&is_mounted);
    let mut got = vec![0; image.len()];
    open().unwrap().read_exact_at(&mut got, 12345).unwrap();
    assert!(got == image);
    assert_eq!(served.stat()["pid"], pid, "another server: {}", served.log());
    let log = served.end();
    assert!(!log.contains("has died"), "{log}");
    assert!(!is_mounted());
}

/// Without a change of mounts being seen the path would be the empty file beneath for as long as somebody has it open.
#[test]
fn a_file_that_is_unmounted_while_it_is_open_is_mounted_again_too() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("a disk");
    if !may_mount() || !have(&["umount"]) {
        return;
    }
    let served = Served::new(&["--size", "64M", "--fuse", disk.to_str().unwrap()]);
    let open = || fs::File::options().read(true).write(true).open(&disk).unwrap();
    let had = open();
    had.write_all_at(b"before", 12345).unwrap();
    run(Command::new("umount").arg("-l").arg(&disk));
    let start = Instant::now();
    while !served.log().contains("is mounted again") {
        assert!(start.elapsed() < Duration::from_secs(60), "{}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut got = [0; 11];
    open().read_exact_at(&mut got[..6], 12345).unwrap();
    assert_eq!(&got[..6], b"before");
    // Who has it open has the same device.
    had.write_all_at(b"later", 12351).unwrap();
    open().read_exact_at(&mut got, 12345).unwrap();
    assert_eq!(&got, b"beforelater");
    drop(had);
    served.end();
    assert_eq!(fs::metadata(&disk).unwrap().len(), 0, "unmounted, and nothing beneath");
}

/// Whether FUSE can be mounted here.
fn may_mount() -> bool {
    let tried = Command::new("unshare").args(["--mount", "test", "-r", "/dev/fuse"]).output();
    let may = tried.is_ok_and(|tried| tried.status.success());
    if !may {
        println!("skipped: no /dev/fuse, or nobody here may mount it");
    }
    may
}

#[test]
fn without_a_supervisor_it_is_one_process() {
    let served = Served::new(&["--no-supervisor"]);
    let pid = Pid::from_child(&served.child).as_raw_nonzero().get();
    assert_eq!(served.stat()["pid"], pid);
    served.end();
}

/// What a service manager sends to all processes at once must not hit the one that is needed when another dies.
#[test]
fn a_server_that_stands_by_follows_its_supervisor_and_no_signals() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Served::command(folder.path(), "s", "judged", &["--size", "1M"]);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    command.args(["--inherited", "store=3,standby=1"]);
    let mut child = command.stdin(std::os::fd::OwnedFd::from(theirs)).spawn().unwrap();
    drop(command);
    let start = Instant::now();
    let ignored = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    };
    // HUP, INT, TERM.
    while ignored() & 0x4003 != 0x4003 {
        assert!(start.elapsed() < Duration::from_secs(60), "it follows signals: {:x}", ignored());
        std::thread::sleep(Duration::from_millis(5));
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    drop(ours);
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
}

/// What a server takes for its account of a large backing device, it has before it is needed.
#[test]
fn a_server_that_stands_by_has_the_memory_for_its_backing_device() {
    let folder = on_disk();
    let resident = |blocks: u64| {
        let file = fs::File::create(folder.path().join("backing")).unwrap();
        file.set_len(blocks * 4096).unwrap();
        let mut command = Command::new("sh");
        let platen = Served::command(folder.path(), "s", "judged", &["--size", "1M"]);
        let words: Vec<_> = platen.get_args().map(|word| word.to_str().unwrap()).collect();
        let script = format!(
            "exec 4<>{}; exec {} {} --inherited store=3,backing=4,standby=1",
            folder.path().join("backing").display(),
            platen.get_program().to_str().unwrap(),
            words.join(" "),
        );
        // As its supervisor starts it.
        for name in ["MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX"] {
            command.env(name, if name.contains("MMAP") { "0" } else { "1" });
        }
        command.env("MALLOC_TRIM_THRESHOLD_", "1073741824");
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        command.args(["-c", &script]).stdin(std::os::fd::OwnedFd::from(theirs));
        let mut child = command.spawn().unwrap();
        drop(command);
        let kib = || {
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
            line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse::<u64>().unwrap())
        };
        // Until it gets no larger: it has all that it waits with.
        let (mut most, mut since) = (0, Instant::now());
        while since.elapsed() < Duration::from_secs(1) || most < 12 << 10 {
            let now = kib();
            if now > most {
                (most, since) = (now, Instant::now());
            }
            assert!(since.elapsed() < Duration::from_secs(60), "it has only {most} KiB");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(ours);
        assert!(child.wait().unwrap().success());
        most
    };
    // A byte for each block.
    let (small, large) = (resident(1 << 10), resident(32 << 20));
    assert!(large >= small + (31 << 10), "{small} KiB, {large} KiB");
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    for (options, reason) in [
        (&["--size", "1000"][..], "not a number of pages"),
        (&["--size", "0"], "not a number of pages"),
        (&["--codec", "zlib", "--level", "10"], "expected 0 to 9"),
        (&["--mem-limit", "4K"], "slot table alone need"),
        (&["--size", "4000T"], "--size: 4398046511104000 bytes are more than a device can have"),
        (&["--policy", "/dev/zero"], "/dev/zero: it is not a regular file"),
    ] {
        let refused = output(&mut Served::command(folder.path(), "s", "judged", options));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(reason), "{options:?}: {said}");
        assert!(!folder.path().join("s").exists());
    }
}

#[test]
fn nbdinfo_sees_what_is_promised() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let served = Served::new(&[]);
    let info: serde_json::Value =
        serde_json::from_str(&run(Command::new("nbdinfo").args(["--json", &served.uri()])))
            .unwrap();
    let export = &info["exports"][0];
    assert_eq!(info["structured"], true);
    assert_eq!(export["export-size"], 256 * MIB);
    assert_eq!(export["export-name"], "judged");
    assert_eq!(export["contexts"][0], "base:allocation");
    for promised in [
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        assert_eq!(export[promised], true, "{promised}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(export["block_size_minimum"], 1);
    assert_eq!(export["block_size_preferred"], 4096);
    assert_eq!(export["block_size_maximum"], 32 * MIB);
    let map = run(Command::new("nbdinfo").args(["--map", &served.uri()]));
    assert!(map.contains("268435456    3  hole,zero"), "{map}");
    let list = run(Command::new("nbdinfo").args(["--list", &served.uri()]));
    assert!(list.contains("export=\"judged\""), "{list}");
    let other = format!("nbd+unix:///other?socket={}", served.path("nbd.sock").display());
    assert!(!output(Command::new("nbdinfo").arg(other)).status.success());
    served.end();
}

#[test]
fn nbdcopy_gets_back_what_it_put_in() {
    if !have(&["nbdcopy", "nbdinfo"]) {
        return;
    }
    for codec in ["lz4", "zstd", "zlib", "none"] {
        let served = Served::new(&["--codec", codec, "--workers", "3"]);
        let (plain, copy) = (served.path("plain"), served.path("copy"));
        let mut image = image(40 * MIB + 12345);
        fs::write(&plain, &image).unwrap();
        run(Command::new("nbdcopy").arg(&plain).arg(served.uri()));
        run(Command::new("nbdcopy").arg(served.uri()).arg(&copy));
        image.resize(256 * MIB, 0);
        assert!(fs::read(&copy).unwrap() == image, "{codec}: another content");
        // Every extent that is said to be zero is, and what is said to be a hole takes no memory.
        let map: serde_json::Value = serde_json::from_str(&run(Command::new("nbdinfo").args([
            "--map",
            "--json",
            &served.uri(),
        ])))
        .unwrap();
        let mut at = 0;
        for extent in map.as_array().unwrap() {
            let (offset, length) = (extent["offset"].as_u64(), extent["length"].as_u64());
            let range = usize::try_from(offset.unwrap()).unwrap();
            let range = range..range + usize::try_from(length.unwrap()).unwrap();
            assert_eq!(range.start, at);
            at = range.end;
            if extent["type"].as_u64().unwrap() & 2 != 0 {
                assert!(image[range].iter().all(|&byte| byte == 0), "{codec}: {extent}");
            }
        }
        assert_eq!(at, image.len());
        let stat = served.stat();
        assert_eq!(stat["io_stat"]["failed_reads"], 0);
        assert_eq!(stat["io_stat"]["failed_writes"], 0);
        assert!(stat["mm_stat"]["orig_data_size"].as_u64().unwrap() <= 41 * MIB as u64);
        served.end();
    }
}

/// Every command and flag, odd alignments, and errors, by libnbd's own shell.
#[test]
fn nbdsh_finds_every_command_as_the_protocol_has_it() {
    if !have(&["nbdsh"]) {
        return;
    }
    let served = Served::new(&["--mem-limit", "64M"]);
    let script = r#"
import errno, os
def fails(number, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errnum == number, error
    else:
        raise AssertionError("no error")

h.add_meta_context("base:allocation")
h.set_strict_mode(0)
h.connect_uri(URI)
assert h.get_structured_replies_negotiated()
size = h.get_size()
model = bytearray(1 << 20)
def put(data, offset, *flags):
    h.pwrite(data, offset, *flags)
    model[offset:offset + len(data)] = data
def zero(length, offset, *flags):
    h.zero(length, offset, *flags)
    model[offset:offset + length] = bytes(length)
def check():
    assert h.pread(len(model), 0) == model
check()
put(os.urandom(70001), 4097)
put(b"x" * 10, 4090)
put(b"y" * 4096, 8192, nbd.CMD_FLAG_FUA)
put(b"z", 0)
put(os.urandom(600000), 300001)
check()
assert h.pread(3000, 4000, nbd.CMD_FLAG_DF) == model[4000:7000]
fails(errno.EOVERFLOW, h.pread, 1 << 20, 0, nbd.CMD_FLAG_DF)
zero(9000, 5000)
zero(100000, 77 * 4096, nbd.CMD_FLAG_NO_HOLE)
zero(5, 500000, nbd.CMD_FLAG_FAST_ZERO)
h.flush()
check()
extents = []
def extent(context, offset, entries, error):
    assert context == "base:allocation"
    extents.extend(zip(entries[0::2], entries[1::2]))
h.block_status(100000, 77 * 4096, extent)
assert extents == [(100000 // 4096 * 4096, nbd.STATE_ZERO), (100000 % 4096, 0)], extents
extents.clear()
h.trim(1 << 20, 0)
model[:] = bytes(len(model))
check()
h.block_status(1 << 19, 777, extent, nbd.CMD_FLAG_REQ_ONE)
assert extents == [(1 << 19, nbd.STATE_HOLE | nbd.STATE_ZERO)], extents

fails(errno.EINVAL, h.pread, 512, size - 511)
fails(errno.ENOSPC, h.pwrite, b"x" * 512, size - 511)
fails(errno.ENOSPC, h.zero, 512, size - 511)
fails(errno.EINVAL, h.trim, 512, size)
fails(errno.EINVAL, h.cache, 512, 0)
fails(errno.EINVAL, h.pread, 512, 0, 1 << 9)
# The limit: noise for more memory than there is. What was stored stays.
stored = {}
full = False
for offset in range(0, 128 << 20, 1 << 20):
    noise = os.urandom(1 << 20)
    try:
        h.pwrite(noise, offset)
        stored[offset] = noise
    except nbd.Error as error:
        assert error.errnum == errno.ENOSPC, error
        full = True
assert full and 30 < len(stored) < 64, len(stored)
for offset, noise in stored.items():
    assert h.pread(1 << 20, offset) == noise
h.shutdown()
print("all of it")
"#;
    let script = script.replace("URI", &format!("{:?}", served.uri()));
    let said = run(Command::new("nbdsh").args(["-c", &script]));
    assert_eq!(said, "all of it\n");
    let stat = served.stat();
    assert!(stat["io_stat"]["failed_writes"].as_u64().unwrap() > 0);
    assert_eq!(stat["io_stat"]["failed_reads"], 0);
    assert!(stat["mm_stat"]["mem_used_max"].as_u64().unwrap() <= 64 * MIB as u64);
    assert_eq!(stat["mm_stat"]["mem_limit"], 64 * MIB);
    served.end();
}

#[test]
fn qemu_reads_what_it_wrote_and_compares_equal() {
    if !have(&["qemu-io", "qemu-img"]) {
        return;
    }
    let served = Served::new(&["--codec", "zstd", "--level", "3"]);
    let said = run(Command::new("qemu-io").args(["-f", "raw", &served.uri()]).args(
        [
            "write -P 0x5a 1000 70000",
            "read -P 0x5a 1000 70000",
            "write -z 4096 100000",
            "read -P 0 4096 66904",
            "read -P 0x5a 1000 3096",
            "write -z -u 200M 10M",
            "aio_write -P 0x11 32M 1M",
            "aio_write -P 0x22 40M 3000001",
            "aio_write -P 0x33 50M 4M",
            "aio_flush",
            "read -P 0x11 32M 1M",
            "read -P 0x22 40M 3000001",
            "read -P 0x33 50M 4M",
            "discard 50M 2M",
            "read -P 0 50M 2M",
            "read -P 0x33 52M 2M",
            "flush",
        ]
        .iter()
        .flat_map(|command| ["-c", command]),
    ));
    // qemu-io says so, and goes on.
    assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
    let plain = served.path("plain");
    let mut image = image(64 * MIB);
    image.resize(256 * MIB, 0);
    fs::write(&plain, image).unwrap();
    let (plain, uri) = (plain.to_str().unwrap(), &served.uri());
    run(Command::new("qemu-img").args(["convert", "-n", "-f", "raw", "-O", "raw", plain, uri]));
    let same =
        run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", plain, uri]));
    assert!(same.contains("identical"), "{same}");
    served.end();
}

/// Random writes of odd sizes and depths by two clients, each verified by fio's own checksums.
#[test]
fn fio_verifies_every_block() {
    if !have(&["fio"]) {
        return;
    }
    if !run(Command::new("fio").arg("--enghelp")).contains("nbd") {
        eprintln!("skipped: this fio has no nbd engine");
        return;
    }
    let served = Served::new(&["--codec", "lz4", "--workers", "2"]);
    let jobs = format!(
        "[global]\nioengine=nbd\nuri={}\nverify=crc32c\nverify_fatal=1\nverify_backlog=64\n\
         buffer_compress_percentage=60\nrefill_buffers\nio_size=24m\n\
         [small]\nrw=randrw\nbs=4k\niodepth=16\noffset=0\nsize=24m\n\
         [odd]\nrw=randwrite\nbsrange=512-300k\nbs_unaligned\niodepth=8\noffset=64m\nsize=24m\n\
         [large]\nrw=write\nbs=1m\niodepth=4\noffset=128m\nsize=24m\n",
        served.uri()
    );
    let file = served.path("jobs.fio");
    fs::write(&file, jobs).unwrap();
    let result = served.path("result.json");
    let mut command = Command::new("fio");
    command.args(["--output-format=json", "--output"]).arg(&result).arg(&file);
    run(command.current_dir(served.folder.path()));
    let text = fs::read_to_string(&result).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text[text.find('{').unwrap()..]).unwrap();
    for job in json["jobs"].as_array().unwrap() {
        let name = &job["jobname"];
        assert_eq!(job["error"], 0, "{name}");
        assert!(job["write"]["total_ios"].as_u64().unwrap() > 0, "{name}");
        assert!(job["read"]["total_ios"].as_u64().unwrap() > 0, "{name} verified nothing");
    }
    served.end();
}

#[test]
fn stat_and_metrics_say_the_same() {
    let served = Served::new(&["--prometheus", "127.0.0.1:0"]);
    let log = served.log();
    let address = log.split("http://").nth(1).unwrap().split('/').next().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let stat = served.stat();
    for field in ["orig_data_size", "mem_used_total", "mem_limit", "same_pages"] {
        let sample = format!(
            "platen_device_{field}{{device=\"judged\",codec=\"zstd\"}} {}",
            stat["mm_stat"][field]
        );
        assert!(answer.contains(&sample), "{sample} is not in {answer}");
    }
    let mut command = platen();
    let table = run(command.args(["device", "stat", "--run-dir"]).arg(served.path("run")));
    assert!(table.starts_with("NAME") && table.contains("\njudged zstd:1"), "{table}");
    // One that says nothing, and one that says nonsense, leave it as it was.
    let _silent = TcpStream::connect(address).unwrap();
    let mut control =
        std::os::unix::net::UnixStream::connect(served.path("run/judged.sock")).unwrap();
    control.write_all(&[b'x'; 1000]).unwrap();
    drop(control);
    assert_eq!(served.stat()["name"], "judged");
    served.end();
}
