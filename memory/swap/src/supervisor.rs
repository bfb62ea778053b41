//! The supervisor: keeps a server running, and what must outlive it.
//!
//! ```text
//!              starts, watches (pidfd)            a line each: "device 0", "ready"
//!  supervisor ─────────────────────────► server ───────────────────────────────► supervisor
//!     │  holds the descriptors of store        ◄──── "end" ─────────────────────
//!     │  and buffers, hands them on
//!     ├─ one that stands by: has its memory, waits for "go ..."
//!     └─ helpers: processes that do what may take long or be killed (swapon, swapoff)
//! ```
//!
//! A server that dies is replaced at once; one that dies again and again after a growing pause, and in the
//! end no more ([`Backoff`]). Whoever asks the supervisor to end (a descriptor that becomes readable) has the
//! down helper run first: swapping must be over before the disk goes. Should that fail, the server goes on.
//!
//! A server that dies takes with it the way to get memory back: its successor must not need any. So one
//! [stands by](Service::standby), started while there was memory, and goes when it is told to.
//!
//! Servers do not follow signals while they have a supervisor: one that a service manager or a terminal
//! sends to all processes at once must not take a disk away that is swapped to.
//!
//! Limits: the supervisor is one thread; it allocates little, when it starts something. Should it be killed
//! itself, the server goes on without one.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::process::{pidfd_open, Pid, PidfdFlags, Signal};

/// What is to be supervised.
pub trait Service {
    /// The command that starts a server. Its standard input is the supervisor's; `replaces` tells whether
    /// there was one before.
    fn server(&mut self, replaces: bool) -> Command;

    /// The command that starts one that stands by; `None` where none is wanted. It goes when it reads the
    /// line "go" with what [`go`](Self::go) adds, and ends when it reads nothing any more.
    fn standby(&mut self) -> Option<Command> {
        None
    }

    /// What the one that stands by has to know.
    fn go(&self) -> String {
        String::new()
    }

    /// A line that the server has said, other than "ready".
    fn said(&mut self, line: &str);

    /// What is to be run now that the server `pid` is ready: for the first one or for a later one.
    fn up(&mut self, replaces: bool, pid: u32) -> Option<Command>;

    /// What is to be run before the server may end.
    fn down(&mut self) -> Option<Command>;

    /// How long `down` may take.
    fn down_limit(&self) -> Duration;

    /// Gives up what servers left behind, when no more will be started.
    fn abandon(&mut self);

    /// Tells whoever watches.
    fn say(&self, line: &str);
}

/// Why the supervisor has ended, other than because it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuperviseError {
    /// Nothing can be started, or watched.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The kernel's word.
        source: io::Error,
    },
    /// The first server has not come up: what it said is its own error.
    #[error("the server does not start: it ended with {0}")]
    Start(ExitStatus),
    /// What was to be run when the server had come up has failed.
    #[error("what follows the start has failed: {0}")]
    Up(ExitStatus),
    /// Servers die as fast as they are started.
    #[error("{crashes} servers have died in a row, the last with {last}: no more are started")]
    GaveUp {
        /// How many.
        crashes: u32,
        /// How the last ended.
        last: ExitStatus,
    },
}

/// How long to wait before another server is started.
#[derive(Debug, Default)]
pub struct Backoff {
    crashes: u32,
}

impl Backoff {
    /// A server that was up for so long is not taken for one that dies as fast as it is started.
    const STEADY: Duration = Duration::from_secs(30);

    /// As many in a row are tried: the pauses between them are 6 s together.
    const MOST: u32 = 8;

    /// A server has died that had been ready for so long; `None` when there is to be no other.
    pub fn died(&mut self, ready: Duration) -> Option<Duration> {
        if ready >= Self::STEADY {
            self.crashes = 0;
        }
        self.crashes += 1;
        match self.crashes {
            1 => Some(Duration::ZERO),
            crashes if crashes > Self::MOST => None,
            crashes => Some(Duration::from_millis(50) * 2_u32.pow(crashes - 2)),
        }
    }
}

struct Server {
    child: Child,
    pidfd: OwnedFd,
    channel: UnixStream,
    line: Vec<u8>,
    ready: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    Up { first: bool },
    Down,
}

struct Helper {
    child: Child,
    pidfd: OwnedFd,
    task: Task,
    deadline: Option<Instant>,
}

/// Runs `service` until `stop` becomes readable and all is down, or it cannot be kept up.
///
/// # Errors
///
/// [`SuperviseError`]; nothing that was started is left then, except a server that holds swapped-out
/// pages.
pub fn supervise(service: &mut dyn Service, stop: BorrowedFd<'_>) -> Result<(), SuperviseError> {
    Supervisor {
        service,
        server: None,
        standby: None,
        helper: None,
        backoff: Backoff::default(),
        restart: Some(Instant::now()),
        started: 0,
        been_up: false,
        stopping: false,
        ending: false,
    }
    .run(stop)
}

struct Supervisor<'a> {
    service: &'a mut dyn Service,
    server: Option<Server>,
    /// It is looked at only when it is needed.
    standby: Option<Server>,
    helper: Option<Helper>,
    backoff: Backoff,
    /// When to start a server.
    restart: Option<Instant>,
    started: u32,
    /// Whether the first start has succeeded as a whole.
    been_up: bool,
    /// Asked to end, and trying to.
    stopping: bool,
    /// The server was told to end.
    ending: bool,
}

fn failed(action: &'static str) -> impl FnOnce(io::Error) -> SuperviseError {
    move |source| SuperviseError::Io { action, source }
}

impl Supervisor<'_> {
    fn run(&mut self, stop: BorrowedFd<'_>) -> Result<(), SuperviseError> {
        loop {
            if self.restart.is_some_and(|at| at <= Instant::now()) {
                self.restart = None;
                self.start()?;
            }
            let woken = self.wait(stop)?;
            if woken.stop {
                // Level-triggered: take what was written.
                let _ = rustix::io::read(stop, &mut [0; 64]);
                self.stop()?;
            }
            if woken.said {
                self.listen()?;
            }
            if woken.helper {
                self.helper_ended()?;
            }
            if woken.server && self.server_ended()? {
                return Ok(());
            }
            self.enforce_deadline();
        }
    }

    fn start(&mut self) -> Result<(), SuperviseError> {
        let replaces = self.started > 0;
        self.started += 1;
        if let Some(mut standby) = self.standby.take() {
            let line = format!("go {}\n", self.service.go());
            if standby.channel.write_all(line.as_bytes()).is_ok() {
                self.server = Some(standby);
                return Ok(());
            }
            // It has died as well.
            let _ = standby.child.kill();
            let _ = standby.child.wait();
        }
        let command = self.service.server(replaces);
        self.server = Some(Self::spawn(command)?);
        Ok(())
    }

    /// Starts the next one that stands by, if there is none.
    fn stand_by(&mut self) -> Result<(), SuperviseError> {
        if self.standby.is_none() && !self.ending {
            if let Some(command) = self.service.standby() {
                self.standby = Some(Self::spawn(command)?);
            }
        }
        Ok(())
    }

    fn spawn(mut command: Command) -> Result<Server, SuperviseError> {
        let (ours, theirs) = UnixStream::pair().map_err(failed("make a socket pair"))?;
        let child = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn();
        let child = child.map_err(failed("start the server"))?;
        // The command keeps its end of the pair, which would keep us from seeing the server's end.
        drop(command);
        ours.set_nonblocking(true).map_err(failed("set up a socket"))?;
        let pidfd = watch(&child)?;
        let line = Vec::with_capacity(128);
        Ok(Server { child, pidfd, channel: ours, line, ready: None })
    }

    fn wait(&self, stop: BorrowedFd<'_>) -> Result<Woken, SuperviseError> {
        let deadlines = [self.restart, self.helper.as_ref().and_then(|helper| helper.deadline)];
        let timeout = deadlines.into_iter().flatten().min().map(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        // What is not there is watched as `stop` once more.
        let server = self.server.as_ref();
        let pidfd = server.map_or(stop, |server| server.pidfd.as_fd());
        let channel = server.map_or(stop, |server| server.channel.as_fd());
        let helper = self.helper.as_ref().map_or(stop, |helper| helper.pidfd.as_fd());
        let watched = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = [watched(stop), watched(pidfd), watched(channel), watched(helper)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(failed("wait")(error.into())),
        }
        let ready = |nth: usize| !fds[nth].revents().is_empty();
        Ok(Woken {
            stop: ready(0),
            server: server.is_some() && ready(1),
            said: server.is_some() && ready(2),
            helper: self.helper.is_some() && ready(3),
        })
    }

    /// Takes what the server has said, line by line.
    fn listen(&mut self) -> Result<(), SuperviseError> {
        let Some(server) = &mut self.server else { return Ok(()) };
        let mut bytes = [0; 256];
        let got = match server.channel.read(&mut bytes) {
            // Its end is seen by the pidfd; a closed channel alone must not keep us awake.
            Ok(0) => {
                std::thread::sleep(Duration::from_millis(1));
                return Ok(());
            }
            Ok(got) => got,
            Err(_) => return Ok(()),
        };
        for &byte in &bytes[..got] {
            if byte != b'\n' {
                // A line that is longer than any we know is none.
                if server.line.len() < 128 {
                    server.line.push(byte);
                }
                continue;
            }
            let line = String::from_utf8_lossy(&server.line).into_owned();
            server.line.clear();
            if line != "ready" {
                self.service.said(&line);
                continue;
            }
            server.ready = Some(Instant::now());
            let first = !self.been_up;
            match self.service.up(!first, server.child.id()) {
                Some(command) => self.help(command, Task::Up { first }, None)?,
                None => self.been_up = true,
            }
            // Nothing else comes with it.
            return self.stand_by();
        }
        Ok(())
    }

    fn help(
        &mut self,
        mut command: Command,
        task: Task,
        limit: Option<Duration>,
    ) -> Result<(), SuperviseError> {
        if let Some(mut other) = self.helper.take() {
            // What it was to bring about is out of date.
            let _ = other.child.kill();
            let _ = other.child.wait();
        }
        let child = command.stdin(Stdio::null()).spawn().map_err(failed("start a helper"))?;
        let pidfd = watch(&child)?;
        let deadline = limit.map(|limit| Instant::now() + limit);
        self.helper = Some(Helper { child, pidfd, task, deadline });
        Ok(())
    }

    fn helper_ended(&mut self) -> Result<(), SuperviseError> {
        let Some(helper) = &mut self.helper else { return Ok(()) };
        let Some(status) = helper.child.try_wait().map_err(failed("wait for a helper"))? else {
            return Ok(());
        };
        let task = helper.task;
        self.helper = None;
        match (task, status.success()) {
            (Task::Up { .. }, true) => self.been_up = true,
            (Task::Up { first: true }, false) => {
                self.end_server();
                return Err(SuperviseError::Up(status));
            }
            (Task::Up { first: false }, false) => {
                self.service
                    .say(&format!("what follows the start of a server has failed: {status}"));
            }
            (Task::Down, true) => self.tell_to_end(),
            (Task::Down, false) => {
                self.stopping = false;
                self.service.say(&format!(
                    "cannot end, the disk is still in use ({status}): serving goes on. Ask again later"
                ));
            }
        }
        Ok(())
    }

    fn enforce_deadline(&mut self) {
        let Some(helper) = &mut self.helper else { return };
        if helper.deadline.is_some_and(|at| at <= Instant::now()) {
            helper.deadline = None;
            // Its end is then seen as that of one that has failed.
            let _ = helper.child.kill();
        }
    }

    fn stop(&mut self) -> Result<(), SuperviseError> {
        if self.stopping {
            return Ok(());
        }
        self.stopping = true;
        if self.been_up {
            if let Some(command) = self.service.down() {
                let limit = self.service.down_limit();
                return self.help(command, Task::Down, Some(limit));
            }
        }
        self.tell_to_end();
        Ok(())
    }

    fn tell_to_end(&mut self) {
        self.ending = true;
        if let Some(mut standby) = self.standby.take() {
            let _ = standby.child.kill();
            let _ = standby.child.wait();
        }
        if let Some(server) = &mut self.server {
            // One that is dying just now needs no telling.
            let _ = server.channel.write_all(b"end\n");
        }
    }

    /// Ends the server for good, with force if it does not follow.
    fn end_server(&mut self) {
        self.tell_to_end();
        let Some(mut server) = self.server.take() else { return };
        let mut fds = [PollFd::new(&server.pidfd, PollFlags::IN)];
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        // Whatever it says, the server is not waited for longer.
        let _ = poll(&mut fds, Some(&patience));
        let _ = server.child.kill();
        let _ = server.child.wait();
    }

    /// Whether that was all.
    fn server_ended(&mut self) -> Result<bool, SuperviseError> {
        let Some(server) = &mut self.server else { return Ok(false) };
        let Some(status) = server.child.try_wait().map_err(failed("wait for the server"))? else {
            return Ok(false);
        };
        let ready = server.ready.map(|since| since.elapsed());
        self.server = None;
        if self.ending {
            if !status.success() {
                self.service.say(&format!("the server ended with {status}"));
                self.service.abandon();
            }
            return Ok(true);
        }
        if !self.been_up && self.started == 1 && ready.is_none() {
            return Err(SuperviseError::Start(status));
        }
        let Some(pause) = self.backoff.died(ready.unwrap_or_default()) else {
            self.tell_to_end();
            self.service.abandon();
            return Err(SuperviseError::GaveUp { crashes: Backoff::MOST, last: status });
        };
        let after = match pause {
            Duration::ZERO => String::new(),
            pause => format!(" in {pause:?}"),
        };
        self.service.say(&format!("the server has died ({status}): starting another{after}"));
        self.restart = Some(Instant::now() + pause);
        Ok(false)
    }
}

struct Woken {
    stop: bool,
    server: bool,
    said: bool,
    helper: bool,
}

fn watch(child: &Child) -> Result<OwnedFd, SuperviseError> {
    let raw = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = raw.expect("a child's number is a positive int");
    // Not yet waited for, so that the number is this child's.
    let opened = pidfd_open(pid, PidfdFlags::empty());
    opened.map_err(|error| {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
        failed("watch a process")(error.into())
    })
}

#[cfg(test)]
mod tests {
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
        log: RefCell<Vec<String>>,
        folder: tempfile::TempDir,
    }

    impl Shell {
        fn new(script: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let log = RefCell::new(Vec::new());
            Self { script: script.into(), standby: None, up: None, down: None, log, folder }
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
            self.standby.as_ref().map(|script| self.sh(script))
        }
        fn go(&self) -> String {
            "there".into()
        }
        fn said(&mut self, line: &str) {
            self.log.borrow_mut().push(format!("said {line}"));
        }
        fn up(&mut self, replaces: bool, _: u32) -> Option<Command> {
            self.log.borrow_mut().push(format!("up {replaces}"));
            self.up.as_ref().map(|script| self.sh(script))
        }
        fn down(&mut self) -> Option<Command> {
            self.down.as_ref().map(|script| self.sh(script))
        }
        fn down_limit(&self) -> Duration {
            Duration::from_secs(20)
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
        assert!(
            matches!(error, SuperviseError::Start(status) if status.code() == Some(3)),
            "{error}"
        );
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
            for text in ["up", "tried"] {
                let deadline = Instant::now() + Duration::from_secs(60);
                while !fs::read_to_string(&note).unwrap_or_default().contains(text) {
                    assert!(Instant::now() < deadline);
                    std::thread::sleep(Duration::from_millis(5));
                }
                // The helper's end must have been seen before it is asked again.
                std::thread::sleep(Duration::from_millis(300));
                (&ask).write_all(b"x").unwrap();
            }
            ask
        });
        supervise(&mut shell, stop.as_fd()).unwrap();
        asking.join().unwrap();
        assert_eq!(shell.noted(), "up\ntried\nend\n");
        assert!(shell.log.borrow().iter().any(|line| line.contains("serving goes on")));
    }

    #[test]
    fn a_start_whose_helper_fails_ends_the_server() {
        let mut shell = Shell::new(SERVER);
        shell.up = Some("exit 5".into());
        let error = run(&mut shell, "never-mind").unwrap_err();
        assert!(matches!(error, SuperviseError::Up(status) if status.code() == Some(5)), "{error}");
        assert!(shell.noted().ends_with("end\n"), "{}", shell.noted());
    }
}
