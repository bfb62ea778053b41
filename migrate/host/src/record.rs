//! Record of a migration.

use crate::place::Place;
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// The end of a migration that this host has.
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
    /// The connection to the other host is being made.
    #[default]
    Opening,
    /// Bytes of the VM are being sent.
    Active,
    /// The outcome is certain; the other host may still have to be informed.
    Ending,
    /// The migration is over.
    Ended,
}

/// The outcome of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// The destination has confirmed the migration.
    Completed,
    /// The whole stream was delivered. Without a return path it is unknown whether the destination
    /// runs the VM.
    Unconfirmed,
    /// The migration was forwarded unencrypted, as configured.
    Forwarded,
    /// The migration failed.
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
    /// Name of the VM, if its QEMU was found.
    pub vm: Option<String>,
    /// Process ID of the migration's carrier.
    pub pid: u32,
    /// `opening`, `active`, `ending` or `ended`.
    pub phase: Phase,
    /// Time at which the migration entered that phase, milliseconds since 1970.
    pub since: u64,
    /// The furthest phase before the end: `opening` or `active`.
    pub reached: Phase,
    /// Begin of the migration, milliseconds since 1970.
    pub began: u64,
    /// End of the migration, milliseconds since 1970.
    pub ended: Option<u64>,
    /// Bytes of QEMU's migration stream so far.
    pub plain: u64,
    /// Bytes on the network so far.
    pub transferred: u64,
    /// Bytes of the VM's RAM; 0 until the stream has stated it.
    pub ram: u64,
    /// Bytes of RAM that were sent. Bytes that were sent again count again.
    pub ram_sent: u64,
    /// `completed`, `unconfirmed`, `forwarded` or `failed`.
    pub status: Option<Status>,
    /// Cause of a failure.
    pub cause: Option<String>,
    /// Session of a destination, by which a service finds the carrier of a link.
    pub session: Option<String>,
    /// Whether the migration still occupies its port: another migration to that port has to wait.
    pub holds_port: bool,
}

impl Record {
    /// Describes the migration, for messages.
    pub fn title(&self) -> String {
        let vm = self.vm.as_ref().map_or(String::new(), |vm| format!("of {vm} "));
        let way = if self.role == Role::Source { "to" } else { "from" };
        let what = if self.what == What::Vm { "migration" } else { "disk" };
        format!("{what} {} {vm}{way} {} ({})", self.id, self.peer, self.place().in_words())
    }

    /// The place that the source requests from the destination.
    pub fn place(&self) -> Place {
        self.place.unwrap_or(Place::Door(self.port))
    }

    /// The place that other migrations of this role cannot have while this one `holds_port`.
    pub(crate) fn held(&self) -> Place {
        match (self.role, self.place()) {
            // The connection came through a door all the same.
            (Role::Source, Place::Address(_)) => Place::Door(self.port),
            (_, place) => place,
        }
    }
}

/// A change of a migration's phase: a line of `platen events --json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Event {
    /// Time of the event, milliseconds since 1970.
    pub time: u64,
    /// Identifier of the migration on this host.
    pub id: String,
    /// `source` or `destination`.
    pub role: Role,
    /// The thing that is carried: `vm` or `disk`.
    // A service of an older version does not send it.
    #[serde(default)]
    pub what: What,
    /// Name of the VM, if its QEMU was found.
    pub vm: Option<String>,
    /// Name of the other host.
    pub peer: String,
    /// Port of the door.
    pub port: u16,
    /// The phase that the migration entered: `opening`, `active`, `ending` or `ended`.
    pub phase: Phase,
    /// The outcome of a migration that has ended: `completed`, `unconfirmed`, `forwarded` or
    /// `failed`.
    pub status: Option<Status>,
    /// Cause of a failure.
    pub cause: Option<String>,
    /// Bytes of QEMU's migration stream so far.
    pub plain: u64,
    /// Bytes on the network so far.
    pub transferred: u64,
}

impl From<&Record> for Event {
    fn from(record: &Record) -> Self {
        Self {
            // A record of an older version lacks the time of its phase.
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
    /// The name in records and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

impl Status {
    /// All outcomes.
    pub const ALL: [Self; 4] = [Self::Completed, Self::Unconfirmed, Self::Forwarded, Self::Failed];

    /// The name in records and messages.
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
    /// The name in records and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Active => "active",
            Self::Ending => "ending",
            Self::Ended => "ended",
        }
    }
}

/// The time now, milliseconds since 1970.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
