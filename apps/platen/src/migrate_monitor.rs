//! The source QEMU's monitor during a migration. Its connection may end while QEMU lives, as when
//! it goes through a proxy (`ssh -L`, `socat`); then `migrate` connects again.

use crate::monitor::open_monitor;
use crate::settings_claim::{socket_of, SocketId};
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::UnixAddress;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The pause between the first two attempts to connect again; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long the greeting of a new connection is waited for at once.
const MOMENT: Duration = Duration::from_millis(500);

/// The state of the connection.
pub(crate) struct Watched<'a> {
    address: &'a UnixAddress,
    /// A QEMU that listens at another socket is another one.
    socket: Option<SocketId>,
    /// Whether QEMU has answered the last query in time.
    pub(crate) answers: bool,
    /// Set while there is no connection.
    lost: Option<Lost>,
    is_told: bool,
}

/// The way back to a connection.
struct Lost {
    /// When to connect again, and the pause after that.
    at: Instant,
    pause: Duration,
    /// The attempt in progress.
    attempt: Option<Receiver<Qmp>>,
}

impl Lost {
    fn new() -> Self {
        Self { at: Instant::now(), pause: FIRST_PAUSE, attempt: None }
    }

    fn put_off(&mut self) {
        self.attempt = None;
        self.at = Instant::now() + self.pause;
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }
}

impl<'a> Watched<'a> {
    pub(crate) fn new(address: &'a UnixAddress) -> Self {
        let socket = socket_of(address);
        Self { address, socket, answers: true, lost: None, is_told: false }
    }

    /// Whether there is no connection.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Queries the migration's status. If the connection has ended, connects again first, when it
    /// is time for that.
    pub(crate) fn ask(&mut self, qmp: &mut Qmp, note: impl Fn(&str)) -> Option<MigrationInfo> {
        if self.lost.is_some() && !self.connect(qmp) {
            return None;
        }
        let error = match qmp.query_migrate() {
            Ok(info) => {
                self.answers = true;
                return Some(info);
            }
            Err(error) => error,
        };
        self.answers = error.is_refusal() || matches!(error, QmpError::Reply { .. });
        if !self.answers && !matches!(error, QmpError::TimedOut { .. }) {
            self.lost = Some(Lost::new());
            if !std::mem::replace(&mut self.is_told, true) {
                note(&format!("monitor {}: {error}: connecting again", self.address));
            }
        }
        None
    }

    /// Connects again when it is time for that, and looks after an attempt. Another client may have
    /// the monitor, which greets one client at a time: nothing else waits for that.
    fn connect(&mut self, qmp: &mut Qmp) -> bool {
        let Some(lost) = &mut self.lost else { return true };
        let mut wait = Duration::ZERO;
        if lost.attempt.is_none() {
            if Instant::now() < lost.at {
                return false;
            }
            let found = socket_of(self.address);
            let is_same = found.is_some() && found == self.socket;
            lost.attempt = is_same.then(|| begin(self.address)).flatten();
            wait = MOMENT;
        }
        let Some(attempt) = &lost.attempt else {
            lost.put_off();
            return false;
        };
        match attempt.recv_timeout(wait) {
            Ok(new) => {
                *qmp = new;
                self.lost = None;
                return true;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => lost.put_off(),
        }
        false
    }
}

/// Opens the monitor on a thread of its own, which ends at the time limit of the greeting; `None`
/// if the system refuses a thread.
fn begin(address: &UnixAddress) -> Option<Receiver<Qmp>> {
    let (done, attempt) = channel();
    let address = address.clone();
    let open = move || {
        if let Ok(qmp) = open_monitor(&address) {
            let _ = done.send(qmp);
        }
    };
    thread::Builder::new().name("monitor".into()).spawn(open).ok().map(|_| attempt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    const GREETING: &str = concat!(
        r#"{"QMP":{"version":{"qemu":{"major":10,"minor":0,"micro":2},"package":""},"#,
        r#""capabilities":[]}}"#,
        "\n{\"return\":{},\"id\":1}\n"
    );

    /// Another client may have the monitor for as long as it likes.
    #[test]
    fn a_monitor_that_does_not_greet_yet_is_not_waited_for_and_is_heard_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        qemu.write_all(GREETING.as_bytes()).unwrap();
        let mut qmp = Qmp::over(ours, Duration::from_secs(60)).unwrap();
        drop(qemu);
        let address = UnixAddress::from(path);
        let mut watched = Watched::new(&address);
        assert!(watched.ask(&mut qmp, |_| ()).is_none() && watched.is_lost());
        // It connects, and gives this connection up neither now nor at a further question.
        assert!(watched.ask(&mut qmp, |_| ()).is_none() && watched.is_lost());
        let (mut qemu, _) = listener.accept().unwrap();
        assert!(watched.ask(&mut qmp, |_| ()).is_none() && watched.is_lost());
        qemu.set_nonblocking(true).unwrap();
        let closed = qemu.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(closed, Err(ErrorKind::WouldBlock), "it was waited for to its end");
        qemu.write_all(GREETING.as_bytes()).unwrap();
        qemu.write_all(b"{\"return\":{\"status\":\"active\"},\"id\":2}\n").unwrap();
        let info = loop {
            if let Some(info) = watched.ask(&mut qmp, |_| ()) {
                break info;
            }
        };
        assert_eq!(info.status(), "active");
        assert!(!watched.is_lost());
    }
}
