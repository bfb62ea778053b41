//! The settings of a source relay.

use crate::auto::AutoConfig;
use codec::Settings;
use qpl::Qpl;
use session::{Histories, Setup};
use std::sync::Arc;
use std::time::Duration;
use stream::Token;
use tls::Connector;
use turns::Turns;

/// The usual [`SourceConfig::setup_timeout`]. QEMU prepares its RAM in this time: that takes
/// seconds, and perhaps more for a VM of several TB or on a host without CPU time.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// The usual [`SourceConfig::answer_timeout`].
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Gets the bytes of the source QEMU's streams, beside the migration.
pub trait PageSink: std::fmt::Debug + Send + Sync {
    /// Looks at a chunk of a stream: its bytes, their tokens, the page size in bytes, and the bytes
    /// of the VM's RAM (0 until the stream has stated them). A reader of the source QEMU waits
    /// until this returns.
    fn chunk(&self, bytes: &[u8], tokens: &[Token], page_size: usize, ram: u64);
}

/// The settings of a source relay.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// HOST:PORT of `platen receive`.
    pub peer: String,
    /// Secures the links; without it memory is sent unencrypted.
    pub connector: Option<Connector>,
    /// Codec and level, unless `auto` chooses.
    pub settings: Settings,
    /// Choose codec and level for each chunk, by the capacity of link and CPU.
    pub auto: Option<AutoConfig>,
    /// Codec threads, at least 1.
    pub compress_threads: usize,
    /// QEMU's compress-wait-thread: wait for a codec thread, or send the chunk raw.
    pub compress_wait_thread: bool,
    /// The most bytes per second that all links write together, as a network interface counts
    /// them; `None` for no limit.
    pub max_bandwidth: Option<u64>,
    /// The turns among the sessions of other processes.
    pub turns: Option<Arc<Turns>>,
    /// TCP connections, 1 to 64.
    pub links: u16,
    /// Page size of the guest, bytes.
    pub page_size: u32,
    /// The name of the peer's target.
    pub name: Option<String>,
    /// Settings that the peer passes to its QEMU.
    pub setup: Option<Setup>,
    /// How long to wait for a link when all are lost; zero ends the migration with the first lost
    /// link.
    pub resume: Duration,
    /// How long a link may be without bytes before it is lost: [`session::SILENCE`].
    pub silence: Duration,
    /// How long to wait for a peer that cannot be reached yet; zero makes one attempt.
    pub connect_timeout: Duration,
    /// How long to wait for a peer that accepts connections and is too busy for its half of TLS,
    /// which one attempt gives 5 s, or that got this end's half or hello too late; zero makes one
    /// attempt.
    pub answer_timeout: Duration,
    /// The longest silence of a source QEMU between the header of its stream and its RAM. QEMU 11.1
    /// that is cancelled there can wait for its connection to end while its VM stands still.
    pub setup_timeout: Duration,
    /// Bytes of memory, here and at the peer, for the last version of pages sent, so that a page
    /// sent again goes as its difference; 0 for none. With `auto` only while the link is the
    /// bottleneck.
    pub delta_cache: u64,
    /// Gets the pages that QEMU sends.
    pub pages: Option<Arc<dyn PageSink>>,
    /// The most pages that the peer has already and that this end remembers (W29b), at most
    /// [`delta::MAX_SEED`]; 0 for none.
    pub seed: u32,
    /// Bytes of memory, here and at the peer, for what zstd may refer to of the chunks before
    /// (W29a); 0 for none.
    pub history: u64,
    /// libqpl, for codec qpl; without it, and for what it does not do, libdeflate compresses.
    pub qpl: Option<Qpl>,
}

/// The levels of zstd that `auto` uses with a history.
pub(super) const AUTO_HISTORY_LEVELS: [i32; 2] = [6, 9];

impl SourceConfig {
    /// How many levels of zstd have histories: that of a named codec, or those of `auto`.
    pub(super) fn history_levels(&self) -> usize {
        match &self.auto {
            Some(_) => AUTO_HISTORY_LEVELS.len(),
            None => usize::from(self.settings.with_history().has_history()),
        }
    }

    /// How many histories this source can use: for each codec thread one of each level.
    pub fn history_count(&self) -> usize {
        self.history_levels() * self.compress_threads.max(1)
    }

    /// The histories to ask for; `None` if the memory for them is too little.
    pub fn histories(&self) -> Option<Histories> {
        Histories::sized(self.history_count(), self.history)
    }
}
