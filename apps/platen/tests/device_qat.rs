//! `platen device serve --codec qatzip`, on a simulated QAT device and without one. A debug build,
//! which ends at once when an I/O thread allocates.

use rustix::process::{kill_process, Pid, Signal};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// Longest wait for anything before it is called a hang.
const HANG: Duration = Duration::from_secs(180);

struct Served {
    child: Child,
    folder: tempfile::TempDir,
}

fn command(folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
    command.args(["device", "serve", "--name", "qat", "--size", "64M", "--codec", "qatzip"]);
    command.args(["--nbd", &format!("unix:{}", folder.join("nbd.sock").display()), "--run-dir"]);
    command.arg(folder.join("run")).args(options);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

impl Served {
    /// With the simulated device and its script, or without any.
    fn new(script: Option<&str>, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = command(folder.path(), options);
        match script {
            Some(script) => {
                command.arg("--qat-libraries").arg(qat_sim::libraries());
                command.env("PLATEN_QAT_SIM", script);
            }
            None => drop(command.arg("--qat-libraries").arg(folder.path())),
        }
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let mut served = Self { child: command.stderr(log).spawn().unwrap(), folder };
        let start = Instant::now();
        while !served.log().contains("platen: device qat of") {
            assert!(served.child.try_wait().unwrap().is_none(), "it has ended: {}", served.log());
            assert!(start.elapsed() < HANG, "it does not begin: {}", served.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        served
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    fn stat(&self, json: bool) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
        command.args(["device", "stat", "qat", "--run-dir"]).arg(self.path("run"));
        if json {
            command.arg("--json");
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    fn numbers(&self) -> serde_json::Value {
        let start = Instant::now();
        loop {
            // None comes from a server that stands still with the whole machine.
            match serde_json::from_str::<serde_json::Value>(&self.stat(true)) {
                Ok(all) if all[0].is_object() => return all[0].clone(),
                _ => assert!(start.elapsed() < HANG, "no numbers: {}", self.log()),
            }
        }
    }

    fn client(&self) -> Client {
        let start = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(self.path("nbd.sock")) {
                if let Some(client) = Client::new(stream) {
                    return client;
                }
            }
            assert!(start.elapsed() < HANG, "nobody answers: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
        self.log()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The least of an NBD client (simple replies; proto.md of the NBD project): export name, reads,
/// writes.
struct Client(UnixStream);

impl Client {
    fn new(mut stream: UnixStream) -> Option<Self> {
        stream.set_read_timeout(Some(HANG)).unwrap();
        let mut hello = [0; 18];
        stream.read_exact(&mut hello).ok()?;
        // Fixed newstyle, no zeroes; then NBD_OPT_EXPORT_NAME.
        stream.write_all(&3_u32.to_be_bytes()).ok()?;
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x03qat").ok()?;
        stream.read_exact(&mut [0; 10]).ok()?;
        Some(Self(stream))
    }

    fn ask(&mut self, command: u16, handle: u64, page: u64, len: usize) {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, 0]);
        request.extend(command.to_be_bytes());
        request.extend(handle.to_be_bytes());
        request.extend((page * PAGE as u64).to_be_bytes());
        request.extend(u32::try_from(len).unwrap().to_be_bytes());
        self.0.write_all(&request).unwrap();
    }

    fn answer(&mut self) -> u32 {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        u32::from_be_bytes(reply[4..8].try_into().unwrap())
    }

    /// Writes `pages` in requests of 1 to 32 pages, eight under way.
    fn write(&mut self, pages: &[u8]) {
        let (mut at, mut under_way, mut size) = (0, 0, 1);
        while at < pages.len() || under_way > 0 {
            if at < pages.len() && under_way < 8 {
                let len = (size * PAGE).min(pages.len() - at);
                self.ask(1, at as u64, (at / PAGE) as u64, len);
                self.0.write_all(&pages[at..at + len]).unwrap();
                (at, under_way, size) = (at + len, under_way + 1, size % 32 + 1);
            } else {
                assert_eq!(self.answer(), 0);
                under_way -= 1;
            }
        }
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut all = vec![0; len];
        for (number, part) in all.chunks_mut(64 * PAGE).enumerate() {
            self.ask(0, 0, number as u64 * 64, part.len());
            assert_eq!(self.answer(), 0);
            self.0.read_exact(part).unwrap();
        }
        all
    }
}

/// Pages like text, no two alike.
fn pages(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..count * PAGE)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            b"etaoin shrdlu cmfwyp"[usize::try_from(state >> 40).unwrap() % 20]
        })
        .collect()
}

#[test]
fn a_device_compresses_written_pages_and_stat_counts_them() {
    for (options, script) in
        [(&[][..], "instances 1"), (&["--accelerator", "qat", "--qat-threads", "2"], "")]
    {
        let served = Served::new(Some(script), options);
        let plain = pages(700, 3);
        let mut client = served.client();
        client.write(&plain);
        assert!(client.read(plain.len()) == plain);
        let stat = served.numbers();
        let accelerator = &stat["accelerator"];
        let threads = if options.is_empty() { 1 } else { 2 };
        assert_eq!(accelerator["threads"], threads, "{stat:#}");
        let done = |name: &str| accelerator[name].as_u64().unwrap();
        assert!(done("offloaded") > 0, "{stat:#}");
        assert!(done("offloaded") + done("redone") <= 700, "{stat:#}");
        assert_eq!(stat["codec"], "qatzip");
        assert!(served.stat(false).contains("Pages that the QAT device compressed"));
        drop(client);
        assert!(served.end().contains("threads with an instance each"));
    }
}

#[test]
fn without_a_device_auto_serves_in_software_and_qat_refuses() {
    let served = Served::new(None, &[]);
    let plain = pages(100, 5);
    let mut client = served.client();
    client.write(&plain);
    assert!(client.read(plain.len()) == plain);
    assert!(served.numbers()["accelerator"].is_null());
    drop(client);
    let log = served.end();
    assert!(log.contains("codec qatzip in software: cannot load"), "{log}");

    let folder = tempfile::tempdir().unwrap();
    let no_library = folder.path().display().to_string();
    for (options, word) in [
        (&["--accelerator", "qat", "--qat-libraries", &*no_library][..], "no QAT device"),
        (&["--accelerator", "qat", "--codec", "zstd"], "goes with --codec qatzip"),
        (&["--accelerator", "qatzip"], "invalid value"),
    ] {
        let mut command = command(folder.path(), &[]);
        if options.contains(&"--codec") {
            command = Command::new(env!("CARGO_BIN_EXE_platen"));
            command.args(["device", "serve", "--size", "1M", "--nbd", "unix:/nonexistent/x"]);
        }
        let output = command.args(options).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(word), "{options:?}: {said}");
    }
}

#[test]
fn a_killed_server_is_replaced_and_its_successor_uses_the_device() {
    let served = Served::new(Some("instances 1; at 300 fail 5"), &["--accelerator", "qat"]);
    let plain = pages(500, 7);
    served.client().write(&plain);
    let stat = served.numbers();
    assert!(stat["accelerator"]["offloaded"].as_u64() > Some(0), "{stat:#}");
    let pid = i32::try_from(stat["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let start = Instant::now();
    // It serves before it has the device, or soon after.
    let next = loop {
        let text = served.stat(true);
        let next = serde_json::from_str::<serde_json::Value>(&text).map(|all| all[0].clone());
        match next {
            Ok(next) if next["pid"] != stat["pid"] && next["accelerator"]["on_device"] == 1 => {
                break next
            }
            _ => assert!(start.elapsed() < HANG, "no other server: {}", served.log()),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(next["platen"]["lost_pages"], 0, "{next:#}");
    let mut client = served.client();
    assert!(client.read(plain.len()) == plain);
    let other = pages(500, 9);
    client.write(&other);
    assert!(client.read(other.len()) == other);
    assert!(served.numbers()["accelerator"]["offloaded"].as_u64() > Some(0));
    drop(client);
    served.end();
}

#[test]
fn a_device_that_falls_silent_delays_neither_writes_nor_the_end() {
    let served = Served::new(Some("instances 1; at 100 silence"), &["--accelerator", "qat"]);
    let plain = pages(500, 11);
    let mut client = served.client();
    client.write(&plain);
    assert!(client.read(plain.len()) == plain);
    let stat = served.numbers();
    let accelerator = &stat["accelerator"];
    assert_eq!(accelerator["on_device"], 0, "{stat:#}");
    assert!(accelerator["reasons"]["late"].as_u64() > Some(0), "{stat:#}");
    drop(client);
    let start = Instant::now();
    served.end();
    assert!(start.elapsed() < HANG, "it took {:?} to end", start.elapsed());
}
