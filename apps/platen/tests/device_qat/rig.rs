//! A served device, on the simulated QAT device or without one, and an NBD client.

use rustix::process::{kill_process, Pid, Signal};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) const PAGE: usize = 4096;
/// Longest wait for anything before it is called a hang.
pub(crate) const HANG: Duration = Duration::from_secs(300);

pub(crate) struct Served {
    pub(crate) child: Child,
    folder: tempfile::TempDir,
}

pub(crate) fn command(folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
    command.args(["device", "serve", "--name", "qat", "--size", "64M", "--codec", "qatzip"]);
    command.args(["--nbd", &format!("unix:{}", folder.join("nbd.sock").display()), "--run-dir"]);
    command.arg(folder.join("run")).args(options);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

impl Served {
    /// With the simulated device and its script, or without any.
    pub(crate) fn new(script: Option<&str>, options: &[&str]) -> Self {
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
        // Behind this line the server reports that it is ready. One that dies before has not
        // started, and is not replaced. Its policy begins behind that.
        while served.numbers()["policy"].is_null() {
            assert!(start.elapsed() < HANG, "the policy does not begin: {}", served.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        served
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    pub(crate) fn stat(&self, json: bool) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
        command.args(["device", "stat", "qat", "--run-dir"]).arg(self.path("run"));
        if json {
            command.arg("--json");
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    /// The output of `stat` for a person.
    pub(crate) fn text(&self) -> String {
        let start = Instant::now();
        loop {
            // None comes from a server that stands still with the whole machine.
            let text = self.stat(false);
            if !text.is_empty() {
                return text;
            }
            assert!(start.elapsed() < HANG, "no text: {}", self.log());
        }
    }

    pub(crate) fn numbers(&self) -> serde_json::Value {
        let start = Instant::now();
        loop {
            // None comes from a server that stands still with the whole machine.
            match serde_json::from_str::<serde_json::Value>(&self.stat(true)) {
                Ok(all) if all[0].is_object() => return all[0].clone(),
                _ => assert!(start.elapsed() < HANG, "no numbers: {}", self.log()),
            }
        }
    }

    /// Writes `pages` again and again until `is` holds of the server's numbers; returns these. A
    /// page that waits 100 ms for the device is compressed in software, and so are the next ones: a
    /// busy machine puts the device's threads aside for longer.
    pub(crate) fn write_until(
        &self,
        client: &mut Client,
        pages: &[u8],
        is: impl Fn(&serde_json::Value) -> bool,
    ) -> serde_json::Value {
        let start = Instant::now();
        loop {
            client.write(pages);
            let stat = self.numbers();
            if is(&stat) {
                return stat;
            }
            assert!(start.elapsed() < HANG, "not by the device: {stat:#}");
        }
    }

    pub(crate) fn client(&self) -> Client {
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

    pub(crate) fn end(mut self) -> String {
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

/// Whether the device has compressed a page.
pub(crate) fn has_offloaded(stat: &serde_json::Value) -> bool {
    stat["accelerator"]["offloaded"].as_u64() > Some(0)
}

/// The least of an NBD client (simple replies; proto.md of the NBD project): export name, reads,
/// writes.
pub(crate) struct Client(UnixStream);

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

    fn ask(&mut self, command: u16, page: u64, len: usize) -> io::Result<()> {
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, 0]);
        request.extend(command.to_be_bytes());
        request.extend([0; 8]);
        request.extend((page * PAGE as u64).to_be_bytes());
        request.extend(u32::try_from(len).unwrap().to_be_bytes());
        self.0.write_all(&request)
    }

    /// Reads an answer, which must not be an I/O error of the device.
    fn answer(&mut self) -> io::Result<()> {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply)?;
        assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
        Ok(())
    }

    /// Writes `pages` in requests of 1 to 32 pages, eight under way.
    pub(crate) fn write(&mut self, pages: &[u8]) {
        self.try_write(0, pages).unwrap();
    }

    /// Writes `pages` behind the first `first` pages; fails when the connection ends.
    pub(crate) fn try_write(&mut self, first: usize, pages: &[u8]) -> io::Result<()> {
        let (mut at, mut under_way, mut size) = (0, 0, 1);
        while at < pages.len() || under_way > 0 {
            if at < pages.len() && under_way < 8 {
                let len = (size * PAGE).min(pages.len() - at);
                self.ask(1, (first + at / PAGE) as u64, len)?;
                self.0.write_all(&pages[at..at + len])?;
                (at, under_way, size) = (at + len, under_way + 1, size % 32 + 1);
            } else {
                self.answer()?;
                under_way -= 1;
            }
        }
        Ok(())
    }

    pub(crate) fn read(&mut self, len: usize) -> Vec<u8> {
        let mut all = vec![0; len];
        for (number, part) in all.chunks_mut(64 * PAGE).enumerate() {
            self.ask(0, number as u64 * 64, part.len()).unwrap();
            self.answer().unwrap();
            self.0.read_exact(part).unwrap();
        }
        all
    }
}

/// Pages like text, no two alike.
pub(crate) fn pages(count: usize, seed: u64) -> Vec<u8> {
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
