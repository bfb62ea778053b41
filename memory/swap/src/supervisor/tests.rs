use super::*;
use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

#[test]
fn pauses_grow_and_end_and_a_steady_server_starts_them_anew() {
    let mut backoff = Backoff::default();
    let short = Duration::from_secs(1);
    let pauses: Vec<_> = (0..9).map(|_| backoff.died(short)).collect();
    assert_eq!(pauses[0], Some(Duration::ZERO));
    assert_eq!(pauses[1], Some(Duration::from_millis(50)));
    assert_eq!(pauses[7], Some(Duration::from_millis(3200)));
    assert_eq!(pauses[8], None);
    assert_eq!(backoff.died(Duration::from_secs(31)), Some(Duration::ZERO));
}

/// A service of shell scripts, which write what they do to a file.
struct Shell {
    script: String,
    standby: Option<String>,
    up: Option<String>,
    down: Option<String>,
    train: Option<(String, Duration)>,
    ready_limit: Duration,
    end_limit: Duration,
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
            log,
            folder,
        }
    }

    fn note(&self) -> PathBuf {
        self.folder.path().join("note")
    }

    fn sh(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("NOTE", self.note());
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
    fn said(&mut self, line: &str) {
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
    fn train(&mut self) -> Option<(Command, Duration)> {
        self.train.as_ref().map(|(script, limit)| (self.sh(script), *limit))
    }
    fn abandon(&mut self) {
        self.log.borrow_mut().push("abandoned".into());
    }
    fn say(&self, line: &str) {
        self.log.borrow_mut().push(line.into());
    }
}

/// Runs it, and asks it to end when the file has `text`.
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
fn a_server_comes_up_and_is_told_to_end() {
    let mut shell = Shell::new(SERVER);
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\nend\n");
    assert_eq!(*shell.log.borrow(), ["said device 7", "up false"]);
}

#[test]
fn a_server_that_is_killed_is_replaced_and_told_so() {
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
fn the_one_that_stands_by_goes_when_the_server_dies_and_another_takes_its_place() {
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

#[test]
fn servers_that_die_again_and_again_are_given_up() {
    let mut shell = Shell::new("echo ready >&0; echo up >> $NOTE; exit 1");
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::GaveUp { crashes: 8, .. }), "{error}");
    // The first, and one for each crash but the last.
    assert_eq!(shell.noted().lines().count(), 9);
    assert_eq!(shell.log.borrow().last().unwrap(), "abandoned");
}

#[test]
fn the_end_waits_for_the_helper_and_is_put_off_when_that_fails() {
    let mut shell = Shell::new(SERVER);
    shell.down = Some("echo down >> $NOTE".into());
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\ndown\nend\n");

    // The first attempt fails; the second, by somebody who asks again, does not.
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
        // Again and again: who asks before the first attempt has failed asks for nothing.
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
fn what_follows_a_later_start_is_tried_again_and_does_not_wait_for_the_end() {
    // A swapoff that reads from a disk without a server ends when the disk has been given the next one.
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
    // Asked at any moment after "up" was noted, also before that is known to have succeeded.
    run(&mut shell, "up\n").unwrap();
    assert_eq!(shell.noted(), "up\ndown\nfailed\nagain\nend\n");
}

#[test]
fn servers_that_the_kernel_s_client_has_left_are_replaced_however_many() {
    let mut shell = Shell::new(&format!(
        "echo ready >&0; echo x >> $NOTE; if [ $(wc -l < $NOTE) -lt 12 ]; then exit {CLIENT_LOST}; fi; \
         echo steady >> $NOTE; read line",
    ));
    run(&mut shell, "steady").unwrap();
    assert_eq!(shell.noted().matches('x').count(), 12);
}

#[test]
fn a_trainer_that_hangs_or_dies_or_is_asked_for_again_harms_nobody() {
    // Killed at its limit, replaced by the next, and gone with the server.
    let mut shell = Shell::new(
        "printf 'ready\\ntrain\\n' >&0; until grep -q began $NOTE; do sleep 0.01; done; \
         echo train >&0; until [ $(grep -c began $NOTE) = 2 ]; do sleep 0.01; done; \
         echo both >> $NOTE; read line; echo $line >> $NOTE",
    );
    shell.train = Some(("echo began >> $NOTE; exec sleep 1000".into(), Duration::from_secs(500)));
    let begun = Instant::now();
    run(&mut shell, "both").unwrap();
    assert_eq!(shell.noted(), "began\nbegan\nboth\nend\n");
    // One past its limit is killed, and may be started again; one that cannot be started is said.
    let mut shell = Shell::new(
        "echo ready >&0; echo train >&0; until grep -q began $NOTE; do sleep 0.01; done; \
         PID=$(sed -n 's/began //p' $NOTE); \
         while kill -0 $PID 2> /dev/null; do sleep 0.01; done; echo killed >> $NOTE; \
         read line; echo $line >> $NOTE",
    );
    shell.train = Some(("echo began $$ >> $NOTE; exec sleep 1000".into(), Duration::from_secs(2)));
    run(&mut shell, "killed").unwrap();
    assert!(shell.noted().ends_with("killed\nend\n"), "{}", shell.noted());
    assert!(begun.elapsed() < Duration::from_secs(400));
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
fn one_that_stands_by_and_cannot_be_started_is_no_reason_to_end() {
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
fn one_that_stood_by_and_hangs_when_it_is_needed_is_killed_and_replaced() {
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
    // Counted as one that has died: the second in a row.
    assert!(log.contains("starting another in 50ms"), "{log}");
    let noted = shell.noted();
    let hung = noted.lines().find_map(|line| line.strip_prefix("go there ")).unwrap();
    assert!(!PathBuf::from(format!("/proc/{hung}")).exists(), "{noted}");
    assert!(noted.contains("end\n"), "{noted}");
}

#[test]
fn servers_that_never_get_ready_are_given_up() {
    let mut shell = Shell::new(
        "if [ $REPLACES = false ]; then echo ready >&0; echo up >> $NOTE; exit 1; fi; \
         echo hangs >> $NOTE; exec sleep 1000",
    );
    shell.ready_limit = Duration::from_millis(20);
    let error = run(&mut shell, "never").unwrap_err();
    assert!(matches!(error, SuperviseError::GaveUp { crashes: 8, .. }), "{error}");
    let log = shell.log.borrow();
    assert_eq!(log.iter().filter(|line| line.ends_with("ready: killed")).count(), 8);
    assert_eq!(log.last().unwrap(), "abandoned");
}

#[test]
fn a_server_that_does_not_end_is_killed_and_that_is_said() {
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
