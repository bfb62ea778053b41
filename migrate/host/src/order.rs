//! Messages of the service to a carrier.

use crate::config::Config;
use crate::record::Record;
use relay::Promise;
use serde::{Deserialize, Serialize};
use session::Hello;
use tls::Peer;

/// A message of the service; some bring a descriptor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// With a connection of QEMU.
    Connection,
    /// With the listening socket of the door.
    Listener,
    /// With the memory of the turns of all migrations that leave this host.
    Turns,
    /// Everything has been sent: run the migration.
    Carry(Box<Job>),
    /// With a connection of the other host's service, and that host's address.
    Link(String),
}

/// The task of a carrier.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    /// The configuration.
    pub config: Config,
    /// Name of this host in it.
    pub me: String,
    /// The migration, as it begins.
    pub record: Record,
    /// The task.
    pub task: Task,
}

/// The task of a carrier.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Migrate the VM of the connections to the record's peer.
    Source,
    /// Receive a VM, or an NBD connection, for the record's port.
    Destination(SessionOrder),
    /// Carry the connection of an NBD client to the record's peer.
    Disk,
    /// Forward the connections to the record's peer, unencrypted.
    Forward,
}

/// A [`Promise`], for another process.
#[derive(Debug, Serialize, Deserialize)]
pub struct SessionOrder {
    hello: Hello,
    token: String,
    /// DER.
    certificate: Vec<u8>,
    peer: String,
}

impl From<Promise> for SessionOrder {
    fn from(promise: Promise) -> Self {
        let Promise { hello, token, owner, peer } = promise;
        Self { hello, token, certificate: owner.certificate().to_vec(), peer }
    }
}

impl From<SessionOrder> for Promise {
    fn from(order: SessionOrder) -> Self {
        let SessionOrder { hello, token, certificate, peer } = order;
        Self { hello, token, owner: Peer::of_certificate(&certificate), peer }
    }
}
