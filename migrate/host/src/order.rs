//! Messages of the service to a carrier.

use crate::config::Config;
use crate::record::Record;
use relay::Promise;
use serde::{Deserialize, Serialize};
use session::Hello;
use tls::Peer;

/// A message of the service. Some messages come with a descriptor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Comes with a connection of QEMU.
    Connection,
    /// Comes with the listening socket of the door.
    Listener,
    /// Comes with the memory through which all migrations that leave this host share their limit.
    Turns,
    /// Everything has been sent: run the migration.
    Carry(Box<Job>),
    /// Comes with a connection of the other host's service; names that host's address.
    Link(String),
    /// Another source wants the place: end the session if its source is gone and has not begun
    /// (W4d).
    GiveWay,
}

/// The task of a carrier.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    /// The configuration.
    pub config: Config,
    /// Name of this host in the configuration.
    pub me: String,
    /// The record of the migration as it begins.
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

/// A [`Promise`], in a form for another process.
#[derive(Debug, Serialize, Deserialize)]
pub struct SessionOrder {
    hello: Hello,
    token: String,
    /// The certificate of the session's owner, DER.
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
