mod deaths;
mod helpers;
mod hung_helpers;
mod oom;
mod patience;
mod renewal;
mod trainers;

use super::child::receive;
use super::oom::OomKills;
use super::*;
use pulse::Pulse;
use rustix::cmsg_space;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::cell::RefCell;
use std::fs;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn pauses_grow_to_10_s_and_a_steady_server_resets_them() {
    let mut backoff = Backoff::default();
    let short = Duration::from_secs(1);
    let pauses: Vec<_> = (0..100).map(|_| backoff.died(short)).collect();
    assert_eq!(pauses[0], Duration::ZERO);
    assert_eq!(pauses[1], Duration::from_millis(50));
    assert_eq!(pauses[7], Duration::from_millis(3200));
    assert_eq!(pauses[8], Duration::from_millis(6400));
    assert!(pauses[9..].iter().all(|pause| *pause == Duration::from_secs(10)));
    // Killed every 31 s, including the pause.
    assert_eq!(backoff.died(Duration::from_secs(21)), Duration::ZERO);
    assert_eq!(backoff.died(short), Duration::from_millis(50));
}

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);

/// The end of the report of a pause that grows no more.
const LONG_PAUSE: &str = "starting another in 10s";

/// A service of shell scripts, which record what they do in a file.
struct Shell {
    script: String,
    standby: Option<String>,
    up: Option<String>,
    down: Option<String>,
    train: Option<(String, Duration)>,
    down_limit: Duration,
    ready_limit: Duration,
    end_limit: Duration,
    pulse: Option<(Pulse, OwnedFd)>,
    resume: Option<UnixStream>,
    notify: Option<String>,
    /// Receives requests; each starts `successor`.
    requests: Option<UnixStream>,
    successor: String,
    is_connected_later: bool,
    /// The error of `hand_over`.
    no_hand_over: Option<&'static str>,
    /// `hand_over` refuses a successor that does not announce that it names its disk.
    is_named: bool,
    /// The OOM kills that the supervisor sees in place of its own cgroup's.
    kills: Option<OomKills>,
    log: RefCell<Vec<String>>,
    folder: tempfile::TempDir,
}

impl Shell {
    fn new(script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = RefCell::new(Vec::new());
        Self {
            script: script.into(),
            standby: None,
            up: None,
            down: None,
            train: None,
            down_limit: LONG,
            ready_limit: LONG,
            end_limit: LONG,
            pulse: None,
            resume: None,
            notify: None,
            requests: None,
            successor: String::new(),
            is_connected_later: false,
            no_hand_over: None,
            is_named: false,
            kills: None,
            log,
            folder,
        }
    }

    fn note(&self) -> PathBuf {
        self.folder.path().join("note")
    }

    fn sh(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        // A shell cannot send a descriptor, so this program sends it.
        let ask = std::env::current_exe().unwrap().display().to_string();
        let ask = format!("{ask} --exact supervisor::tests::{ASKS} --nocapture");
        let hang = std::env::current_exe().unwrap().display().to_string();
        let hang = format!("{hang} --exact supervisor::tests::{HANGS} --nocapture");
        let pulse = self.pulse.as_ref().map(|(_, file)| {
            let file = file.try_clone().unwrap();
            rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
            file
        });
        // Passed as descriptor 9; ours is closed once the shell has it.
        let number = pulse.as_ref().map(std::os::fd::AsRawFd::as_raw_fd);
        let script =
            number.map_or(script.to_owned(), |n| format!("exec 9<>/proc/self/fd/{n}; {script}"));
        std::mem::forget(pulse);
        command.args(["-c", &script]).env("NOTE", self.note()).env("ASK", ask).env(ASKS, "1");
        command.env("HANG", hang);
        command
    }

    fn noted(&self) -> String {
        fs::read_to_string(self.note()).unwrap_or_default()
    }
}

impl Service for Shell {
    fn server(&mut self, replaces: bool) -> Command {
        let mut command = self.sh(&self.script);
        command.env("REPLACES", replaces.to_string());
        command
    }
    fn standby(&mut self) -> Option<Command> {
        match self.standby.as_deref() {
            Some("cannot be started") => Some(Command::new("/nowhere/at/all")),
            script => script.map(|script| self.sh(script)),
        }
    }
    fn go(&self) -> String {
        "there".into()
    }
    fn handle_line(&mut self, line: &str) {
        self.log.borrow_mut().push(format!("said {line}"));
    }
    fn up(&mut self, replaces: bool, _: u32) -> Option<Command> {
        self.log.borrow_mut().push(format!("up {replaces}"));
        if replaces {
            fs::write(self.folder.path().join("replaced"), "").unwrap();
        }
        if self.up.as_deref() == Some("cannot be started") {
            return Some(Command::new("/nowhere/at/all"));
        }
        let mut command = self.up.as_ref().map(|script| self.sh(script))?;
        command.env("REPLACES", replaces.to_string());
        Some(command)
    }
    fn down(&mut self) -> Option<Command> {
        let command = self.down.as_ref().map(|script| self.sh(script))?;
        self.log.borrow_mut().push("down".into());
        Some(command)
    }
    fn down_limit(&self) -> Duration {
        self.down_limit
    }
    fn ready_limit(&self) -> Duration {
        self.ready_limit
    }
    fn end_limit(&self) -> Duration {
        self.end_limit
    }
    fn train(&mut self, _: OwnedFd) -> Option<(Command, Duration)> {
        self.train.as_ref().map(|(script, limit)| (self.sh(script), *limit))
    }
    fn pulse(&self) -> Option<&Pulse> {
        self.pulse.as_ref().map(|(pulse, _)| pulse)
    }
    fn has_hung(&mut self, slot: usize) {
        self.log.borrow_mut().push(format!("hung: slot {slot}"));
    }
    fn resume(&self) -> Option<BorrowedFd<'_>> {
        self.resume.as_ref().map(AsFd::as_fd)
    }
    fn notify_socket(&self) -> Option<String> {
        self.notify.clone()
    }
    fn manager_watches(&self) -> bool {
        self.notify.is_some()
    }
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        self.requests.as_ref().map(AsFd::as_fd)
    }
    fn request(&mut self, server: Result<BorrowedFd<'_>, &str>) -> Option<Command> {
        self.requests.as_ref().unwrap().read_exact(&mut [0]).unwrap();
        if let Err(why) = server {
            self.log.borrow_mut().push(format!("busy: {why}"));
            return None;
        }
        Some(self.sh(&self.successor))
    }
    fn is_connected_later(&self) -> bool {
        self.is_connected_later
    }
    fn hand_over(&mut self, state: &HandOver<'_>) -> io::Result<()> {
        assert_ne!(state.server.pid, state.successor.pid);
        if self.is_named && !state.names_disk {
            return Err(io::Error::other("it names no disk"));
        }
        self.no_hand_over.map_or(Ok(()), |why| Err(io::Error::other(why)))
    }
    fn renewed(&mut self, outcome: Result<(), String>) {
        self.log.borrow_mut().push(format!("renewed {outcome:?}"));
        fs::write(self.folder.path().join("renewed"), "").unwrap();
    }
    fn up_runs(&mut self, helper: u32) {
        assert!(fs::exists(format!("/proc/{helper}")).unwrap());
        self.log.borrow_mut().push("up runs".into());
    }
    fn abandon(&mut self, set_up: bool) {
        let what = if set_up { "abandoned with its disk" } else { "abandoned" };
        self.log.borrow_mut().push(what.into());
    }
    fn say(&self, line: &str) {
        let mut log = self.log.borrow_mut();
        log.push(line.into());
        if log.iter().filter(|line| line.ends_with(LONG_PAUSE)).count() == 4 {
            fs::write(self.folder.path().join("note.paused"), "").unwrap();
        }
        if line.starts_with("a trainer has ended") {
            fs::write(self.folder.path().join("note.reaped"), "").unwrap();
        }
        if line.contains("but works on it") {
            fs::write(self.folder.path().join("note.works"), "").unwrap();
        }
    }
}

/// Runs the service, and stops it when the file has `text`.
fn run(shell: &mut Shell, text: &'static str) -> Result<(), SuperviseError> {
    let (stop, ask) = UnixStream::pair().unwrap();
    stop.set_nonblocking(true).unwrap();
    let note = shell.note();
    let over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&over);
    let asking = std::thread::spawn(move || {
        let deadline = Instant::now() + LONG;
        while Instant::now() < deadline && !seen.load(Ordering::Acquire) {
            if fs::read_to_string(&note).unwrap_or_default().contains(text) {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // The supervisor may have ended by itself.
        let _ = (&ask).write_all(b"x");
        ask
    });
    let kills = shell.kills.take();
    let mut supervisor = run::Supervisor::new(shell);
    if let Some(kills) = kills {
        supervisor.oom = kills;
    }
    let result = supervisor.run(stop.as_fd());
    over.store(true, Ordering::Release);
    asking.join().unwrap();
    result
}

const SERVER: &str =
    "echo device 7 >&0; echo ready >&0; echo up >> $NOTE; read line; echo $line >> $NOTE";

#[test]
fn a_server_starts_and_ends_on_request() {
    let mut shell = Shell::new(SERVER);
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\nend\n");
    assert_eq!(*shell.log.borrow(), ["said device 7", "up false"]);
}

#[test]
fn a_killed_server_is_replaced_and_its_successor_informed() {
    let mut shell = Shell::new(
        "echo ready >&0; if [ $REPLACES = false ]; then sleep 0.1; kill -9 $$; fi; \
         echo second >> $NOTE; read line",
    );
    run(&mut shell, "second").unwrap();
    let log = shell.log.borrow().join("\n");
    assert!(log.starts_with("up false\nthe server has died (signal: 9"), "{log}");
    assert!(log.ends_with("starting another\nup true"), "{log}");
}

#[test]
fn a_standby_takes_over_when_the_server_dies_and_another_standby_starts() {
    let mut shell = Shell::new(
        "echo server >> $NOTE; echo ready >&0; \
         until grep -q standing $NOTE; do sleep 0.01; done; kill -9 $$",
    );
    shell.standby = Some(
        "echo standing >> $NOTE; read line; echo $line >> $NOTE; echo ready >&0; \
         until [ $(grep -c standing $NOTE) = 2 ]; do sleep 0.01; done; echo both >> $NOTE; \
         read line; echo $line >> $NOTE"
            .into(),
    );
    run(&mut shell, "both").unwrap();
    let noted = shell.noted();
    assert_eq!(noted, "server\nstanding\ngo there\nstanding\nboth\nend\n");
}

#[test]
fn a_server_that_never_starts_is_an_error_at_once() {
    let mut shell = Shell::new("exit 3");
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::Start(status) if status.code() == Some(3)), "{error}");
}

/// Regression: nine deaths once gave up an intact store.
#[test]
fn servers_that_die_repeatedly_are_replaced_without_end() {
    // A server that gets no CPU for long may count as a steady one, and begin the series again.
    let mut shell = Shell::new(
        "echo ready >&0; echo x >> $NOTE; if ! [ -e $NOTE.paused ]; then exit 1; fi; \
         echo steady >> $NOTE; read line; echo $line >> $NOTE",
    );
    // A user resumes it repeatedly, or this would take a minute.
    let (resume, ask) = UnixStream::pair().unwrap();
    resume.set_nonblocking(true).unwrap();
    shell.resume = Some(resume);
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        while !fs::read_to_string(&note).unwrap_or_default().contains("steady") {
            let _ = (&ask).write_all(b"x");
            std::thread::sleep(Duration::from_millis(5));
        }
        ask
    });
    run(&mut shell, "steady").unwrap();
    asking.join().unwrap();
    assert!(shell.noted().matches('x').count() >= 14, "{}", shell.noted());
    assert!(shell.noted().ends_with("steady\nend\n"), "{}", shell.noted());
    let log = shell.log.borrow().join("\n");
    assert!(log.contains(LONG_PAUSE) && !log.contains("abandoned"), "{log}");
}

/// A supervisor that is asked to end during a pause ends the pause, and ends.
#[test]
fn the_end_does_not_wait_for_a_pause() {
    let mut shell = Shell::new(
        "echo ready >&0; echo x >> $NOTE; if [ $(wc -l < $NOTE) -lt 12 ]; then exit 1; fi; read line",
    );
    shell.down = Some("until [ $(grep -c x $NOTE) = 12 ]; do sleep 0.01; done".into());
    run(&mut shell, "x\nx\nx\nx\n").unwrap();
    assert_eq!(shell.noted().matches('x').count(), 12);
    let log = shell.log.borrow();
    let asked = log.iter().position(|line| line == "down").unwrap();
    assert!(log[..asked].iter().any(|line| line.contains("another in")), "{log:?}");
    assert!(!log[asked..].iter().any(|line| line.contains("another in")), "{log:?}");
}

/// Starts a request and makes no progress: asleep, or spinning. Or advances slowly, and ends when
/// the supervisor has seen that.
const HANGS: &str = "begins_a_request_and_hangs";

#[test]
fn begins_a_request_and_hangs() {
    let Some(how) = std::env::var_os(HANGS) else { return };
    let pulse = Pulse::open(&descriptor(9).unwrap()).unwrap();
    let (waits, advances) = (how == "waits", how == "advances");
    let (begin, begun) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        pulse.slot(5).begin();
        begin.send(()).unwrap();
        match how.to_str() {
            Some("spins") => loop {
                std::hint::spin_loop();
            },
            Some("advances") => loop {
                pulse.slot(5).advance();
                std::thread::sleep(Duration::from_millis(200));
            },
            Some("waits") => pulse.slot(5).while_waiting(|| loop {
                std::thread::park();
            }),
            _ => loop {
                std::thread::park();
            },
        }
    });
    begun.recv().unwrap();
    let said = if waits { "waiting\n" } else { "ready\n" };
    let _ = rustix::io::write(rustix::stdio::stdin(), b"ready\n");
    let _ = fs::write(std::env::var_os("NOTE").unwrap(), said);
    let _ = io::Read::read(&mut io::stdin(), &mut [0; 16]);
    let seen = std::env::var("NOTE").unwrap() + ".works";
    while advances && !fs::exists(&seen).unwrap() {
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_service_manager_gets_ready_and_watchdog_messages() {
    let mut shell = Shell::new(SERVER);
    let path = shell.folder.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    shell.notify = Some(path.to_str().unwrap().to_owned());
    // The device is up after the first of the watchdog's messages.
    shell.up = Some("until [ -e ${NOTE%note}watched ]; do sleep 0.05; done".into());
    let (note, watched) = (shell.note(), shell.folder.path().join("watched"));
    let hearing = std::thread::spawn(move || {
        let mut heard = Vec::new();
        let mut bytes = [0; 256];
        while heard.last().is_none_or(|last| last != "STOPPING=1") {
            let got = manager.recv(&mut bytes).unwrap();
            heard.push(String::from_utf8_lossy(&bytes[..got]).into_owned());
            match heard.last().map(String::as_str) {
                Some("WATCHDOG=1") => fs::write(&watched, "").unwrap(),
                // Only then the end is asked for.
                Some("READY=1") => fs::write(&note, "ready").unwrap(),
                _ => {}
            }
        }
        heard
    });
    run(&mut shell, "ready").unwrap();
    let heard = hearing.join().unwrap();
    let at = |what: &str| heard.iter().position(|said| said == what);
    assert!(at("WATCHDOG=1") < at("READY=1") && at("WATCHDOG=1").is_some(), "{heard:?}");
    assert!(at("STOPPING=1") > at("READY=1"), "{heard:?}");
}

/// A test only if run by the test below: it asks for a trainer over standard input, as a server
/// does.
const ASKS: &str = "asks_for_a_trainer";

#[test]
fn asks_for_a_trainer() {
    if std::env::var_os(ASKS).is_some() {
        let (_ours, theirs) = UnixStream::pair().unwrap();
        send(&rustix::stdio::stdin(), b"train\n", &[theirs.as_fd()]);
    }
}

fn send(to: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let sent = sendmsg(to, &[io::IoSlice::new(bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

#[test]
fn a_descriptor_arrives_with_its_line_and_surplus_descriptors_are_closed() {
    let (server, ours) = UnixStream::pair().unwrap();
    let pairs: Vec<_> = (0..3).map(|_| UnixStream::pair().unwrap()).collect();
    let mut bytes = [0; 4];
    assert!(receive(&ours, &mut bytes).is_err(), "nothing is there, and nobody waits");
    {
        let theirs: Vec<_> = pairs.iter().map(|(_, theirs)| theirs.as_fd()).collect();
        send(&server, b"train\n", &theirs);
    }
    let mut kept: Vec<_> = pairs.into_iter().map(|(ours, _)| ours).collect();
    let (got, sent) = receive(&ours, &mut bytes).unwrap();
    assert_eq!((got, bytes), (4, *b"trai"));
    let mut sent = UnixStream::from(sent.expect("it comes with the first byte"));
    sent.write_all(b"x").unwrap();
    drop(sent);
    // The first one got its byte and then the end of the stream; the others were dropped.
    for (end, expected) in kept.iter_mut().zip(["x", "", ""]) {
        end.set_read_timeout(Some(LONG)).unwrap();
        let mut said = String::new();
        io::Read::read_to_string(end, &mut said).unwrap();
        assert_eq!(said, expected);
    }
    let (got, sent) = receive(&ours, &mut bytes).unwrap();
    assert!(got == 2 && sent.is_none());
    drop(server);
    // A process that another test is just starting has a copy of the other end until it begins.
    let deadline = Instant::now() + LONG;
    while !matches!(receive(&ours, &mut bytes), Ok((0, None))) {
        assert!(Instant::now() < deadline, "the other end is not closed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_end_that_is_asked_for_during_the_start_waits_for_it() {
    let mut shell = Shell::new("echo ready >&0; read line; echo $line >> $NOTE");
    shell.up = Some("echo swapping >> $NOTE; sleep 0.5; echo on >> $NOTE".into());
    shell.down = Some("echo off >> $NOTE".into());
    run(&mut shell, "swapping").unwrap();
    assert_eq!(shell.noted(), "swapping\non\noff\nend\n");
}

#[test]
fn a_standby_that_cannot_be_started_does_not_end_the_device() {
    let mut shell = Shell::new(
        "echo ready >&0; if [ $REPLACES = false ]; then sleep 0.1; kill -9 $$; fi; \
         echo second >> $NOTE; read line",
    );
    shell.standby = Some("cannot be started".into());
    run(&mut shell, "second").unwrap();
    assert!(shell.noted().contains("second"));
}
