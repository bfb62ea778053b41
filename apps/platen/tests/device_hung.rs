//! Servers that hang or die again and again: they are replaced, and what they had stored is there.

use rustix::process::{kill_process, prlimit, Pid, Resource, Rlimit, Signal};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../../../memory/nbd/tests/simple/mod.rs"]
mod simple;

/// Only a hang takes so long.
const LONG: Duration = Duration::from_secs(300);

const WRITE: u8 = 1;
const READ: u8 = 0;
const LEN: usize = 8 * 4096;

struct Served {
    supervisor: Child,
    folder: tempfile::TempDir,
}

impl Served {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
        command.args(["device", "serve", "--size", "16M", "--name", "hung", "--run-dir"]);
        command.arg(folder.path().join("run"));
        let nbd = format!("unix:{}", folder.path().join("nbd").display());
        command.args(["--nbd", &nbd]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let served = Self { supervisor: command.spawn().unwrap(), folder };
        served.wait("no server", |served| served.server().is_some());
        served
    }

    fn wait(&self, what: &str, is: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is(self) {
            assert!(start.elapsed() < LONG, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A connection that the server has greeted, or `None` where the server refused it.
    fn connect(&self) -> Option<UnixStream> {
        let mut stream = UnixStream::connect(self.path("nbd")).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.read_exact(&mut [0; 18]).ok()?;
        Some(stream)
    }

    /// A connection that has read the first page, so that the server has made all that it needs
    /// for it, or `None` where the server refused it.
    fn read_first_page(&self) -> Option<UnixStream> {
        self.connect().map(finish)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap()
    }

    /// The answer of the server to `stat`; `None` when none answers.
    fn stat(&self) -> Option<serde_json::Value> {
        let mut stream = UnixStream::connect(self.path("run/hung.sock")).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        stream.write_all(b"stat\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }

    /// The server that answers; `None` when none does.
    fn server(&self) -> Option<Pid> {
        let stat = self.stat()?;
        // The policy begins when the supervisor knows that the server is ready.
        (!stat["policy"].is_null()).then_some(())?;
        Pid::from_raw(i32::try_from(stat["pid"].as_i64()?).ok()?)
    }

    /// The server that answers, as soon as one does.
    fn there(&self) -> Pid {
        let mut server = None;
        let start = Instant::now();
        while server.is_none() {
            assert!(start.elapsed() < LONG, "no server answers");
            server = self.server();
        }
        server.expect("it is there")
    }

    fn write(&self, bytes: &[u8]) {
        let mut client = simple::client(&self.path("nbd"), LONG);
        client.write_all(&simple::request(WRITE, 1, 0, LEN, bytes)).unwrap();
        let mut reply = [0; 16];
        client.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
    }

    fn read(&self) -> Vec<u8> {
        let mut client = simple::client(&self.path("nbd"), LONG);
        client.write_all(&simple::request(READ, 2, 0, LEN, &[])).unwrap();
        let mut reply = vec![0; 16 + LEN];
        client.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
        reply.split_off(16)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        kill_process(Pid::from_child(&self.supervisor), Signal::TERM).unwrap();
        let _ = self.supervisor.wait();
        if std::thread::panicking() {
            eprintln!("it said:\n{}", self.log());
        }
    }
}

/// Ends the handshake of a connection and reads the first page.
fn finish(mut stream: UnixStream) -> UnixStream {
    stream.write_all(&[0, 0, 0, 3]).unwrap();
    stream.write_all(&[&b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream.write_all(&simple::request(READ, 2, 0, 4096, &[])).unwrap();
    let mut reply = vec![0; 16 + 4096];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[16..], bytes()[..4096]);
    stream
}

fn bytes() -> Vec<u8> {
    (0..LEN).map(|at| (at * at / 97).to_le_bytes()[0]).collect()
}

#[test]
fn a_stopped_server_is_replaced_and_its_pages_are_intact() {
    let served = Served::start();
    served.write(&bytes());
    let stopped = served.there();
    kill_process(stopped, Signal::STOP).unwrap();
    // A thread that waits for a CPU when the signal comes would still take a client.
    served.wait("it does not stop", |_| all_threads_are(stopped, 'T'));
    // It answers a client that waits, too: the listening socket has outlived it.
    assert_eq!(served.read(), bytes());
    served.wait("no other server", |served| served.server().is_some_and(|pid| pid != stopped));
    let log = served.log();
    assert!(log.contains("the server hangs: it has been stopped (SIGSTOP)"), "{log}");
}

/// Whether all threads of a process are in this state of `/proc/PID/stat`.
fn all_threads_are(process: Pid, state: char) -> bool {
    let tasks = fs::read_dir(format!("/proc/{}/task", process.as_raw_nonzero())).unwrap();
    tasks.flatten().all(|task| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(state))
    })
}

/// The kernel reports no hang of an idle server, nor of a busy one.
#[test]
fn an_idle_or_busy_server_is_not_replaced() {
    let served = Served::start();
    let first = served.there();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(15) {
        served.write(&bytes());
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(10));
    assert_eq!(served.read(), bytes());
    assert_eq!(served.there(), first, "{}", served.log());
}

/// Nine deaths in a row once destroyed all data. The pauses between them are ended by hand.
#[test]
fn a_dozen_deaths_in_a_row_lose_no_page() {
    let served = Served::start();
    served.write(&bytes());
    let (mut last, mut deaths, start) = (None, 0, Instant::now());
    // After a server that was there for long, as on a machine that stands still, the pauses begin
    // anew.
    while deaths < 12 || !served.log().contains("starting another in 10s") {
        assert!(start.elapsed() < LONG, "{deaths} deaths: {}", served.log());
        served.wait("no other server", |served| {
            kill_process(Pid::from_child(&served.supervisor), Signal::USR1).unwrap();
            served.server().is_some_and(|pid| Some(pid) != last)
        });
        let server = served.there();
        last = Some(server);
        kill_process(server, Signal::KILL).unwrap();
        deaths += 1;
    }
    kill_process(Pid::from_child(&served.supervisor), Signal::USR1).unwrap();
    assert_eq!(served.read(), bytes());
    let log = served.log();
    assert_eq!(log.matches("has died").count(), deaths, "{log}");
}

/// Each new connection once ended a server without memory for it.
#[test]
fn a_connection_without_memory_is_refused_and_the_others_are_served() {
    let served = Served::start();
    served.write(&bytes());
    let server = served.there();
    limit_memory(server, Some(16 << 20));
    let mut open = Vec::new();
    let refused = (0..16).find(|_| match served.read_first_page() {
        Some(stream) => {
            open.push(stream);
            false
        }
        None => true,
    });
    assert!(refused.is_some_and(|number| number > 0), "{refused:?} was refused");
    // There is no room for its buffers, or for its thread.
    served.wait("it is not said", |served| {
        let log = served.log();
        log.contains("of memory for it") || log.contains("no thread")
    });
    assert!(!served.log().contains("has died"), "{}", served.log());
    open.clear();
    let stat = || served.stat().is_some_and(|stat| stat["transports"][0]["connections"] == 0);
    served.wait("a connection goes on", |_| stat());
    // The pieces of the heap that are free now need not be large enough for another connection.
    limit_memory(server, None);
    served.wait("there is memory again", |served| served.connect().is_some());
    assert_eq!(served.there(), server);
}

/// A server with memory for a thread's stack, but not for the stack of its signal handler, once
/// aborted. Each connection needs a new thread and finds 4 KiB more than the one before.
#[test]
fn a_connection_without_memory_for_the_start_of_its_thread_is_refused() {
    let served = Served::start();
    served.write(&bytes());
    // Leaves free memory in the heap.
    for _ in 0..3 {
        drop(served.read_first_page().unwrap());
    }
    let server = served.there();
    let mut open = Vec::new();
    let mut refused = 0;
    for step in 0..26 {
        // The last ones have enough, also where the heap has no free memory.
        let more = if step < 24 { (256 << 10) + step * 4096 } else { 16 << 20 };
        limit_memory(server, Some(more));
        match served.connect() {
            Some(stream) => open.push(stream),
            None => refused += 1,
        }
        limit_memory(server, None);
        if open.len() == 14 {
            break;
        }
    }
    assert!(refused > 0 && open.len() > 1, "{refused} refused, {} served", open.len());
    drop(open);
    let log = served.log();
    assert!(!log.contains("has died"), "{log}");
    assert_eq!(served.there(), server);
    assert_eq!(served.read(), bytes());
}

/// Connections whose handshakes overlap once found the same memory free, and the last ones to take
/// it ended the server.
#[test]
fn connections_that_begin_at_once_share_no_memory() {
    let served = Served::start();
    served.write(&bytes());
    let server = served.there();
    limit_memory(server, Some(16 << 20));
    let begun: Vec<_> = (0..12).filter_map(|_| served.connect()).collect();
    assert!((1..12).contains(&begun.len()), "{} of 12 may begin", begun.len());
    let open: Vec<_> = begun.into_iter().map(finish).collect();
    drop(open);
    let log = served.log();
    assert!(!log.contains("has died"), "{log}");
    assert_eq!(served.there(), server);
}

/// Sets the soft limit of `server`'s address space to `more` bytes above its present size, or to
/// none.
fn limit_memory(server: Pid, more: Option<u64>) {
    let status = fs::read_to_string(format!("/proc/{}/status", server.as_raw_nonzero())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let limit = Rlimit { current: more.map(|more| (size << 10) + more), maximum: None };
    prlimit(Some(server), Resource::As, limit).unwrap();
}
