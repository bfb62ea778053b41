//! What a source relay is told.

use crate::auto::AutoConfig;
use codec::Settings;
use session::Setup;
use std::time::Duration;
use tls::Connector;

/// What a source relay is told.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// HOST:PORT of `platen receive`.
    pub peer: String,
    /// Secures the links; none sends memory in the clear.
    pub connector: Option<Connector>,
    /// Codec and level, unless `auto` chooses.
    pub settings: Settings,
    /// Codec and level are chosen for each chunk, by what link and CPU have to spare.
    pub auto: Option<AutoConfig>,
    /// Codec threads, at least 1.
    pub compress_threads: usize,
    /// QEMU's compress-wait-thread: wait for a codec thread, or send the chunk as it is.
    pub compress_wait_thread: bool,
    /// TCP connections, 1 to 64.
    pub links: u16,
    /// Page size of the guest, bytes.
    pub page_size: u32,
    /// Which of the peer's targets.
    pub name: Option<String>,
    /// What the peer should tell its QEMU.
    pub setup: Option<Setup>,
    /// How long to wait for a link when all are lost; zero ends the migration with the first that
    /// is lost.
    pub resume: Duration,
    /// How long to wait for a peer that cannot be reached yet; zero is one attempt.
    pub connect_timeout: Duration,
    /// Bytes of memory, here and at the peer, for pages as they were sent last, so that one that is
    /// sent again goes as its difference; 0 for none. With `auto` only while the link is what holds
    /// the migration up.
    pub delta_cache: u64,
}
