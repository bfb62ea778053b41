//! The state that the threads of a source relay share: QEMU's connections, and where the VM may
//! run.

mod connections;
mod handover;

use super::channel_deltas::ChannelDeltas;
use super::config::PageSink;
use super::encode::EncodeJob;
use super::keeper::Keeper;
use crate::auto::Auto;
use crate::counters::Counters;
use crate::entrance::Entrance;
use crate::error::RelayError;
use crate::inbox::Arrived;
use crate::postcopy::SharedSwitchover;
use crate::qemu_socket::QemuSocket;
use codec::Settings;
use delta::Known;
use pipeline::{Results, Submitter};
use ring::Ring;
use session::{Header, Session, SessionError};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};
use stream::{Kind, Token, Tokeniser};

/// How long a QEMU that has its answer, or a peer that has this end's report, may take to close its
/// side.
pub(super) const FAREWELL: Duration = Duration::from_secs(10);
/// How long waiting connections may be impossible to accept.
pub(super) const UNACCEPTED: Duration = Duration::from_secs(10);

/// Events for the deciding thread.
pub(super) enum Event {
    /// A connection of the source QEMU has ended.
    SourceEof { is_main: bool },
    /// SHUT was written to the source QEMU.
    Shut(u32),
    /// SHUT was to be written, but the source QEMU had closed.
    ShutRefused(u32),
    /// The destination QEMU has closed its main connection.
    DestinationEof,
    /// A stream's return path has ended.
    BackDone,
    /// The session ended early.
    Closed(Arc<SessionError>),
    /// The peer's report.
    Finished(Vec<u8>),
    /// A message for the user.
    Notice(String),
    /// The relay has to end: at the user's request, or for the reason given.
    Stop(Option<String>),
    /// The relay cannot continue, for this reason.
    Fatal(RelayError),
}

/// A connection to the relay's socket. It becomes a stream once its first bytes show that it
/// belongs to the migration.
pub(super) struct Connection {
    pub(super) socket: QemuSocket,
    kind: OnceLock<Kind>,
}

impl Connection {
    /// Takes the connection for the preempt channel, which may never carry a byte.
    pub(super) fn set_preempt(&self) -> Kind {
        *self.kind.get_or_init(|| Kind::Preempt)
    }
}

/// One stream of the migration.
pub(super) struct SourceStream {
    pub(super) id: u16,
    pub(super) connection: Arc<Connection>,
    pub(super) kind: Kind,
    /// Frames of the return path.
    pub(super) results: OnceLock<Arc<Results<Arrived>>>,
    /// The parser of a reader that has ended: from then on another thread may read the socket.
    pub(super) read_by: OnceLock<Tokeniser>,
}

impl SourceStream {
    pub(super) fn socket(&self) -> &QemuSocket {
        &self.connection.socket
    }
}

/// Why a connection is not a stream of this migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// It would start a migration while another one runs.
    Second,
    /// The migration has a preempt channel.
    SecondPreempt,
    /// Its first bytes are not QEMU's.
    Stranger,
    /// More streams than the protocol has numbers for.
    TooMany,
}

/// The accepted connections.
#[derive(Default)]
pub(super) struct Connections {
    /// Not a stream yet; the oldest is first.
    waiting: Vec<Arc<Connection>>,
    /// Those of `waiting` that no thread reads yet, because the system has refused it.
    unread: Vec<Arc<Connection>>,
    /// Indexed by stream number.
    streams: Vec<Arc<SourceStream>>,
}

/// Whether the source QEMU is being told to cancel: then no STILL_OPEN is sent, nor bytes that show
/// that the source is in postcopy.
#[derive(Debug, Default)]
pub(super) struct Cancelling {
    is_told: bool,
    /// The STILL_OPENs that were not sent for that, or because the source QEMU had closed its
    /// socket. The receiver waits for their places in the sequence if the session goes on.
    withheld: Vec<Header>,
}

/// The pages that the peer has already (W29b).
#[derive(Debug)]
pub(super) struct SeedSlots {
    pub(super) is_wanted: bool,
    /// The peer has said that offers come.
    pub(super) is_promised: bool,
    /// The slot of the first page.
    pub(super) base: u32,
    pub(super) known: RwLock<Known>,
}

impl SeedSlots {
    /// Whether the last offer has come.
    pub(super) fn is_complete(&self) -> bool {
        self.known.read().unwrap_or_else(PoisonError::into_inner).is_complete()
    }

    /// The pages offered so far; `None` if there are none.
    pub(super) fn known(&self) -> Option<RwLockReadGuard<'_, Known>> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        Some(known).filter(|known| !known.is_empty())
    }
}

pub(super) struct Shared {
    pub(super) session: Arc<Session>,
    pub(super) submitter: Submitter<EncodeJob>,
    pub(super) spare: Arc<Ring<Vec<Token>>>,
    pub(super) counters: Arc<Counters>,
    /// The counters of each codec thread with an accelerator.
    pub(super) accelerators: Vec<Arc<qat::Counters>>,
    /// The counters of each codec thread with libqpl.
    pub(super) qpl: Vec<Arc<qpl::Counters>>,
    pub(super) settings: Settings,
    pub(super) auto: Option<Arc<Auto>>,
    pub(super) page_size: usize,
    /// As in [`super::SourceConfig`].
    pub(super) setup_timeout: Duration,
    /// Bytes granted for a delta cache; 0 once a stream has taken them.
    pub(super) delta_cache: AtomicU64,
    /// The cache of multifd channels, instead of the main stream's.
    pub(super) channel_deltas: ChannelDeltas,
    /// The CPU time of all streams for pages that are stored or looked up in vain.
    pub(super) delta_budget: delta::Budget,
    pub(super) seed: SeedSlots,
    /// As in [`super::SourceConfig`].
    pub(super) pages: Option<Arc<dyn PageSink>>,
    pub(super) connections: Mutex<Connections>,
    pub(super) entrance: OnceLock<Arc<dyn Entrance>>,
    /// Connections that were closed because they did not belong to the migration.
    pub(super) refused: AtomicU32,
    /// Starts the thread that reads a connection to its end.
    pub(super) read: fn(&Arc<Shared>, &Arc<Connection>) -> io::Result<()>,
    pub(super) events: Sender<Event>,
    /// The end of the stream has begun, and a STILL_OPEN is queued or about to be.
    pub(super) tail_read: AtomicBool,
    /// A STILL_OPEN was given to a link: the destination may run from now on (W23).
    pub(super) still_open_sent: AtomicBool,
    /// Locked while `still_open_sent` and `switched` are set, so that a cancel or one of them comes
    /// first.
    pub(super) cancelling: Mutex<Cancelling>,
    /// Without a return path: the stream was read to its end, and EOF sent.
    pub(super) ended_whole: AtomicBool,
    pub(super) return_path: AtomicBool,
    /// The bytes written to the source QEMU's main connection end with a whole message.
    pub(super) between_messages: AtomicBool,
    /// The main stream has announced that it may switch to postcopy, or is a recovered one.
    pub(super) postcopy: AtomicBool,
    /// The source may open a preempt channel, and every other connection of it has written by now:
    /// a silent one is that channel.
    pub(super) only_preempt_is_silent: AtomicBool,
    /// The source QEMU is in postcopy for good: it does not run its VM any more, and a closed
    /// socket pauses the migration.
    pub(super) switched: AtomicBool,
    /// The source QEMU in postcopy has ended within its last section of RAM, or was not read to its
    /// end: the destination does not get all memory.
    pub(super) cut_short: AtomicBool,
    /// How far the source QEMU is from `switched`, or behind it; none without postcopy.
    pub(super) switchover: SharedSwitchover,
    /// The peer obeys W20c.
    pub(super) peer_awaits_pong: bool,
    /// Holds QEMU's main socket while another process than this one has to hold it too.
    pub(super) keeper: OnceLock<Keeper>,
    /// The keeper has the socket, and holds it in any case.
    pub(super) keeper_has_socket: AtomicBool,
    /// SHUT is being written to the source QEMU, which may close its socket before the event of the
    /// write has come.
    pub(super) handing_shut: AtomicBool,
    /// Return paths still being written.
    pub(super) return_paths: AtomicUsize,
    /// The migration is over, or will be: no new connections are accepted, and readers end quietly.
    pub(super) over: AtomicBool,
    pub(super) started: OnceLock<Instant>,
}

impl Shared {
    /// Reports that a connection was closed. Any process can cause any number of these: only the
    /// first ten are reported.
    pub(super) fn report_refused(&self, text: &str) {
        if self.refused.fetch_add(1, Ordering::Relaxed) < 10 {
            let _ = self.events.send(Event::Notice(text.into()));
        }
    }

    /// The delta sender for a main stream, if it may have one (W29).
    pub(super) fn main_deltas(&self) -> Option<delta::Sender> {
        let granted = self.delta_cache.swap(0, Ordering::AcqRel);
        if granted > 0 {
            return Some(delta::Sender::new(granted, self.page_size));
        }
        self.seed_deltas()
    }

    /// The delta sender for a main stream whose cache the multifd channels have.
    pub(super) fn seed_deltas(&self) -> Option<delta::Sender> {
        let without = || delta::Sender::without_cache(self.seed.base, self.page_size);
        self.seed.is_wanted.then(without)
    }

    /// The delta sender for a multifd channel, if it may have one.
    pub(super) fn multifd_deltas(&self) -> Option<delta::ChannelSender> {
        self.channel_deltas.count_channel();
        let sender = || delta::ChannelSender::new(self.seed.base, self.page_size);
        (self.seed.is_wanted || self.channel_deltas.is_granted()).then(sender)
    }

    /// Whether deltas are worth their CPU time now.
    pub(super) fn wants_deltas(&self) -> bool {
        self.auto.as_ref().is_none_or(|auto| auto.wants_deltas())
    }

    /// The pages that the peer has, if looking them up is worth its CPU time now.
    pub(super) fn known_pages(&self) -> Option<RwLockReadGuard<'_, Known>> {
        let wanted = self.auto.as_ref().is_none_or(|auto| auto.wants_seed());
        if wanted {
            self.seed.known()
        } else {
            None
        }
    }
}
