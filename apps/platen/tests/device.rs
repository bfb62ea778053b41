//! `platen device serve` before judges that share no line with it: libnbd's tools, QEMU's, and
//! fio's.
//!
//! The server is a debug build here, which ends at once when an I/O thread allocates. A judge that
//! is not installed is left out with a word of it; `scripts/setup` installs all of them.

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
#[path = "device/file.rs"]
mod file;
#[path = "device/refused.rs"]
mod refused;
#[path = "device/tools.rs"]
mod tools;
#[path = "device/writeback.rs"]
mod writeback;

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
            assert!(start.elapsed() < Duration::from_secs(300), "the server does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Behind this line the server reports that it is ready. One that dies before has not
        // started, and is not replaced. Its policy begins behind that.
        while served.stat()["policy"].is_null() {
            assert!(start.elapsed() < Duration::from_secs(300), "the policy does not begin");
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
        let said = self.answer_to(&["stat", "--json", "judged"]);
        let all: serde_json::Value = serde_json::from_str(&said).unwrap();
        all[0].clone()
    }

    /// The output of `platen device` with these words.
    fn answer_to(&self, words: &[&str]) -> String {
        let start = Instant::now();
        loop {
            let mut command = platen();
            command.arg("device").args(words).arg("--run-dir").arg(self.path("run"));
            let answer = output(&mut command);
            let said = String::from_utf8_lossy(&answer.stderr).into_owned();
            if answer.status.success() {
                return String::from_utf8(answer.stdout).unwrap();
            }
            // A machine that stands still is no error of the server's.
            let late = said.contains("it does not answer within 5 s");
            assert!(late && start.elapsed() < Duration::from_secs(300), "{said}");
        }
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

/// Whether all of these tools are installed; prints the missing ones.
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

/// The output of a command, which must succeed.
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
fn a_killed_server_is_replaced_and_no_page_is_lost() {
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
        assert!(start.elapsed() < Duration::from_secs(300), "no other server: {}", served.log());
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

/// A folder that is not in memory, as the one for temporary files may be.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Kills the server and waits until there are `count` that have begun.
fn replace(served: &Served, count: usize) {
    let pid = i32::try_from(served.stat()["pid"].as_u64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let start = Instant::now();
    while served.log().matches("platen: device judged").count() < count {
        assert!(start.elapsed() < Duration::from_secs(300), "no other server: {}", served.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn without_a_supervisor_it_is_one_process() {
    let served = Served::new(&["--no-supervisor"]);
    let pid = Pid::from_child(&served.child).as_raw_nonzero().get();
    assert_eq!(served.stat()["pid"], pid);
    served.end();
}

/// A signal that a service manager sends to all processes at once must not end the stand-by server,
/// which is needed when another one dies.
#[test]
fn a_standby_server_obeys_its_supervisor_and_ignores_signals() {
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
        assert!(start.elapsed() < Duration::from_secs(300), "it follows signals: {:x}", ignored());
        std::thread::sleep(Duration::from_millis(5));
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    drop(ours);
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn impossible_arguments_are_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    for (options, reason) in [
        (&["--size", "1000"][..], "no whole number of pages"),
        (&["--size", "0"], "no whole number of pages"),
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

/// The answer to a scraper. One that gets no CPU for 2 s between its connection and its request
/// gets none.
fn scrape(address: &str) -> String {
    let start = Instant::now();
    loop {
        let mut answer = String::new();
        let scraped = TcpStream::connect(address).and_then(|mut stream| {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
            stream.read_to_string(&mut answer)
        });
        if scraped.as_ref().is_ok_and(|got| *got > 0) {
            return answer;
        }
        assert!(start.elapsed() < Duration::from_secs(300), "no metrics: {scraped:?}");
    }
}

#[test]
fn stat_and_metrics_say_the_same() {
    let served = Served::new(&["--prometheus", "127.0.0.1:0"]);
    let log = served.log();
    let address = log.split("http://").nth(1).unwrap().split('/').next().unwrap();
    // Both of one moment: the store may take memory between two.
    let (mut before, mut answer) = (serde_json::Value::Null, String::new());
    let start = Instant::now();
    let stat = loop {
        let stat = served.stat();
        if stat["mm_stat"] == before {
            break stat;
        }
        before = stat["mm_stat"].clone();
        answer = scrape(address);
        assert!(start.elapsed() < Duration::from_secs(300), "it never rests: {before}");
    };
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for field in ["orig_data_size", "mem_used_total", "mem_limit", "same_pages"] {
        let sample = format!(
            "platen_device_{field}{{device=\"judged\",codec=\"zstd\"}} {}",
            stat["mm_stat"][field]
        );
        assert!(answer.contains(&sample), "{sample} is not in {answer}");
    }
    let table = served.answer_to(&["stat"]);
    assert!(table.starts_with("NAME") && table.contains("\njudged zstd:1"), "{table}");
    // One that says nothing, and one that says nonsense, leave it as it was.
    let _silent = TcpStream::connect(address).unwrap();
    let mut control =
        std::os::unix::net::UnixStream::connect(served.path("run/judged.sock")).unwrap();
    // The server may end the connection before it has all of it.
    let _ = control.write_all(&[b'x'; 1000]);
    drop(control);
    assert_eq!(served.stat()["name"], "judged");
    served.end();
}
