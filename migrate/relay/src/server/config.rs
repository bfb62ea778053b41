//! The settings of a receiver, and its application's side.

use crate::destination::Destination;
use crate::unix::UnixAddress;
use qat::Qat;
use session::{Grants, Hello};
use std::sync::Arc;
use std::time::Duration;
use tls::Acceptor;

/// Settings of a receiver.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Where each named QEMU listens; `None` is the target of a peer that gives no name.
    pub targets: Vec<(Option<String>, UnixAddress)>,
    /// Secures the links and decides which certificates may deliver; without it any peer may, and
    /// links are not encrypted.
    pub acceptor: Option<Acceptor>,
    /// Codec threads, at least 1.
    pub decompress_threads: usize,
    /// A device for units of codec qatzip; without it, and for what it does not do, software.
    pub qat: Option<Arc<Qat>>,
    /// Page size of the guests, bytes.
    pub page_size: u32,
    /// What peers may have in flight.
    pub grants: Grants,
    /// Bytes of delta cache that a session may have here at most; 0 for none.
    pub delta_cache: u64,
    /// How long to wait for a source whose links are all lost; zero ends its migration with the
    /// first that is lost.
    pub resume: Duration,
}

/// What the application does around a session. Called from the session's own thread.
pub trait Host: Send + Sync + 'static {
    /// A peer wants to deliver to `target`: make QEMU ready for it.
    ///
    /// # Errors
    /// A sentence for the peer's user.
    fn prepare(&self, target: &Option<String>, hello: &Hello) -> Result<(), String>;
    /// The migration's first bytes are there: has QEMU listen for them, where it does not yet.
    ///
    /// # Errors
    /// A sentence for the peer's user.
    fn listen(&self, target: &Option<String>) -> Result<(), String> {
        let _ = target;
        Ok(())
    }
    /// Runs the migration to its end with [`Destination::run`] and reports it.
    fn serve(&self, target: &Option<String>, destination: &Destination);
    /// Something a person should read.
    fn notice(&self, text: &str);
}
