//! What the threads of a source relay share: QEMU's connections, and what is known of where the VM
//! may run.

use super::encode::EncodeJob;
use super::keeper::Keeper;
use crate::accelerator::AcceleratorCounters;
use crate::auto::Auto;
use crate::counters::Counters;
use crate::inbox::Arrived;
use crate::postcopy::{SharedSwitchover, Switchover};
use crate::sockets::is_open;
use crate::unix::Listening;
use codec::Settings;
use pipeline::{Results, Submitter};
use ring::Ring;
use rustix::net::{recv, RecvFlags};
use session::{Session, SessionError, MAX_STREAMS};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{fence, AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
use stream::{Kind, Token};

/// A multifd channel's init packet, which QEMU writes at once (section 1.5 of the stream's
/// description).
const FIRST_BYTES: usize = 64;

/// What the threads tell the one that decides.
pub(super) enum Event {
    /// A connection of the source QEMU has ended.
    SourceEof { is_main: bool },
    /// SHUT was handed to the source QEMU.
    Shut(u32),
    /// SHUT was to be handed over, but the source QEMU was gone.
    ShutRefused,
    /// The destination QEMU has closed its main connection.
    DestinationEof,
    /// A stream's return path will bring nothing more.
    BackDone,
    /// The session ended before its time.
    Closed(Arc<SessionError>),
    /// The peer's report.
    Finished(Vec<u8>),
    /// Something a person should read.
    Notice(String),
    /// Somebody wants it to end.
    Stop,
}

/// One connection of the source QEMU.
pub(super) struct SourceStream {
    pub(super) id: u16,
    pub(super) socket: UnixStream,
    /// Set once its first bytes are there.
    pub(super) kind: OnceLock<Kind>,
    /// Frames of the return path.
    pub(super) results: OnceLock<Arc<Results<Arrived>>>,
}

pub(super) struct Shared {
    pub(super) session: Arc<Session>,
    pub(super) submitter: Submitter<EncodeJob>,
    pub(super) spare: Arc<Ring<Vec<Token>>>,
    pub(super) counters: Arc<Counters>,
    /// Of each codec thread's accelerator.
    pub(super) accelerators: Vec<AcceleratorCounters>,
    pub(super) settings: Settings,
    pub(super) auto: Option<Arc<Auto>>,
    pub(super) page_size: usize,
    /// Bytes granted for a delta cache, until a stream has taken it.
    pub(super) delta_cache: AtomicU64,
    pub(super) streams: Mutex<Vec<Arc<SourceStream>>>,
    pub(super) listening: OnceLock<Listening>,
    /// Starts the thread that reads a connection to its end.
    pub(super) read: fn(&Arc<Shared>, &Arc<SourceStream>),
    pub(super) events: Sender<Event>,
    /// The end of the stream has begun, and a STILL_OPEN is on its way to the links.
    pub(super) tail_read: AtomicBool,
    /// A STILL_OPEN was given to a link: the destination may run from now on (W23).
    pub(super) still_open_sent: AtomicBool,
    pub(super) return_path: AtomicBool,
    /// The main stream has announced that it may turn to postcopy, or is one that goes on.
    pub(super) postcopy: AtomicBool,
    /// The source QEMU is in postcopy for good: its VM runs no more, and a closed socket pauses the
    /// migration.
    pub(super) switched: AtomicBool,
    /// How far what was read of the main stream is from that; none without postcopy.
    pub(super) switchover: SharedSwitchover,
    /// Holds QEMU's main socket while this process must not be the only one that does.
    pub(super) keeper: OnceLock<Keeper>,
    /// It has the socket, to be held whatever comes on it.
    pub(super) keeper_has_socket: AtomicBool,
    /// SHUT(0) is being handed to the source QEMU, which may close its socket before we can say
    /// that it is done.
    pub(super) handing_shut: AtomicBool,
    /// Return paths being handed back.
    pub(super) return_paths: AtomicUsize,
    /// The migration is over, or will be: no new connections, readers end quietly.
    pub(super) over: AtomicBool,
    pub(super) started: OnceLock<Instant>,
}

impl Shared {
    pub(super) fn lock_streams(&self) -> MutexGuard<'_, Vec<Arc<SourceStream>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts every connection that waits. Holding the lock over `accept` makes it a barrier:
    /// whoever calls this after QEMU connected knows the connection.
    pub(super) fn accept_waiting(self: &Arc<Self>) {
        let Some(listening) = self.listening.get() else { return };
        let mut streams = self.lock_streams();
        while let Ok((socket, _)) = listening.listener.accept() {
            if streams.len() >= MAX_STREAMS || socket.set_nonblocking(false).is_err() {
                // QEMU opens at most 257; it sees a closed socket and fails the migration.
                continue;
            }
            let _ = self.started.set(Instant::now());
            let id = u16::try_from(streams.len()).unwrap_or(u16::MAX);
            let stream = Arc::new(SourceStream {
                id,
                socket,
                kind: OnceLock::new(),
                results: OnceLock::new(),
            });
            streams.push(stream.clone());
            (self.read)(self, &stream);
        }
    }

    /// What a connection is, by its first bytes; `None` while they are not there.
    pub(super) fn classify(&self, stream: &SourceStream) -> Option<Kind> {
        if let Some(kind) = stream.kind.get() {
            return Some(*kind);
        }
        let mut first = [0; FIRST_BYTES];
        let (_, got) =
            recv(&stream.socket, &mut first[..], RecvFlags::PEEK | RecvFlags::DONTWAIT).ok()?;
        let kind = match stream::classify(&first[..got])? {
            // Records of RAM have no magic, and there is one main connection.
            Kind::Other | Kind::Recovery if self.postcopy.load(Ordering::Acquire) => Kind::Preempt,
            kind => kind,
        };
        Some(*stream.kind.get_or_init(|| kind))
    }

    /// Multifd channels there are now (W18).
    pub(super) fn multifd_channels(self: &Arc<Self>) -> u32 {
        self.accept_waiting();
        let streams = self.lock_streams();
        let multifd = streams.iter().filter(|stream| self.classify(stream) == Some(Kind::Multifd));
        u32::try_from(multifd.count()).unwrap_or(0)
    }

    /// What keeps the pages of a stream of this kind, if anything does: a single stream alone has
    /// an order that both ends know (W29).
    pub(super) fn deltas(&self, kind: Kind) -> Option<delta::Sender> {
        let granted = match kind {
            Kind::Main => self.delta_cache.swap(0, Ordering::AcqRel),
            _ => 0,
        };
        (granted > 0).then(|| delta::Sender::new(granted, self.page_size))
    }

    /// Whether they are worth their CPU time now.
    pub(super) fn wants_deltas(&self) -> bool {
        self.auto.as_ref().is_none_or(|auto| auto.wants_deltas())
    }

    /// Ends every connection of QEMU. A source whose sockets close before SHUT goes on running its
    /// VM.
    pub(super) fn close_sockets(&self) {
        for stream in self.lock_streams().iter() {
            let _ = stream.socket.shutdown(Shutdown::Both);
        }
    }

    /// Lets the threads that write return paths end.
    pub(super) fn close_return_paths(&self) {
        for stream in self.lock_streams().iter() {
            if let Some(results) = stream.results.get() {
                results.close();
            }
        }
    }

    /// Whether the source QEMU still has its main connection open.
    pub(super) fn main_is_open(&self) -> bool {
        let streams = self.lock_streams();
        let mut main =
            streams.iter().filter(|stream| stream.kind.get().is_some_and(|kind| kind.is_main()));
        main.any(|stream| is_open(&stream.socket))
    }

    /// Whether the source QEMU is in postcopy for good.
    pub(super) fn has_switched(&self) -> bool {
        self.switched.load(Ordering::Acquire)
    }

    /// Whether the destination may have all that starts its VM. While the source QEMU has not
    /// written the whole packaged state it has not, whatever was said of the part before: with its
    /// socket closed, QEMU fails in that write and its own VM goes on. Once the session has failed,
    /// what was not there before goes nowhere.
    pub(super) fn may_run_there(&self) -> bool {
        let complete = || self.switchover.get().is_none_or(Switchover::is_packaged);
        self.has_switched() || self.still_open_sent.load(Ordering::Acquire) && complete()
    }

    /// The destination may have what starts its VM from now on: until the source has heard of it,
    /// or cannot start its own any more, its socket must stay open even if this process dies.
    pub(super) fn guard(&self, stream: &SourceStream, switchover: Option<Switchover>) {
        let Some(keeper) = self.keeper.get() else { return };
        // In postcopy each time, as what is still to come gets less.
        if switchover.is_some() || !self.keeper_has_socket.swap(true, Ordering::AcqRel) {
            if let Err(error) = keeper.hold(&stream.socket, switchover) {
                // It leaves what there is without one.
                let _ = self.events.send(Event::Notice(format!(
                    "the process that would keep QEMU's socket if this relay were killed has gone ({error}): if it is \
                     killed before the destination has answered, look there before the source VM goes on"
                )));
            }
        }
    }

    /// The source QEMU is in postcopy for good.
    pub(super) fn set_switched(&self) {
        if !self.switched.swap(true, Ordering::AcqRel) {
            // As in `Sink::still_open`: either what shows the switch stays here, as the session has
            // failed, or whoever decides what that means sees the flag.
            fence(Ordering::SeqCst);
            if let Some(keeper) = self.keeper.get() {
                keeper.release();
            }
        }
    }
}
