//! The settings of a receiver, and the trait of its application.

use crate::destination::Destination;
use crate::qemu_socket::{QemuAddress, QemuSocket};
use qat::Qat;
use session::{Grants, Hello};
use std::sync::Arc;
use std::time::Duration;
use tls::Acceptor;

/// Settings of a receiver.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The address of each named QEMU; `None` is the target of a peer that gives no name.
    pub targets: Vec<(Option<String>, QemuAddress)>,
    /// Secures the links and decides which certificates are accepted. Without it every peer is
    /// accepted, and links are not encrypted.
    pub acceptor: Option<Acceptor>,
    /// Codec threads, at least 1.
    pub decompress_threads: usize,
    /// A device for units of codec qatzip. Software decodes the others.
    pub qat: Option<Arc<Qat>>,
    /// Page size of the guests, bytes.
    pub page_size: u32,
    /// The grants to a peer.
    pub grants: Grants,
    /// The most bytes of delta cache for a session; 0 for none.
    pub delta_cache: u64,
    /// Pages that this host has already, and that a source need not send (W29b).
    pub seed: Option<Arc<dyn delta::Seed>>,
    /// The most bytes of a session's histories (W29a); 0 for none.
    pub history: u64,
    /// How long to wait for a source whose links are all lost; zero ends its migration with the
    /// first lost link.
    pub resume: Duration,
    /// How long a link may be without bytes before it is lost: [`session::SILENCE`].
    pub silence: Duration,
}

/// The application's part in a session. The session's own thread calls it.
pub trait Host: Send + Sync + 'static {
    /// Whether sessions carry NBD connections (W35) and no migrations.
    fn is_for_disks(&self) -> bool {
        false
    }
    /// Prepares QEMU for a peer that requests `target`.
    ///
    /// # Errors
    /// A message for the peer's user.
    fn prepare(&self, target: &Option<String>, hello: &Hello) -> Result<(), String>;
    /// Makes QEMU listen if it does not yet. Called when the migration's first bytes have arrived.
    /// Such a call has ended when [`Destination::run`] returns, and none comes after that.
    ///
    /// # Errors
    /// A message for the peer's user.
    fn listen(&self, target: &Option<String>) -> Result<(), String> {
        let _ = target;
        Ok(())
    }
    /// Inspects a connection to QEMU that was just made. An error closes the connection before its
    /// first byte, and ends the migration.
    ///
    /// # Errors
    /// A message for the peer's user.
    fn connected(&self, socket: &QemuSocket) -> Result<(), String> {
        let _ = socket;
        Ok(())
    }
    /// Runs the migration to its end with [`Destination::run`] and reports it.
    fn serve(&self, target: &Option<String>, destination: &Destination);
    /// Reports a message for the user.
    fn notice(&self, text: &str);
}
