//! `platen relay` and `platen receive` as processes, between made QEMUs: exit statuses, reports,
//! and limits of the system.

use rustix::net::{
    self, sendmsg, AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType,
};
use rustix::process::{kill_process, Pid, Signal};
use std::io::{BufRead, BufReader, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

#[path = "migration/closed.rs"]
mod closed;
#[path = "migration/first_limit.rs"]
mod first_limit;
#[path = "migration/held.rs"]
mod held;
#[path = "migration/hung.rs"]
mod hung;
#[path = "migration/hung_end.rs"]
mod hung_end;
#[path = "migration/no_memory.rs"]
mod no_memory;
#[path = "migration/terminal.rs"]
mod terminal;
#[path = "migration/throttle.rs"]
mod throttle;

/// Nothing here takes this long unless it hangs.
const WATCHDOG: Duration = Duration::from_secs(240);

/// A running platen, and its messages.
struct Platen {
    child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Platen {
    /// `limits`: commands of a shell before it.
    fn start(limits: &str, args: &[&str]) -> Self {
        let script = format!("{limits} exec \"$0\" \"$@\"");
        let mut child = Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_platen")])
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, lines, said: Vec::new() }
    }

    /// Waits for a line with these words, and gives it.
    fn says(&mut self, words: &str) -> String {
        self.says_one_of(&[words])
    }

    /// As `says`, with any of these.
    fn says_one_of(&mut self, words: &[&str]) -> String {
        loop {
            let Ok(line) = self.lines.recv_timeout(WATCHDOG) else {
                panic!("'{words:?}' is not said: {:#?}", self.said);
            };
            self.said.push(line.clone());
            if words.iter().any(|words| line.contains(words)) {
                return line;
            }
        }
    }

    /// Its exit status; none when a signal ended it.
    fn ends(mut self) -> (Option<i32>, String) {
        loop {
            match self.lines.recv_timeout(WATCHDOG) {
                Ok(line) => self.said.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end: {:#?}", self.said),
            }
        }
        let status = self.child.wait().unwrap().code();
        (status, self.said.join("\n"))
    }
}

impl Drop for Platen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder with the sockets of both QEMUs, and both relays.
struct Rig {
    folder: tempfile::TempDir,
    receive: Platen,
    address: String,
}

impl Rig {
    fn new(limits: &str) -> Self {
        Self::with(limits, &[])
    }

    /// `options`: more of the receiver's.
    fn with(limits: &str, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let deliver = unix(&folder.path().join("dst"));
        let json = path(&folder.path().join("receive.json"));
        let mut receive = Platen::start(
            limits,
            // At an address of its own: a port that it leaves for a moment gets no other test.
            &["receive", "--insecure", "--listen", "127.80.76.3:0", "--deliver", &deliver]
                .into_iter()
                .chain(["--once", "--json", &json])
                .chain(options.iter().copied())
                .collect::<Vec<_>>(),
        );
        let address = receive.says("listening on").split(' ').next_back().unwrap().to_string();
        Self { folder, receive, address }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn relay(&self, limits: &str, name: &str) -> Platen {
        let (listen, json) = (unix(&self.at(name)), path(&self.at("relay.json")));
        Platen::start(
            limits,
            &["relay", "--insecure", "--peer", &self.address, "--listen", &listen]
                .into_iter()
                .chain(["--json", &json, "--codec", "none"])
                .collect::<Vec<_>>(),
        )
    }

    fn report(&self, name: &str) -> String {
        std::fs::read_to_string(self.at(name)).unwrap()
    }
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

fn unix(at: &Path) -> String {
    format!("unix:{}", at.display())
}

/// A migration without a return path: the file header and the end-of-stream tag.
const STREAM: &[u8] = b"QEVM\0\0\0\x03\0";

/// Has the made QEMUs migrate; the destination reads all.
fn migrate(rig: &Rig, relay: &mut Platen, listener: &UnixListener, name: &str) {
    relay.says("listening on");
    let mut source = UnixStream::connect(rig.at(name)).unwrap();
    source.write_all(STREAM).unwrap();
    drop(source);
    let (mut destination, _) = listener.accept().unwrap();
    let mut got = vec![0; STREAM.len()];
    destination.read_exact(&mut got).unwrap();
    assert_eq!(got, STREAM);
}

#[test]
fn an_unconfirmed_end_has_a_status_of_its_own() {
    let rig = Rig::new("");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = rig.relay("", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let (status, said) = relay.ends();
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("no return path"), "{said}");
    assert!(rig.report("relay.json").contains(r#""status":"unconfirmed""#));
    let Rig { folder, receive, .. } = rig;
    let (status, said) = receive.ends();
    assert_eq!(status, Some(3), "{said}");
    let report = std::fs::read_to_string(folder.path().join("receive.json")).unwrap();
    assert!(report.contains(r#""status":"unconfirmed""#), "{report}");
}

/// A second receiver on a busy port leaves the first one's reports as they are.
#[test]
fn a_receiver_whose_port_is_in_use_changes_no_report() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report");
    std::fs::write(&json, "of the first one\n").unwrap();
    let (address, deliver) = (taken.local_addr().unwrap().to_string(), unix(&json.join("x")));
    let second = Platen::start(
        "",
        &[
            "receive",
            "--insecure",
            "--listen",
            &address,
            "--deliver",
            &deliver,
            "--json",
            &path(&json),
        ],
    );
    let (status, said) = second.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("in use"), "{said}");
    assert_eq!(std::fs::read_to_string(&json).unwrap(), "of the first one\n");
}

/// The VM has moved, and only the report cannot be written.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_does_not_end_the_process() {
    let rig = Rig::new("");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = rig.relay("ulimit -f 0;", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let (status, said) = relay.ends();
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("cannot write the report to") && said.contains("relay.json"), "{said}");
    assert!(!rig.at("relay.json").exists());
}

#[test]
fn a_receiver_whose_report_reaches_the_limit_on_the_size_of_files_says_so() {
    let rig = Rig::new("ulimit -f 0;");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = rig.relay("", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let (status, said) = relay.ends();
    assert_eq!(status, Some(3), "{said}");
    let Rig { folder, receive, .. } = rig;
    let (status, said) = receive.ends();
    assert_eq!(status, Some(3), "{said}");
    let at = folder.path().join("receive.json").display().to_string();
    let failed = format!("cannot write the report to {at}: File too large");
    assert!(said.contains(&failed), "{said}");
}

/// A port of this address for a process that is to listen there, and a socket that keeps others
/// from having it. The socket does not listen: a process that another test is starting has a copy
/// of it until its exec, and a second listener would be refused.
fn reserve(address: &str) -> (String, OwnedFd) {
    let socket =
        net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.unwrap();
    net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    net::bind(&socket, &SocketAddrV4::new(address.parse().unwrap(), 0)).unwrap();
    let bound = SocketAddrV4::try_from(net::getsockname(&socket).unwrap()).unwrap();
    (bound.to_string(), socket)
}

/// Lines are lost, and nothing else: a receiver may carry other migrations.
#[test]
fn a_log_that_reaches_the_limit_on_the_size_of_files_ends_no_receiver() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // More than the limit, whose unit is 512 or 1024 bytes.
    std::fs::write(at("log"), [b'x'; 8192]).unwrap();
    let limits = format!("ulimit -f 8; exec 2>>'{}';", at("log").display());
    // Its log does not tell the port.
    let (address, _reserved) = reserve("127.80.76.4");
    let (deliver, json) = (unix(&at("dst")), path(&at("receive.json")));
    let receive = ["receive", "--insecure", "--listen", &address, "--deliver", &deliver, "--once"];
    let receive = Platen::start(&limits, &[&receive[..], &["--json", &json]].concat());
    let rig = Rig { folder, receive, address };
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = rig.relay("", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let (status, said) = relay.ends();
    assert_eq!(status, Some(3), "{said}");
    let Rig { folder, receive, .. } = rig;
    assert_eq!(receive.ends().0, Some(3));
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(read("receive.json").contains(r#""status":"unconfirmed""#));
    assert_eq!(read("log"), "x".repeat(8192));
}

#[test]
fn a_report_that_cannot_be_written_is_named_and_changes_no_outcome() {
    let rig = Rig::new("");
    for report in ["relay.json", "receive.json"] {
        // The receiver has made its own.
        let _ = std::fs::remove_file(rig.at(report));
        std::os::unix::fs::symlink("/dev/full", rig.at(report)).unwrap();
    }
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = rig.relay("", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let Rig { folder, receive, .. } = rig;
    for (end, report) in [(relay, "relay.json"), (receive, "receive.json")] {
        let (status, said) = end.ends();
        assert_eq!(status, Some(3), "{said}");
        let at = folder.path().join(report).display().to_string();
        assert!(said.contains(&format!("cannot write the report to {at}: No space")), "{said}");
    }
}

/// Its target would not be free again, and no interrupt would end the receiver.
#[test]
fn a_receiver_whose_reports_nobody_reads_ends() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = path(&folder.path().join("fifo"));
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // A pipe has room for this.
    let rig = Rig::new(&format!("exec 1<>'{fifo}'; head -c 65536 /dev/zero;"));
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = rig.relay("", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let (status, said) = relay.ends();
    assert_eq!(status, Some(3), "{said}");
    let Rig { receive, .. } = rig;
    let (status, said) = receive.ends();
    assert_eq!(status, Some(3), "{said}");
    assert!(said.contains("the report is not written yet"), "{said}");
}

/// A VM of several TB, or its host, may need more than the minute that is the default.
#[test]
fn the_time_for_the_setup_of_the_ram_is_an_option() {
    let rig = Rig::new("");
    let listen = unix(&rig.at("src"));
    let mut relay = Platen::start(
        "",
        &["relay", "--insecure", "--peer", &rig.address, "--listen", &listen, "--setup-timeout=1"],
    );
    relay.says("listening on");
    let mut source = UnixStream::connect(rig.at("src")).unwrap();
    // The header, without the end of the stream.
    source.write_all(&STREAM[..8]).unwrap();
    let (status, said) = relay.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("then sent nothing for 1 s"), "{said}");
    assert!(said.contains("--setup-timeout"), "{said}");
}

/// One message, then the end: QEMU waits for a channel that cannot be accepted, and would for ever.
#[test]
fn a_relay_without_free_descriptors_reports_the_cause_and_ends() {
    let rig = Rig::new("");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = rig.relay("ulimit -n 40;", "src");
    relay.says("listening on");
    let mut source = UnixStream::connect(rig.at("src")).unwrap();
    source.write_all(&STREAM[..8]).unwrap();
    let (_destination, _) = listener.accept().unwrap();
    let idle: Vec<_> = (0..60).map(|_| UnixStream::connect(rig.at("src")).unwrap()).collect();
    let (status, said) = relay.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(
        said.contains("cannot accept a connection on") && said.contains("open files"),
        "{said}"
    );
    assert_eq!(said.matches("trying again").count(), 1, "{said}");
    drop((source, idle));
}

/// CPU time that a process has used.
fn cpu_time(process: &Child) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    // Behind the name in brackets: utime and stime, in hundredths of a second.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let ticks = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>());
    Duration::from_millis(10 * ticks.sum::<Result<u64, _>>().unwrap())
}

/// The descriptors that a process has.
fn descriptors(process: &Child) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap().count()
}

/// Strangers take them all. A link takes two: with an odd number of free descriptors the last link
/// is accepted and turned away, and the next one finds a free descriptor.
#[test]
fn a_receiver_without_free_descriptors_reports_the_cause_and_serves_when_there_are_some() {
    for limits in ["ulimit -n 64;", "ulimit -n 65;"] {
        serves_without_descriptors(limits);
    }
}

fn serves_without_descriptors(limits: &str) {
    let mut rig = Rig::new(limits);
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let free = descriptors(&rig.receive.child);
    let idle: Vec<_> = (0..100).map(|_| TcpStream::connect(&rig.address).unwrap()).collect();
    let said = rig.receive.says("cannot accept a link");
    assert!(said.contains("open files") && said.contains("trying again"), "{said}");
    let (began, before) = (Instant::now(), cpu_time(&rig.receive.child));
    std::thread::sleep(Duration::from_secs(2));
    let used = cpu_time(&rig.receive.child) - before;
    assert!(used < began.elapsed() / 10, "it used {used:?} of CPU time in {:?}", began.elapsed());
    let again = rig.receive.lines.try_iter().filter(|line| line.contains("trying again")).count();
    // Strangers that are silent for 5 s make room for others; it is reported every 10 s at most.
    let most = 1 + began.elapsed().as_secs() / 10;
    assert!(again as u64 <= most, "it reported that {again} times in {:?}", began.elapsed());
    drop(idle);
    // Behind the last of them in the queue: with its end all of them have been accepted.
    let mut last = TcpStream::connect(&rig.address).unwrap();
    last.set_read_timeout(Some(WATCHDOG)).unwrap();
    let _ = last.write_all(b"GET / HTTP/1.0\r\n\r\n");
    let end = last.read_to_end(&mut Vec::new());
    assert!(!end.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "it waits");
    // A link that found no descriptor would be turned away.
    while descriptors(&rig.receive.child) > free + 8 {
        assert!(began.elapsed() < WATCHDOG, "strangers that have gone have descriptors");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut relay = rig.relay("", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let (status, said) = relay.ends();
    assert_eq!(status, Some(3), "{said}");
    let (status, said) = rig.receive.ends();
    assert_eq!(status, Some(3), "{said}");
}

#[test]
fn a_relay_killed_before_its_migration_does_not_keep_its_target() {
    let mut rig = Rig::new("");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut killed = rig.relay("", "killed");
    killed.says("listening on");
    // By SIGKILL.
    drop(killed);
    rig.receive.says("waiting up to");
    let mut relay = rig.relay("", "src");
    migrate(&rig, &mut relay, &listener, "src");
    let (status, said) = relay.ends();
    assert_eq!(status, Some(3), "{said}");
    rig.receive.says("left before it migrated");
}

/// A lack of descriptors here is no fault of the peer.
#[test]
fn a_relay_with_too_few_descriptors_for_its_links_does_not_blame_the_peer() {
    let rig = Rig::new("");
    let until = Instant::now() + WATCHDOG;
    let mut limits = 8..64;
    let mut next = limits.next();
    while let Some(limit) = next {
        let mut relay = rig.relay(&format!("ulimit -n {limit};"), &format!("src{limit}"));
        loop {
            match relay.lines.recv_timeout(WATCHDOG) {
                // So many are enough.
                Ok(line) if line.contains("listening on") => return,
                Ok(line) => relay.said.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("{limit}: {:?}", relay.said),
            }
        }
        let (status, said) = relay.ends();
        assert_eq!(status, Some(1), "{limit}: {said}");
        // The receiver has not noticed yet that the relay before has ended.
        if said.contains("a migration to this target is in progress") {
            assert!(Instant::now() < until, "{limit}: {said}");
            std::thread::sleep(Duration::from_millis(50));
            continue;
        }
        assert!(said.contains("os error 24"), "{limit}: {said}");
        for blame in ["is `platen receive` running", "was lost", "waiting up to"] {
            assert!(!said.contains(blame), "{limit}: {said}");
        }
        next = limits.next();
    }
    panic!("64 descriptors are not enough");
}

#[test]
fn the_keeper_process_shows_its_name() {
    let rig = Rig::new("");
    let mut relay = rig.relay("", "src");
    relay.says("listening on");
    let id = relay.child.id();
    let children =
        std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    let keeper = children.split_whitespace().next().expect("a keeper").to_string();
    let shown = |file: &str| std::fs::read_to_string(format!("/proc/{keeper}/{file}")).unwrap();
    assert_eq!(shown("cmdline"), "platen\0keep\0");
    // It names itself as it begins.
    let until = Instant::now() + WATCHDOG;
    while shown("comm") != "platen\n" {
        assert!(Instant::now() < until, "{}", shown("comm"));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A VM in postcopy would wait for its pages meanwhile, and be paused for good. At the end of its
/// terminal a relay in doubt would let the source VM continue beside the destination's.
#[test]
fn a_terminal_stops_neither_relay() {
    let rig = Rig::new("");
    let mut relay = rig.relay("", "src");
    relay.says("listening on");
    for process in [&rig.receive.child, &relay.child] {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        let blocked = u64::from_str_radix(blocked.trim(), 16).unwrap();
        for signal in [Signal::TSTP, Signal::TTIN, Signal::TTOU, Signal::HUP] {
            assert_ne!(blocked & (1 << (signal.as_raw() - 1)), 0, "{signal:?}: {blocked:x}");
        }
    }
}

/// `systemctl stop` sends its signal to every process of a unit.
#[test]
fn the_keeper_ignores_signals_while_its_relay_lives() {
    let (control, theirs) = UnixStream::pair().unwrap();
    let (qemu, relay) = UnixStream::pair().unwrap();
    let mut keeper = Command::new(env!("CARGO_BIN_EXE_platen"))
        .arg("keep")
        .stdin(OwnedFd::from(theirs))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // "Hold this", in no postcopy.
    let fds = [relay.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut descriptor = SendAncillaryBuffer::new(&mut space);
    assert!(descriptor.push(SendAncillaryMessage::ScmRights(&fds)));
    let message = [&[1][..], &u64::MAX.to_be_bytes()].concat();
    let parts = [IoSlice::new(&message)];
    sendmsg(&control, &parts, &mut descriptor, SendFlags::NOSIGNAL).unwrap();
    let pid = Pid::from_child(&keeper);
    let status = |name: &str| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
        let status = status.unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    };
    let until = Instant::now() + WATCHDOG;
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let bit = 1 << (signal.as_raw() - 1);
        while status("SigBlk:") & bit == 0 {
            assert!(Instant::now() < until, "{signal:?} would end it");
            std::thread::sleep(Duration::from_millis(10));
        }
        kill_process(pid, signal).unwrap();
        assert!(status("ShdPnd:") & bit != 0);
    }
    // The relay is killed: the keeper holds QEMU's connection.
    drop((control, relay));
    let mut said = String::new();
    BufReader::new(keeper.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains("the source relay was killed"), "{said}");
    assert!(keeper.try_wait().unwrap().is_none());
    // From here on a person may end it.
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(keeper.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
    drop(qemu);
}

/// A receiver that dies while the relay waits for its migration is connected to again.
#[test]
fn an_idle_relay_outlives_its_receiver() {
    let mut rig = Rig::new("");
    let mut relay = rig.relay("", "src");
    relay.says("listening on");
    rig.receive.child.kill().unwrap();
    rig.receive.child.wait().unwrap();
    relay.says("waiting up to");
    let deliver = unix(&rig.at("dst"));
    let mut second = Platen::start(
        "",
        &["receive", "--insecure", "--listen", &rig.address, "--deliver", &deliver, "--once"],
    );
    second.says("listening on");
    relay.says("connected to");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut source = UnixStream::connect(rig.at("src")).unwrap();
    source.write_all(STREAM).unwrap();
    drop(source);
    let (mut destination, _) = listener.accept().unwrap();
    let mut got = vec![0; STREAM.len()];
    destination.read_exact(&mut got).unwrap();
    drop(destination);
    assert_eq!(relay.ends().0, Some(3));
    assert_eq!(second.ends().0, Some(3));
}
