//! The source QEMU's monitor during a migration. Its connection may end while QEMU lives, as when
//! it goes through a proxy (`ssh -L`, `socat`); then `migrate` connects again.

use crate::monitor::open_monitor;
use crate::settings_claim::{socket_of, SocketId};
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::UnixAddress;
use std::time::{Duration, Instant};

/// The pause between the first two attempts to connect again; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The state of the connection.
pub(crate) struct Watched<'a> {
    address: &'a UnixAddress,
    /// A QEMU that listens at another socket is another one.
    socket: Option<SocketId>,
    /// Whether QEMU has answered the last query in time.
    pub(crate) answers: bool,
    /// Set while there is no connection: when to connect again, and the pause after that.
    lost: Option<(Instant, Duration)>,
    is_told: bool,
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
            self.lost = Some((Instant::now(), FIRST_PAUSE));
            if !std::mem::replace(&mut self.is_told, true) {
                note(&format!("monitor {}: {error}: connecting again", self.address));
            }
        }
        None
    }

    fn connect(&mut self, qmp: &mut Qmp) -> bool {
        let Some((at, pause)) = self.lost.filter(|(at, _)| Instant::now() >= *at) else {
            return false;
        };
        let found = socket_of(self.address);
        if found.is_some() && found == self.socket {
            if let Ok(new) = open_monitor(self.address) {
                *qmp = new;
                self.lost = None;
                return true;
            }
        }
        self.lost = Some((at.max(Instant::now()) + pause, (2 * pause).min(LONGEST_PAUSE)));
        false
    }
}
