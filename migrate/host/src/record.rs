//! Record of a migration.

use crate::place::Place;
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// The end of a migration that this host is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The VM leaves this host.
    #[default]
    Source,
    /// The VM comes to this host.
    Destination,
}

/// The subject of a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// A VM, migrated.
    #[default]
    Vm,
    /// An NBD connection, by which QEMU copies a disk of a VM.
    Disk,
}

/// The state of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The other host is being reached.
    #[default]
    Opening,
    /// Bytes of the VM go over.
    Active,
    /// The outcome is certain; the other host may still have to be informed.
    Ending,
    /// It is over.
    Ended,
}

/// The outcome of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The destination has confirmed it.
    Completed,
    /// The whole stream was delivered, and without a return path it is unknown whether the
    /// destination runs the VM.
    Unconfirmed,
    /// It was forwarded unencrypted, as configured.
    Forwarded,
    /// It failed.
    Failed,
}

/// A migration that runs, or one that has ended. A reader accepts records of other versions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Record {
    /// Identifier on this host; later ones sort behind earlier ones.
    pub id: String,
    /// `source` or `destination`.
    pub role: Role,
    /// Name of the other host.
    pub peer: String,
    /// Port of the door, or number of the unix socket.
    pub port: u16,
    /// The request to the destination: `door:PORT`, `socket:N`, or for an intercepted connection
    /// `address:IP:PORT`. Records of older versions have none: they are those of doors.
    pub place: Option<Place>,
    /// The thing that is carried: `vm`, or `disk`, the connection by which QEMU copies a disk.
    pub what: What,
    /// Name of the VM, if its QEMU could be found.
    pub vm: Option<String>,
    /// Process that carries it.
    pub pid: u32,
    /// `opening`, `active`, `ending` or `ended`.
    pub phase: Phase,
    /// When it came to that phase, milliseconds since 1970.
    pub since: u64,
    /// How far it came: `opening`, or `active`.
    pub reached: Phase,
    /// Begin, milliseconds since 1970.
    pub began: u64,
    /// End, milliseconds since 1970.
    pub ended: Option<u64>,
    /// Bytes of QEMU's migration stream so far.
    pub plain: u64,
    /// Bytes on the network so far.
    pub transferred: u64,
    /// Bytes of the VM's RAM; 0 until the stream has said.
    pub ram: u64,
    /// Bytes of RAM that were sent, again for those that were sent again.
    pub ram_sent: u64,
    /// `completed`, `unconfirmed`, `forwarded` or `failed`.
    pub status: Option<Status>,
    /// Why it failed.
    pub cause: Option<String>,
    /// Session of a destination, by which its links are known.
    pub session: Option<String>,
    /// Whether the port is its own: another migration with that port has to wait.
    pub holds_port: bool,
}

impl Record {
    /// The migration in words, for messages.
    pub fn title(&self) -> String {
        let vm = self.vm.as_ref().map_or(String::new(), |vm| format!("of {vm} "));
        let way = if self.role == Role::Source { "to" } else { "from" };
        let what = if self.what == What::Vm { "migration" } else { "disk" };
        format!("{what} {} {vm}{way} {} ({})", self.id, self.peer, self.place().in_words())
    }

    /// The request to the destination.
    pub fn place(&self) -> Place {
        self.place.unwrap_or(Place::Door(self.port))
    }

    /// Reserved against other migrations of this role while this one `holds_port`.
    pub(crate) fn held(&self) -> Place {
        match (self.role, self.place()) {
            // It came through a door all the same.
            (Role::Source, Place::Address(_)) => Place::Door(self.port),
            (_, place) => place,
        }
    }
}

/// A change of a migration's phase: a line of `platen events --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Event {
    /// When it happened, milliseconds since 1970.
    pub time: u64,
    /// Identifier of the migration on this host.
    pub id: String,
    /// `source` or `destination`.
    pub role: Role,
    /// The thing that is carried: `vm` or `disk`.
    // A service of an older version does not say.
    #[serde(default)]
    pub what: What,
    /// Name of the VM, if its QEMU could be found.
    pub vm: Option<String>,
    /// Name of the other host.
    pub peer: String,
    /// Port of the door.
    pub port: u16,
    /// The phase that it came to: `opening`, `active`, `ending` or `ended`.
    pub phase: Phase,
    /// The outcome of one that has ended: `completed`, `unconfirmed`, `forwarded` or `failed`.
    pub status: Option<Status>,
    /// Why it failed.
    pub cause: Option<String>,
    /// Bytes of QEMU's migration stream so far.
    pub plain: u64,
    /// Bytes on the network so far.
    pub transferred: u64,
}

impl From<&Record> for Event {
    fn from(record: &Record) -> Self {
        Self {
            // A record of an older version has no time of its phase.
            time: record.ended.unwrap_or(record.since.max(record.began)),
            id: record.id.clone(),
            role: record.role,
            what: record.what,
            vm: record.vm.clone(),
            peer: record.peer.clone(),
            port: record.port,
            phase: record.phase,
            status: record.status,
            cause: record.cause.clone(),
            plain: record.plain,
            transferred: record.transferred,
        }
    }
}

impl Role {
    /// Its word in records and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

impl Status {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Completed, Self::Unconfirmed, Self::Forwarded, Self::Failed];

    /// Its word in records and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Unconfirmed => "unconfirmed",
            Self::Forwarded => "forwarded",
            Self::Failed => "failed",
        }
    }
}

impl Phase {
    /// Its word in records and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Active => "active",
            Self::Ending => "ending",
            Self::Ended => "ended",
        }
    }
}

/// Milliseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
