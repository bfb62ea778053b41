//! Waits for the answer of a device's supervisor, and tells the user why it takes long.
//!
//! A supervisor may be stopped (SIGSTOP), or hang. The kernel shows whether it has read the
//! request. A request that it has not read is withdrawn by the end of this side of the connection,
//! which the supervisor looks for after it has read a request.

use super::requests::ANSWER;
use crate::say::say;
use anyhow::{bail, Context};
use rustix::net::sockopt::socket_peercred;
use std::io::{ErrorKind, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The time between two looks at a supervisor that is silent. Looks are counted, because a command
/// that gets no CPU has waited for nothing.
const LOOK: Duration = Duration::from_secs(1);

/// Looks that find the supervisor doing the same before the user is told.
const TOLD: u32 = 5;

/// Looks that find it stopped, or the request unread, before the command gives up.
const STUCK: u32 = 30;

/// Looks at one that is silent before the command gives up. They take longer than a supervisor
/// waits for a new server on a machine that is short of memory, and for the kernel's NBD client.
const SILENT: u32 = 1200;

/// The state of a silent supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Doing {
    has_read: bool,
    is_stopped: bool,
}

/// A supervisor that was asked.
struct Asked<'a> {
    stream: &'a UnixStream,
    pid: i32,
}

/// The whole answer of the supervisor of the device `name`, which ends with the connection.
///
/// # Errors
///
/// The supervisor is stopped, hangs or takes too long. The message tells whether it may still carry
/// out the request.
pub(super) fn answer(name: &str, stream: &UnixStream) -> anyhow::Result<String> {
    let pid = socket_peercred(stream).context("cannot tell who its supervisor is")?.pid;
    let asked = Asked { stream, pid: pid.as_raw_nonzero().get() };
    stream.set_read_timeout(Some(LOOK))?;
    let (mut answer, mut part) = (Vec::new(), [0; 4096]);
    let (mut before, mut told) = (None, None);
    let (mut same, mut stuck, mut silent) = (0, 0, 0);
    while answer.len() < usize::try_from(ANSWER)? {
        match { stream }.read(&mut part) {
            // The kernel reports a supervisor that died before it had read the request as a reset.
            Ok(0) => break,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Ok(got) => {
                answer.extend_from_slice(&part[..got]);
                silent = 0;
                continue;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error).context("its connection was lost"),
        }
        let doing = asked.doing();
        same = if before.replace(doing) == Some(doing) { same + 1 } else { 1 };
        stuck = if doing.is_stuck() { stuck + 1 } else { 0 };
        silent += 1;
        if same == TOLD && told.replace(doing) != Some(doing) {
            say(&format!("device {name}: its supervisor, process {}, {}", asked.pid, doing.told()));
        }
        let gives_up = (stuck >= STUCK && (doing.has_read || asked.withdraw())) || silent >= SILENT;
        if gives_up {
            let said = String::from_utf8_lossy(&answer);
            bail!(
                "its supervisor, process {}, {}{said}",
                asked.pid,
                doing.given_up(name, asked.pid)
            );
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

impl Asked<'_> {
    fn doing(&self) -> Doing {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        // The name in parentheses may have any characters.
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        Doing { has_read: self.has_read(), is_stopped: state == Some('T') }
    }

    /// Where the kernel does not tell, the supervisor is taken to have read the request.
    fn has_read(&self) -> bool {
        swap::supervisor::unread(self.stream.as_fd()).unwrap_or(0) == 0
    }

    /// Withdraws a request; returns whether the supervisor has not read it. One that has read it
    /// since the last look answers.
    fn withdraw(&self) -> bool {
        self.stream.shutdown(Shutdown::Write).is_ok() && !self.has_read()
    }
}

impl Doing {
    fn is_stuck(self) -> bool {
        self.is_stopped || !self.has_read
    }

    fn told(self) -> &'static str {
        match (self.has_read, self.is_stopped) {
            (true, false) => "replaces the server: waiting for the result",
            (true, true) => "is stopped (SIGSTOP) while it replaces the server: waiting for it",
            (false, true) => "is stopped (SIGSTOP) and has not read the request: waiting for it",
            (false, false) => "has not read the request: waiting for it",
        }
    }

    /// Why the command gives up, and what the user can do.
    fn given_up(self, name: &str, pid: i32) -> String {
        let withdrawn = format!(
            "has not read the request in {STUCK} s: the request is withdrawn and nothing has \
             changed (a supervisor of an earlier version may still carry it out)"
        );
        match (self.has_read, self.is_stopped) {
            (false, true) => format!(
                "is stopped (SIGSTOP), and {withdrawn}; `kill -CONT {pid}` continues it, then repeat \
                 the command"
            ),
            (false, false) => format!(
                "{withdrawn}; /proc/{pid}/stack shows what it waits for, its server serves meanwhile; \
                 repeat the command when it has what it waits for"
            ),
            (true, true) => format!(
                "has been stopped (SIGSTOP) for {STUCK} s while it replaced the server: `kill -CONT \
                 {pid}` continues it, and then it may still carry out the request, as `platen \
                 device stat {name}` shows"
            ),
            (true, false) => format!(
                "has read the request and reports no result in {SILENT} s: it may still carry out \
                 the request, as `platen device stat {name}` shows; /proc/{pid}/stack shows what it \
                 waits for"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's answers for a supervisor that has not accepted, has not read, and has read.
    #[test]
    fn a_request_is_withdrawn_only_while_nobody_has_read_it() {
        use std::io::Write;
        use std::os::unix::net::UnixListener;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("supervisor");
        let listener = UnixListener::bind(&path).unwrap();
        for reads in [false, true] {
            let stream = UnixStream::connect(&path).unwrap();
            let pid = i32::try_from(std::process::id()).unwrap();
            let asked = Asked { stream: &stream, pid };
            assert!(asked.has_read(), "nothing is sent yet");
            (&stream).write_all(b"upgrade\n").unwrap();
            assert_eq!(asked.doing(), Doing { has_read: false, is_stopped: false });
            let (mut accepted, _) = listener.accept().unwrap();
            assert!(!asked.has_read());
            if reads {
                accepted.read_exact(&mut [0; 8]).unwrap();
            }
            assert_eq!(asked.has_read(), reads);
            assert_eq!(asked.withdraw(), !reads);
            // The answer of one that has read it comes all the same.
            accepted.write_all(b"done\n").unwrap();
            drop(accepted);
            let answer = answer("x", &stream).unwrap();
            assert_eq!(answer, "done\n");
        }
    }
}
