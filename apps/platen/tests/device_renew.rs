//! Replaces a live server: `platen device upgrade` and `platen device set`. Uses ublk if the
//! machine has it, else NBD with a client that reconnects.

#[path = "device_renew/growth.rs"]
mod growth;
#[path = "device_renew/unanswered.rs"]
mod unanswered;

use rustix::process::{kill_process, Pid, Signal};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A limit that only a hang exceeds.
const LONG: Duration = Duration::from_secs(300);
const PAGE: usize = 4096;
const PAGES: u64 = 2048;

/// The connection to the device.
enum Disk {
    Ublk(File),
    Nbd(Nbd),
}

/// An NBD client that reconnects when its server has gone, and then repeats its request, as the
/// kernel's client does.
struct Nbd {
    path: PathBuf,
    stream: Option<UnixStream>,
}

impl Nbd {
    fn connect(path: &Path) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(LONG))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle, without zeroes; then the default export.
        stream.write_all(&3_u32.to_be_bytes())?;
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0")?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        let size = u64::from_be_bytes(*export.first_chunk().unwrap());
        assert!(size >= PAGES * PAGE as u64 && size.is_multiple_of(PAGE as u64), "{size}");
        Ok(stream)
    }

    fn request(&mut self, kind: u16, page: u64, bytes: &mut [u8]) -> io::Result<()> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            none => none.insert(Self::connect(&self.path)?),
        };
        let mut request = Vec::new();
        request.extend(0x2560_9513_u32.to_be_bytes());
        request.extend(0_u16.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(7_u64.to_be_bytes());
        request.extend((page * PAGE as u64).to_be_bytes());
        request.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
        if kind == 1 {
            request.extend(&*bytes);
        }
        stream.write_all(&request)?;
        let mut reply = [0; 16];
        stream.read_exact(&mut reply)?;
        assert_eq!(reply[4..8], [0; 4], "an error from the device");
        if kind == 0 {
            stream.read_exact(bytes)?;
        }
        Ok(())
    }

    fn until_done(&mut self, kind: u16, page: u64, bytes: &mut [u8]) {
        let start = Instant::now();
        while let Err(error) = self.request(kind, page, bytes) {
            assert!(start.elapsed() < LONG, "{error}");
            self.stream = None;
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Disk {
    fn write(&mut self, page: u64, bytes: &mut [u8]) {
        match self {
            Self::Ublk(file) => file.write_all_at(bytes, page * PAGE as u64).unwrap(),
            Self::Nbd(nbd) => nbd.until_done(1, page, bytes),
        }
    }

    fn read(&mut self, page: u64, bytes: &mut [u8]) {
        match self {
            Self::Ublk(file) => {
                // Reads from the device, not from the page cache: writes are synchronous.
                let (at, len) = (page * PAGE as u64, std::num::NonZeroU64::new(PAGE as u64));
                rustix::fs::fadvise(&*file, at, len, rustix::fs::Advice::DontNeed).unwrap();
                file.read_exact_at(bytes, at).unwrap();
            }
            Self::Nbd(nbd) => nbd.until_done(0, page, bytes),
        }
    }
}

/// Contents of a version of a page: text, and bytes that do not compress.
fn content(page: u64, version: u64) -> Vec<u8> {
    let mut state = (page + 1).wrapping_mul(0x2545_f491_4f6c_dd1d) ^ version << 20;
    let mut bytes = format!("page {page} version {version} ").repeat(100).into_bytes();
    while bytes.len() < PAGE {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(PAGE);
    bytes
}

/// A thread that writes pages in turn, and reads back and compares others.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<(Disk, Vec<u64>)>,
}

impl Load {
    fn start(mut disk: Disk, mut versions: Vec<u64>) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&done));
        let thread = std::thread::spawn(move || {
            let mut turn = 0;
            while !stopped.load(Ordering::Relaxed) {
                turn += 1;
                let page = turn * 7919 % PAGES;
                let slot = usize::try_from(page).unwrap();
                versions[slot] += 1;
                disk.write(page, &mut content(page, versions[slot]));
                compare(&mut disk, &versions, turn * 104_729 % PAGES);
                counted.fetch_add(1, Ordering::Relaxed);
            }
            (disk, versions)
        });
        Self { stop, done, thread }
    }

    /// Waits until it has made progress.
    fn goes_on(&self) {
        let before = self.done.load(Ordering::Relaxed);
        wait("nothing is served", || {
            assert!(!self.thread.is_finished(), "a page was wrong");
            self.done.load(Ordering::Relaxed) > before + 20
        });
    }

    /// Stops the thread, and compares every page.
    fn end(self) -> (Disk, Vec<u64>) {
        self.stop.store(true, Ordering::Relaxed);
        let (mut disk, versions) = self.thread.join().unwrap();
        (0..PAGES).for_each(|page| compare(&mut disk, &versions, page));
        (disk, versions)
    }
}

fn compare(disk: &mut Disk, versions: &[u64], page: u64) {
    let mut got = vec![0; PAGE];
    disk.read(page, &mut got);
    let expected = match versions[usize::try_from(page).unwrap()] {
        0 => vec![0; PAGE],
        version => content(page, version),
    };
    assert!(got == expected, "page {page} is not what was written");
}

fn wait(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Served {
    supervisor: Mutex<Child>,
    folder: tempfile::TempDir,
}

fn platen() -> Command {
    Command::new(env!("CARGO_BIN_EXE_platen"))
}

fn ublk() -> bool {
    rustix::process::geteuid().is_root() && Path::new("/dev/ublk-control").exists()
}

impl Served {
    fn start(options: &[&str], kill_at: Option<&str>) -> Self {
        Self::start_by(options, kill_at, ublk())
    }

    fn start_by(options: &[&str], kill_at: Option<&str>, ublk: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = platen();
        command.args(["device", "serve", "--size", "8M", "--name", "renewed", "--run-dir"]);
        command.arg(folder.path().join("run")).args(options);
        if ublk {
            command.arg("--ublk");
        } else {
            command.arg("--nbd").arg(format!("unix:{}", folder.path().join("nbd").display()));
        }
        if let Some(step) = kill_at {
            // Only the first process at that step.
            let once = folder.path().join("killed");
            command.env("PLATEN_KILL_AT", format!("{step}:{}", once.display()));
        }
        let log = File::create(folder.path().join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let supervisor = Mutex::new(command.spawn().unwrap());
        let served = Self { supervisor, folder };
        wait("the server does not begin", || {
            served.stat().is_some_and(|stat| !stat["policy"].is_null())
        });
        served
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A copy of the program, as another version would be.
    fn copy(&self) -> PathBuf {
        let copy = self.path("another");
        if !copy.exists() {
            // Copied by another process: a descriptor open for writing here would be inherited by
            // processes that other tests start at that moment, and the kernel does not execute a
            // file open for writing.
            let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_platen")).arg(&copy).status();
            assert!(copied.unwrap().success());
        }
        copy
    }

    fn disk(&self) -> Disk {
        if self.path("nbd").exists() {
            return Disk::Nbd(Nbd { path: self.path("nbd"), stream: None });
        }
        let stat = self.status();
        let path = stat["transports"][0]["address"].as_str().unwrap().to_owned();
        let flags = rustix::fs::OFlags::SYNC.bits();
        use std::os::unix::fs::OpenOptionsExt;
        let flags = i32::try_from(flags).unwrap();
        let file = File::options().read(true).write(true).custom_flags(flags).open(path);
        Disk::Ublk(file.unwrap())
    }

    fn stat(&self) -> Option<serde_json::Value> {
        let mut stream = UnixStream::connect(self.path("run/renewed.sock")).ok()?;
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(b"stat\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }

    /// The answer to `stat`. There is none for a test that gets no CPU for a second between its
    /// connection and its request.
    fn status(&self) -> serde_json::Value {
        let mut status = None;
        wait("no status", || {
            status = self.stat();
            status.is_some()
        });
        status.expect("it is there")
    }

    fn ask(&self, program: &Path, words: &[&str]) -> (bool, String) {
        let mut command = Command::new(program);
        command.args(["device", words[0], "renewed", "--run-dir"]).arg(self.path("run"));
        command.args(&words[1..]);
        let start = Instant::now();
        loop {
            let Output { status, stdout, stderr } = command.output().unwrap();
            let said = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            let said = said.concat();
            // A server answers before its supervisor knows that it serves.
            let early = said.contains("it has no server that serves at the moment; try again");
            if !early || start.elapsed() > LONG {
                return (status.success(), said);
            }
        }
    }

    /// Child processes of the supervisor.
    fn children(&self) -> Vec<String> {
        let supervisor = self.supervisor.lock().unwrap().id();
        let children = format!("/proc/{supervisor}/task/{supervisor}/children");
        let children = fs::read_to_string(children).unwrap();
        children.split_whitespace().map(str::to_owned).collect()
    }

    fn end(self) {
        let mut supervisor = self.supervisor.lock().unwrap();
        kill_process(Pid::from_child(&supervisor), Signal::TERM).unwrap();
        let mut status = None;
        wait("it does not end", || {
            status = supervisor.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success(), "{status:?}");
        assert!(!self.path("nbd").exists());
        let left: Vec<_> = fs::read_dir(self.path("run")).unwrap().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Ok(supervisor) = self.supervisor.get_mut() {
            // The supervisor has exited, or a test has failed.
            let _ = supervisor.kill();
            let _ = supervisor.wait();
        }
        if std::thread::panicking() {
            eprintln!("it said:\n{}", fs::read_to_string(self.path("log")).unwrap_or_default());
        }
    }
}

fn nothing_written() -> Vec<u64> {
    vec![0; usize::try_from(PAGES).unwrap()]
}

#[test]
fn another_program_serves_the_device_and_its_clients_continue() {
    let served = Served::start(&[], None);
    let copy = served.copy();
    let supervisor = served.supervisor.lock().unwrap().id();
    let program = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    let descriptors = || fs::read_dir(format!("/proc/{supervisor}/fd")).unwrap().count();
    let load = Load::start(served.disk(), nothing_written());
    load.goes_on();
    let mut before = None;
    for round in 0..4 {
        let server = served.status()["pid"].as_u64().unwrap();
        let to = if round % 2 == 0 { &*copy } else { Path::new(env!("CARGO_BIN_EXE_platen")) };
        let (done, said) = served.ask(to, &["upgrade"]);
        assert!(done, "{said}");
        load.goes_on();
        let stat = served.status();
        let other = stat["pid"].as_u64().unwrap();
        assert_ne!(other, server);
        let programs = [supervisor, u32::try_from(other).unwrap()].map(program);
        // The copy has no small program beside it.
        let expected =
            if round % 2 == 0 { to } else { Path::new(env!("CARGO_BIN_EXE_platen-device")) };
        assert_eq!(programs, [expected, expected], "the supervisor and its server");
        assert_eq!(stat["platen"]["generation"], round + 2);
        wait("the former server is there", || served.children().len() == 1);
        // Earlier hand-overs leave no descriptors open. The supervisor may still hold a connection
        // of this one.
        let allowed = *before.get_or_insert_with(descriptors);
        wait("more descriptors than after the first hand-over", || descriptors() <= allowed);
    }
    let (disk, _) = load.end();
    assert_eq!(served.status()["io_stat"]["failed_reads"], 0);
    drop(disk);
    served.end();
}

#[test]
fn settings_take_effect_and_persist_or_are_refused_unchanged() {
    let served = Served::start(&["--mem-limit", "64M"], None);
    let own = Path::new(env!("CARGO_BIN_EXE_platen"));
    let policy = served.path("policy");
    fs::write(&policy, "[policy]\nenabled = false\n").unwrap();
    let load = Load::start(served.disk(), nothing_written());
    load.goes_on();
    let shown = || {
        let stat = served.status();
        let limit = stat["mm_stat"]["mem_limit"].as_u64().unwrap() >> 20;
        let codec = stat["codec"].as_str().unwrap().to_owned();
        (limit, codec, stat["level"].as_i64().unwrap(), stat["policy"].is_null())
    };
    let policy = policy.to_str().unwrap();
    for (words, expected) in [
        (&["set", "--mem-limit", "48M"][..], (48, "zstd", 1, false)),
        (&["set", "--codec", "zlib", "--level", "6"], (48, "zlib", 6, false)),
        (&["set", "--codec", "zstd"], (48, "zstd", 1, false)),
        (&["set", "--level", "-3"], (48, "zstd", -3, false)),
        (&["set", "--policy", policy], (48, "zstd", -3, true)),
        (&["set", "--size", "8M"], (48, "zstd", -3, true)),
    ] {
        let (done, said) = served.ask(own, words);
        assert!(done, "{words:?}: {said}");
        load.goes_on();
        let (limit, codec, level, off) = expected;
        wait("the policy does not begin", || shown().3 == off);
        assert_eq!(shown(), (limit, codec.to_owned(), level, off), "{words:?}");
    }
    let before = (served.status()["pid"].clone(), shown());
    let broken = served.path("broken");
    fs::write(&broken, "[policy]\nperiod = \"x\"\n").unwrap();
    let backing = served.path("backing");
    let device = served.path("device");
    fs::write(&backing, format!("[policy]\nbacking_dev = \"{}\"\n", device.display())).unwrap();
    for (words, why) in [
        (&["set", "--mem-limit", "4K"][..], "superblock and slot table alone need"),
        (&["set", "--level", "50"], "zstd has no level 50"),
        (&["set", "--size", "4M"], "has 8388608 bytes, and 4194304 are fewer"),
        (&["set", "--size", "129M"], "room for 134217728 bytes, not for 135266304"),
        (&["set", "--size", "16M", "--mem-limit", "32K"], "superblock and slot table alone need"),
        (&["set", "--policy", broken.to_str().unwrap()], "period"),
        (&["set", "--policy", backing.to_str().unwrap()], "backing_dev: a device has its"),
        (&["set", "--policy", "/nowhere"], "No such file"),
        (&["set"], "required"),
    ] {
        let (done, said) = served.ask(own, words);
        assert!(!done && said.contains(why), "{words:?}: {said}");
        assert_eq!((served.status()["pid"].clone(), shown()), before, "{words:?}");
    }
    // A server that dies is replaced by one with the same settings, and so is one of another
    // program.
    let pid = i32::try_from(before.0.as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    wait("no other server", || served.stat().is_some_and(|stat| stat["pid"] != before.0));
    assert_eq!(shown(), before.1);
    let (done, said) = served.ask(&served.copy(), &["upgrade"]);
    assert!(done, "{said}");
    assert_eq!(shown(), before.1);
    drop(load.end());
    served.end();
}

/// This test makes the request itself; its program is not platen.
#[test]
fn a_program_that_cannot_take_over_is_refused_with_its_reason_and_the_old_server_continues() {
    let served = Served::start(&[], None);
    let load = Load::start(served.disk(), nothing_written());
    load.goes_on();
    let before = (served.status()["pid"].clone(), served.children());
    let mut stream = UnixStream::connect(served.path("run/renewed.supervisor")).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(b"upgrade\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("refused: the new server ended with exit status: "), "{answer}");
    for (request, why) in [
        ("more\n", "does not know the request \"more\""),
        ("upgrade", "the request is not a line"),
        ("set codec=gzip\n", "none of none, lz4"),
        ("set more=1\n", "'more=1' is not a setting"),
    ] {
        let mut stream = UnixStream::connect(served.path("run/renewed.supervisor")).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("refused: ") && answer.contains(why), "{request}: {answer}");
    }
    // A client that sends nothing blocks no other.
    let _silent = UnixStream::connect(served.path("run/renewed.supervisor")).unwrap();
    load.goes_on();
    assert_eq!((served.status()["pid"].clone(), served.children()), before);
    let (done, said) = served.ask(&served.copy(), &["upgrade"]);
    assert!(done, "{said}");
    drop(load.end());
    served.end();
}

/// The new server is killed, or kills itself, at each of its steps: the device continues to serve.
#[test]
fn a_new_server_that_is_killed_at_any_step_loses_no_page() {
    for (step, refused) in
        [("successor stands by", true), ("successor goes", true), ("successor alone", true)]
    {
        let served = Served::start(&[], Some(step));
        let load = Load::start(served.disk(), nothing_written());
        load.goes_on();
        let (done, said) = served.ask(&served.copy(), &["upgrade"]);
        assert!(served.path("killed").exists(), "{step}: nothing was killed");
        assert_eq!(!done, refused, "{step}: {said}");
        assert!(said.contains("signal: 9"), "{step}: {said}");
        load.goes_on();
        let (done, said) = served.ask(&served.copy(), &["upgrade"]);
        assert!(done, "{step}: {said}");
        load.goes_on();
        wait("more than one server", || served.children().len() == 1);
        drop(load.end());
        served.end();
    }
}
