use super::child::receive;
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

/// A service of shell scripts, which record what they do in a file.
struct Shell {
    script: String,
    standby: Option<String>,
    up: Option<String>,
    down: Option<String>,
    train: Option<(String, Duration)>,
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
            ready_limit: Duration::from_secs(60),
            end_limit: Duration::from_secs(60),
            pulse: None,
            resume: None,
            notify: None,
            requests: None,
            successor: String::new(),
            is_connected_later: false,
            no_hand_over: None,
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
        let mut command = self.up.as_ref().map(|script| self.sh(script))?;
        command.env("REPLACES", replaces.to_string());
        Some(command)
    }
    fn down(&mut self) -> Option<Command> {
        self.down.as_ref().map(|script| self.sh(script))
    }
    fn down_limit(&self) -> Duration {
        Duration::from_secs(20)
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
        self.no_hand_over.map_or(Ok(()), |why| Err(io::Error::other(why)))
    }
    fn renewed(&mut self, outcome: Result<(), String>) {
        self.log.borrow_mut().push(format!("renewed {outcome:?}"));
        fs::write(self.folder.path().join("renewed"), "").unwrap();
    }
    fn abandon(&mut self) {
        self.log.borrow_mut().push("abandoned".into());
    }
    fn say(&self, line: &str) {
        self.log.borrow_mut().push(line.into());
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
        let deadline = Instant::now() + Duration::from_secs(60);
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
    let result = supervise(shell, stop.as_fd());
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
    let mut shell = Shell::new(
        "echo ready >&0; echo x >> $NOTE; if [ $(wc -l < $NOTE) -lt 14 ]; then exit 1; fi; \
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
    assert_eq!(shell.noted().matches('x').count(), 14);
    assert!(shell.noted().ends_with("steady\nend\n"), "{}", shell.noted());
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("starting another in 10s") && !log.contains("abandoned"), "{log}");
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
}

/// Starts a request and makes no progress: asleep, or spinning.
const HANGS: &str = "begins_a_request_and_hangs";

#[test]
fn begins_a_request_and_hangs() {
    let Some(how) = std::env::var_os(HANGS) else { return };
    let pulse = Pulse::open(&descriptor(9).unwrap()).unwrap();
    let waits = how == "waits";
    let (begin, begun) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        pulse.slot(5).begin();
        begin.send(()).unwrap();
        match how.to_str() {
            Some("spins") => loop {
                std::hint::spin_loop();
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
}

/// Runs a server that hangs in this way, replaced by one that does not; returns the messages.
fn replaced(first: &str) -> String {
    let mut shell = Shell::new(&format!(
        "if [ $REPLACES = false ]; then {first}; fi; echo ready >&0; echo second >> $NOTE; read line"
    ));
    let pulse = Pulse::file().unwrap();
    shell.pulse = Some((Pulse::open(&pulse).unwrap(), pulse));
    let start = Instant::now();
    run(&mut shell, "second").unwrap();
    println!("replaced after {:?}", start.elapsed());
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("the server hangs: ") && log.contains("(signal: 9"), "{log}");
    log
}

#[test]
fn a_server_that_is_stopped_is_killed_and_replaced() {
    let log = replaced("echo ready >&0; kill -STOP $$");
    assert!(log.contains("it has been stopped (SIGSTOP)"), "{log}");
}

#[test]
fn a_server_with_a_thread_that_sleeps_in_a_request_is_killed_and_replaced() {
    let log = replaced(&format!("export {HANGS}=sleeps; exec $HANG"));
    assert!(log.contains("sleeps in a request, and nothing wakes it"), "{log}");
}

#[test]
fn a_server_with_a_thread_that_spins_is_killed_and_replaced() {
    let log = replaced(&format!("export {HANGS}=spins; exec $HANG"));
    assert!(log.contains("over one page"), "{log}");
}

/// The disk may be slow: a thread that waits for it does not count as hung.
#[test]
fn a_server_that_waits_for_a_disk_is_not_killed() {
    let mut shell = Shell::new(&format!("export {HANGS}=waits; exec $HANG"));
    shell.up = Some("sleep 12; echo still >> $NOTE".into());
    let pulse = Pulse::file().unwrap();
    shell.pulse = Some((Pulse::open(&pulse).unwrap(), pulse));
    run(&mut shell, "still").unwrap();
    assert!(!shell.log.borrow().iter().any(|line| line.contains("hangs")), "{:?}", shell.log);
}

/// A killed helper after the first start may have done its work.
#[test]
fn the_helper_of_the_first_start_has_a_limit_and_its_failure_ends_the_device() {
    let mut shell = Shell::new(SERVER);
    shell.up = Some("echo begun >> $NOTE; exec sleep 1000".into());
    shell.down = Some("echo down >> $NOTE".into());
    shell.ready_limit = Duration::from_millis(500);
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::Up(_)), "{error}");
    let noted = shell.noted();
    assert!(noted.contains("begun") && noted.ends_with("down\nend\n"), "{noted}");
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("has not ended in 500ms: killed"), "{log}");
}

#[test]
fn a_service_manager_gets_ready_and_watchdog_messages() {
    let mut shell = Shell::new(SERVER);
    let path = shell.folder.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    shell.notify = Some(path.to_str().unwrap().to_owned());
    shell.up = Some("sleep 3".into());
    let note = shell.note();
    let hearing = std::thread::spawn(move || {
        let mut heard = Vec::new();
        let mut bytes = [0; 256];
        while heard.last().is_none_or(|last| last != "STOPPING=1") {
            let got = manager.recv(&mut bytes).unwrap();
            heard.push(String::from_utf8_lossy(&bytes[..got]).into_owned());
            if heard.last().is_some_and(|last| last == "READY=1") {
                // Only then the end is asked for.
                fs::write(&note, "ready").unwrap();
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

#[test]
fn the_end_waits_for_the_helper_and_is_postponed_when_it_fails() {
    let mut shell = Shell::new(SERVER);
    shell.down = Some("echo down >> $NOTE".into());
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\ndown\nend\n");

    // The first attempt fails; the second one, after another request, succeeds.
    let mut shell = Shell::new(SERVER);
    shell.down =
        Some("if grep -q tried $NOTE; then exit 0; fi; echo tried >> $NOTE; exit 9".into());
    let (stop, ask) = UnixStream::pair().unwrap();
    stop.set_nonblocking(true).unwrap();
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        let deadline = Instant::now() + Duration::from_secs(60);
        let noted = |text| fs::read_to_string(&note).unwrap_or_default().contains(text);
        while !noted("up") {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
        // Repeatedly, because a request before the first attempt has failed has no effect.
        while !noted("end") {
            assert!(Instant::now() < deadline);
            (&ask).write_all(b"x").unwrap();
            std::thread::sleep(Duration::from_millis(50));
        }
        ask
    });
    supervise(&mut shell, stop.as_fd()).unwrap();
    asking.join().unwrap();
    assert_eq!(shell.noted(), "up\ntried\nend\n");
    assert!(shell.log.borrow().iter().any(|line| line.contains("serving goes on")));
}

#[test]
fn the_helper_of_a_later_start_is_tried_again_and_delays_no_end() {
    // A swapoff that reads from a disk without a server ends once the disk has its next server.
    let mut shell = Shell::new(
        "echo ready >&0; \
         if [ $REPLACES = false ]; then until grep -q down $NOTE; do sleep 0.01; done; kill -9 $$; fi; \
         read line; echo $line >> $NOTE",
    );
    shell.up = Some(
        "if [ $REPLACES = false ]; then echo up >> $NOTE; exit 0; fi; \
         if grep -q failed $NOTE; then echo again >> $NOTE; exit 0; fi; echo failed >> $NOTE; exit 1"
            .into(),
    );
    shell.down = Some("echo down >> $NOTE; until grep -q again $NOTE; do sleep 0.01; done".into());
    // Requested at any moment after "up" was recorded, also before that is known to have succeeded.
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\ndown\nfailed\nagain\nend\n");
}

#[test]
fn servers_without_the_kernel_s_client_are_replaced_however_many() {
    let mut shell = Shell::new(&format!(
        "echo ready >&0; echo x >> $NOTE; if [ $(wc -l < $NOTE) -lt 12 ]; then exit {CLIENT_LOST}; fi; \
         echo steady >> $NOTE; read line",
    ));
    run(&mut shell, "steady").unwrap();
    assert_eq!(shell.noted().matches('x').count(), 12);
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
        end.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut said = String::new();
        io::Read::read_to_string(end, &mut said).unwrap();
        assert_eq!(said, expected);
    }
    let (got, sent) = receive(&ours, &mut bytes).unwrap();
    assert!(got == 2 && sent.is_none());
    drop(server);
    // A process that another test is just starting has a copy of the other end until it begins.
    let deadline = Instant::now() + Duration::from_secs(120);
    while !matches!(receive(&ours, &mut bytes), Ok((0, None))) {
        assert!(Instant::now() < deadline, "the other end is not closed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Records its process id, and whether an earlier trainer still runs.
const TRAINER: &str = "for other in $(sed -n 's/began //p' $NOTE); do \
     kill -0 $other 2> /dev/null && echo together >> $NOTE; done; echo began $$ >> $NOTE; exec sleep 1000";

/// Asks for a trainer, by a script, and waits for the beginning of the `nth`.
fn asked(nth: u32) -> String {
    format!("$ASK > /dev/null 2>&1; until [ \"$(grep -c began $NOTE)\" = {nth} ]; do sleep 0.01; done; ")
}

/// Waits, by a script, until the first trainer has ended.
const ENDED: &str =
    "while kill -0 $(sed -n 's/began //p' $NOTE | head -1) 2> /dev/null; do sleep 0.01; done; ";

#[test]
fn a_trainer_that_hangs_is_killed_and_at_most_one_trainer_runs() {
    let begun = Instant::now();
    let long = Duration::from_secs(500);
    // Replaced by the next, and gone with the server. Without a descriptor there is none.
    let mut shell = Shell::new(&format!(
        "touch $NOTE; printf 'ready\\ntrain\\n' >&0; {}{}echo both >> $NOTE; read line; echo $line >> $NOTE",
        asked(1),
        asked(2)
    ));
    shell.train = Some((TRAINER.into(), long));
    run(&mut shell, "both").unwrap();
    let noted = shell.noted();
    assert_eq!(noted.matches("began").count(), 2, "{noted}");
    assert!(noted.ends_with("both\nend\n") && !noted.contains("together"), "{noted}");
    // Killed at its time limit; or when the server no longer needs it.
    for (limit, enough) in [(Duration::from_secs(2), ""), (long, "echo enough >&0; ")] {
        let mut shell = Shell::new(&format!(
            "touch $NOTE; echo ready >&0; {}{enough}{ENDED}echo killed >> $NOTE; read line; echo $line >> $NOTE",
            asked(1)
        ));
        shell.train = Some((TRAINER.into(), limit));
        run(&mut shell, "killed").unwrap();
        assert!(shell.noted().ends_with("killed\nend\n"), "{}", shell.noted());
        let log = shell.log.borrow();
        assert!(!log.iter().any(|line| line.contains("trainer")), "it is as was wished: {log:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(400));
}

#[test]
fn a_trainer_ends_with_the_server_that_asked_for_it() {
    let mut shell = Shell::new(&format!(
        "touch $NOTE; echo ready >&0; if [ $REPLACES = false ]; then {}kill -9 $$; fi; \
         {ENDED}echo killed >> $NOTE; {}echo again >> $NOTE; read line; echo $line >> $NOTE",
        asked(1),
        asked(2)
    ));
    shell.train = Some((TRAINER.into(), Duration::from_secs(500)));
    run(&mut shell, "again").unwrap();
    let noted = shell.noted();
    assert!(noted.ends_with("again\nend\n") && !noted.contains("together"), "{noted}");
}

#[test]
fn a_trainer_that_fails_is_reported_and_does_not_end_the_device() {
    let mut shell = Shell::new(&format!(
        "touch $NOTE; echo ready >&0; {}echo on >> $NOTE; read line; echo $line >> $NOTE",
        asked(1)
    ));
    shell.train = Some(("echo began $$ >> $NOTE; exit 7".into(), Duration::from_secs(500)));
    let up = "until grep -q on $NOTE; do sleep 0.01; done; sleep 0.2; echo seen >> $NOTE";
    shell.up = Some(up.into());
    run(&mut shell, "seen").unwrap();
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("a trainer has ended with exit status: 7"), "{log}");
    assert!(shell.noted().ends_with("end\n"), "{}", shell.noted());
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

#[test]
fn a_start_whose_helper_fails_ends_the_server() {
    let mut shell = Shell::new(SERVER);
    shell.up = Some("exit 5".into());
    let error = run(&mut shell, "never-mind").unwrap_err();
    assert!(matches!(error, SuperviseError::Up(status) if status.code() == Some(5)), "{error}");
    assert!(shell.noted().ends_with("end\n"), "{}", shell.noted());
}

#[test]
fn a_standby_that_hangs_when_it_is_needed_is_killed_and_replaced() {
    let mut shell = Shell::new(
        "if [ $REPLACES = false ]; then echo ready >&0; \
           until grep -q standing $NOTE; do sleep 0.01; done; kill -9 $$; fi; \
         echo fresh >> $NOTE; echo ready >&0; read line; echo $line >> $NOTE",
    );
    shell.standby = Some(
        "echo standing >> $NOTE; read line; \
         if [ \"$line\" ]; then echo $line $$ >> $NOTE; exec sleep 1000; fi"
            .into(),
    );
    shell.ready_limit = Duration::from_secs(2);
    run(&mut shell, "fresh").unwrap();
    let log = shell.log.borrow().join("\n");
    assert!(log.contains("\nthe server does not get ready: killed\n"), "{log}");
    // Counted as a death: the second in a row.
    assert!(log.contains("starting another in 50ms"), "{log}");
    let noted = shell.noted();
    let hung = noted.lines().find_map(|line| line.strip_prefix("go there ")).unwrap();
    assert!(!PathBuf::from(format!("/proc/{hung}")).exists(), "{noted}");
    assert!(noted.contains("end\n"), "{noted}");
}

#[test]
fn servers_that_do_not_get_ready_are_replaced_until_one_does() {
    let mut shell = Shell::new(
        "if [ $REPLACES = false ]; then echo ready >&0; echo up >> $NOTE; exit 1; fi; \
         echo x >> $NOTE; if [ $(grep -c x $NOTE) -lt 5 ]; then exec sleep 1000; fi; \
         echo ready >&0; echo steady >> $NOTE; read line",
    );
    shell.ready_limit = Duration::from_millis(100);
    run(&mut shell, "steady").unwrap();
    let log = shell.log.borrow();
    assert!(log.iter().filter(|line| line.ends_with("ready: killed")).count() >= 4, "{log:?}");
}

#[test]
fn a_server_that_does_not_end_is_killed_and_the_kill_reported() {
    let mut shell = Shell::new(
        "echo ready >&0; echo up $$ >> $NOTE; read line; echo $line >> $NOTE; exec sleep 1000",
    );
    shell.down = Some("echo down >> $NOTE".into());
    shell.end_limit = Duration::from_millis(500);
    let error = run(&mut shell, "up").unwrap_err();
    assert!(matches!(error, SuperviseError::Stuck { gone: true, .. }), "{error}");
    let noted = shell.noted();
    assert!(noted.ends_with("down\nend\n"), "{noted}");
    let pid = noted.lines().find_map(|line| line.strip_prefix("up ")).unwrap();
    assert!(!PathBuf::from(format!("/proc/{pid}")).exists(), "{noted}");
    let log = shell.log.borrow();
    assert_eq!(log[log.len() - 2..], ["the server has not ended in 500ms: killed", "abandoned"]);
}

/// Runs a server that notes `up`, requests a successor then, and stops all when `text` is noted.
fn renew(shell: &mut Shell, text: &'static str) -> (String, String) {
    let (requests, ask) = UnixStream::pair().unwrap();
    shell.requests = Some(requests);
    let note = shell.note();
    let asking = std::thread::spawn(move || {
        while !fs::read_to_string(&note).unwrap_or_default().contains("up\n") {
            std::thread::sleep(Duration::from_millis(5));
        }
        (&ask).write_all(b"x").unwrap();
        ask
    });
    run(shell, text).unwrap();
    asking.join().unwrap();
    let log = shell.log.borrow().join("\n");
    (shell.noted(), log)
}

const PRESENT: &str =
    "if [ $REPLACES = true ]; then echo another >> $NOTE; fi; echo ready >&0; echo up >> $NOTE; \
     read line; echo present $line >> $NOTE";

/// The present server is killed, and the new one serves.
#[test]
fn a_successor_that_stands_by_takes_the_place_of_the_server() {
    let mut shell = Shell::new(PRESENT);
    shell.successor = "echo stands by >&0; read line; echo $line >> $NOTE; echo ready >&0; \
                       until [ -e ${NOTE%note}renewed ]; do sleep 0.01; done; \
                       echo serves >> $NOTE; read line; echo $line >> $NOTE"
        .into();
    let (noted, log) = renew(&mut shell, "serves");
    assert_eq!(noted, "up\ngo there\nserves\nend\n");
    assert!(log.contains("renewed Ok(())") && !log.contains("has died"), "{log}");
}

/// By the kernel's NBD client a server that is ready has no requests yet.
#[test]
fn a_request_for_another_server_ends_when_requests_reach_it() {
    for (word, outcome) in [
        ("connected", "renewed Ok(())"),
        ("unconnected", "renewed Err(\"the kernel's NBD client has taken no connection"),
    ] {
        let mut shell = Shell::new(PRESENT);
        shell.is_connected_later = true;
        // The line "device 9" shows that the supervisor has read "ready" before the word.
        shell.successor = format!(
            "echo stands by >&0; read line; echo ready >&0; echo device 9 >&0; \
             echo {word} >&0; until [ -e ${{NOTE%note}}renewed ]; do sleep 0.01; done; \
             echo serves >> $NOTE; read line"
        );
        let (_, log) = renew(&mut shell, "serves");
        let at = |text: &str| log.find(text).unwrap_or_else(|| panic!("no {text} in {log}"));
        assert!(at("up true") < at("said device 9") && at("said device 9") < at(outcome), "{log}");
        assert_eq!(log.matches("renewed").count(), 1, "{log}");
    }
    // It dies before: the request has failed, and another server starts.
    let mut shell = Shell::new(PRESENT);
    shell.is_connected_later = true;
    shell.successor = "echo stands by >&0; read line; echo ready >&0; exit 7".into();
    let (_, log) = renew(&mut shell, "another\nup\n");
    assert!(log.contains("renewed Err(\"the new server has died (exit status: 7)"), "{log}");
}

/// The present server continues, and does not notice the other one.
#[test]
fn a_successor_that_fails_before_its_takeover_changes_nothing() {
    let stands_by = "echo stands by >&0; read line; echo wrong $line >> $NOTE";
    for (successor, no_hand_over, why) in [
        ("exit 3", None, "the new server ended with exit status: 3"),
        ("exec sleep 1000", None, "the new server did not get its memory in"),
        (stands_by, Some("no such program"), "no such program"),
    ] {
        let mut shell = Shell::new(
            "echo ready >&0; echo up >> $NOTE; until [ -e ${NOTE%note}renewed ]; do sleep 0.01; \
             done; echo over >> $NOTE; read line; echo $line >> $NOTE",
        );
        shell.ready_limit = Duration::from_secs(1);
        (shell.successor, shell.no_hand_over) = (successor.into(), no_hand_over);
        let (noted, log) = renew(&mut shell, "over");
        assert_eq!(noted, "up\nover\nend\n", "{log}");
        assert!(log.contains(&format!("renewed Err(\"{why}")), "{log}");
    }
}

/// Either server dies at that moment: another server starts, which knows of no request.
#[test]
fn a_server_that_dies_during_its_replacement_is_replaced() {
    // The present server dies while the successor allocates its memory.
    let mut shell = Shell::new(
        "echo ready >&0; echo up >> $NOTE; if [ $REPLACES = true ]; then echo another >> $NOTE; \
         read line; echo $line >> $NOTE; else until grep -q begun $NOTE; do sleep 0.01; done; \
         exit 5; fi",
    );
    shell.successor = "echo begun >> $NOTE; read line; echo wrong >> $NOTE".into();
    let (noted, log) = renew(&mut shell, "another");
    assert_eq!(noted, "up\nbegun\nup\nanother\nend\n", "{log}");
    assert!(log.contains("renewed Err(\"the present server has died"), "{log}");
    // The new server dies after "go".
    let mut shell = Shell::new(PRESENT);
    shell.successor = "echo stands by >&0; read line; echo $line >> $NOTE; exit 7".into();
    let (noted, log) = renew(&mut shell, "another\nup\n");
    assert_eq!(noted, "up\ngo there\nanother\nup\npresent end\n", "{log}");
    assert!(log.contains("renewed Err(\"the new server has died (exit status: 7)"), "{log}");
}
