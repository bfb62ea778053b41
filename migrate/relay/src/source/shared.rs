//! The state that the threads of a source relay share: QEMU's connections, and where the VM may
//! run.

use super::encode::EncodeJob;
use super::keeper::Keeper;
use crate::auto::Auto;
use crate::counters::Counters;
use crate::entrance::Entrance;
use crate::error::RelayError;
use crate::inbox::Arrived;
use crate::postcopy::{SharedSwitchover, Switchover};
use crate::qemu_socket::QemuSocket;
use crate::sockets::is_open;
use codec::Settings;
use pipeline::{Results, Submitter};
use ring::Ring;
use rustix::net::{recv, RecvFlags};
use session::{Session, SessionError, MAX_STREAMS};
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use stream::{Kind, Token};

/// How long a QEMU that has its answer, or a peer that has our report, may take to close its side.
pub(super) const FAREWELL: Duration = Duration::from_secs(10);
/// How long waiting connections may be impossible to accept.
pub(super) const UNACCEPTED: Duration = Duration::from_secs(10);
/// Bytes of a multifd channel's init packet, which QEMU writes at once.
const FIRST_BYTES: usize = 64;
/// Connections that may wait before their kind is known: as many as QEMU can open.
const MAX_WAITING: usize = MAX_STREAMS;

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
    /// The relay cannot go on, for this reason.
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
    /// Indexed by stream number.
    streams: Vec<Arc<SourceStream>>,
}

pub(super) struct Shared {
    pub(super) session: Arc<Session>,
    pub(super) submitter: Submitter<EncodeJob>,
    pub(super) spare: Arc<Ring<Vec<Token>>>,
    pub(super) counters: Arc<Counters>,
    /// One for each codec thread with an accelerator.
    pub(super) accelerators: Vec<Arc<qat::Counters>>,
    pub(super) settings: Settings,
    pub(super) auto: Option<Arc<Auto>>,
    pub(super) page_size: usize,
    /// Bytes granted for a delta cache; 0 once a stream has taken them.
    pub(super) delta_cache: AtomicU64,
    pub(super) connections: Mutex<Connections>,
    pub(super) entrance: OnceLock<Arc<dyn Entrance>>,
    /// Connections that were closed because they did not belong to the migration.
    pub(super) refused: AtomicU32,
    /// Starts the thread that reads a connection to its end.
    pub(super) read: fn(&Arc<Shared>, &Arc<Connection>),
    pub(super) events: Sender<Event>,
    /// The end of the stream has begun, and a STILL_OPEN is queued or about to be.
    pub(super) tail_read: AtomicBool,
    /// A STILL_OPEN was given to a link: the destination may run from now on (W23).
    pub(super) still_open_sent: AtomicBool,
    /// No STILL_OPEN may be sent any more, nor what shows that the source is in postcopy: the
    /// source QEMU is being told to cancel. Locked while `still_open_sent` and `switched` are set,
    /// so that one of them comes first.
    pub(super) cancelling: Mutex<bool>,
    /// Without a return path: the stream was read to its end, and EOF sent.
    pub(super) ended_whole: AtomicBool,
    pub(super) return_path: AtomicBool,
    /// The bytes written to the source QEMU's main connection end with a whole message.
    pub(super) between_messages: AtomicBool,
    /// The main stream has announced that it may switch to postcopy, or is a recovered one.
    pub(super) postcopy: AtomicBool,
    /// The source QEMU is in postcopy for good: it does not run its VM any more, and a closed
    /// socket pauses the migration.
    pub(super) switched: AtomicBool,
    /// How far the bytes read from the main stream are from that; none without postcopy.
    pub(super) switchover: SharedSwitchover,
    /// Holds QEMU's main socket while this process must not be the only one to do so.
    pub(super) keeper: OnceLock<Keeper>,
    /// The keeper has the socket, to hold it in any case.
    pub(super) keeper_has_socket: AtomicBool,
    /// SHUT is being written to the source QEMU, which may close its socket before the event of the
    /// write has come.
    pub(super) handing_shut: AtomicBool,
    /// Return paths still being written.
    pub(super) return_paths: AtomicUsize,
    /// The migration is over, or will be: no new connections, readers end quietly.
    pub(super) over: AtomicBool,
    pub(super) started: OnceLock<Instant>,
}

impl Shared {
    fn lock_connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The streams so far, by number.
    pub(super) fn streams(&self) -> Vec<Arc<SourceStream>> {
        self.lock_connections().streams.clone()
    }

    /// Stream `id`, if there is one.
    pub(super) fn stream(&self, id: u16) -> Option<Arc<SourceStream>> {
        self.lock_connections().streams.get(usize::from(id)).cloned()
    }

    /// Whether the migration has begun.
    pub(super) fn has_main(&self) -> bool {
        self.lock_connections().streams.iter().any(|stream| stream.kind.is_main())
    }

    /// Accepts every waiting connection. The lock is held across `accept`: a connection that QEMU
    /// made before the call is in `connections` after it.
    ///
    /// # Errors
    /// A connection waits and cannot be accepted.
    pub(super) fn accept_waiting(self: &Arc<Self>) -> io::Result<()> {
        let Some(entrance) = self.entrance.get() else { return Ok(()) };
        loop {
            let mut connections = self.lock_connections();
            if self.over.load(Ordering::Acquire) {
                return Ok(());
            }
            let socket = match entrance.accept() {
                Ok(socket) => socket,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(()),
                    // The connection was reset before it was accepted.
                    ErrorKind::ConnectionAborted | ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                },
            };
            socket.set_nonblocking(false)?;
            let connection = Arc::new(Connection { socket, kind: OnceLock::new() });
            if connections.waiting.len() >= MAX_WAITING {
                // QEMU's connections write at once, so the oldest is the least likely to be QEMU's.
                let oldest = connections.waiting.remove(0);
                let _ = oldest.socket.shutdown(Shutdown::Both);
                self.report_refused(&format!(
                    "{MAX_WAITING} connections have written nothing: closed the oldest of them"
                ));
            }
            connections.waiting.push(connection.clone());
            drop(connections);
            (self.read)(self, &connection);
        }
    }

    /// The kind of a connection, by its first bytes; `None` before they arrive.
    pub(super) fn classify(&self, connection: &Connection) -> Option<Kind> {
        if let Some(kind) = connection.kind.get() {
            return Some(*kind);
        }
        let mut first = [0; FIRST_BYTES];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (_, got) = recv(&connection.socket, &mut first[..], flags).ok()?;
        let kind = match stream::classify(&first[..got])? {
            // RAM records have no magic, and there is only one main connection.
            Kind::Other | Kind::Recovery if self.postcopy.load(Ordering::Acquire) => Kind::Preempt,
            kind => kind,
        };
        Some(*connection.kind.get_or_init(|| kind))
    }

    /// Makes a connection of this kind a stream of the migration.
    pub(super) fn admit(
        &self,
        connection: &Arc<Connection>,
        kind: Kind,
    ) -> Result<Arc<SourceStream>, Refused> {
        let mut connections = self.lock_connections();
        connections.waiting.retain(|waiting| !Arc::ptr_eq(waiting, connection));
        if kind == Kind::Other {
            return Err(Refused::Stranger);
        }
        // A VM's memory must not reach another VM's QEMU.
        if kind.is_main() && connections.streams.iter().any(|stream| stream.kind.is_main()) {
            return Err(Refused::Second);
        }
        if connections.streams.len() >= MAX_STREAMS {
            return Err(Refused::TooMany);
        }
        let _ = self.started.set(Instant::now());
        let stream = Arc::new(SourceStream {
            id: u16::try_from(connections.streams.len()).unwrap_or(u16::MAX),
            connection: connection.clone(),
            kind,
            results: OnceLock::new(),
        });
        connections.streams.push(stream.clone());
        Ok(stream)
    }

    /// Reports that a connection was closed. Any process can cause any number of these: only the
    /// first ten are reported.
    pub(super) fn report_refused(&self, text: &str) {
        if self.refused.fetch_add(1, Ordering::Relaxed) < 10 {
            let _ = self.events.send(Event::Notice(text.into()));
        }
    }

    /// Removes a connection that ended before it was a stream.
    pub(super) fn remove_waiting(&self, connection: &Arc<Connection>) {
        let mut connections = self.lock_connections();
        connections.waiting.retain(|waiting| !Arc::ptr_eq(waiting, connection));
    }

    /// The number of multifd channels now (W18).
    ///
    /// # Errors
    /// A connection waits and cannot be accepted.
    pub(super) fn multifd_channels(self: &Arc<Self>) -> io::Result<u32> {
        self.accept_waiting()?;
        let connections = self.lock_connections();
        let streams = connections.streams.iter().map(|stream| &stream.connection);
        let all = streams.chain(&connections.waiting);
        let multifd = all.filter(|one| self.classify(one) == Some(Kind::Multifd)).count();
        Ok(u32::try_from(multifd).unwrap_or(0))
    }

    /// The delta sender for a stream of this kind, if it may have one: only a single stream has an
    /// order that both ends know (W29).
    pub(super) fn deltas(&self, kind: Kind) -> Option<delta::Sender> {
        let granted = match kind {
            Kind::Main => self.delta_cache.swap(0, Ordering::AcqRel),
            _ => 0,
        };
        (granted > 0).then(|| delta::Sender::new(granted, self.page_size))
    }

    /// Whether deltas are worth their CPU time now.
    pub(super) fn wants_deltas(&self) -> bool {
        self.auto.as_ref().is_none_or(|auto| auto.wants_deltas())
    }

    /// Ends every connection, also one in whose write QEMU waits. A source whose sockets close
    /// before SHUT goes on running its VM.
    pub(super) fn abort_sockets(&self) {
        self.each_connection(QemuSocket::abort);
    }

    /// Ends every connection in order: QEMU still reads what was written to it.
    pub(super) fn close_sockets(&self) {
        self.each_connection(|socket| {
            let _ = socket.shutdown(Shutdown::Both);
        });
    }

    fn each_connection(&self, end: impl Fn(&QemuSocket)) {
        let connections = self.lock_connections();
        let streams = connections.streams.iter().map(|stream| &stream.connection);
        for connection in streams.chain(&connections.waiting) {
            end(&connection.socket);
        }
    }

    /// Lets the threads that write return paths end.
    pub(super) fn close_return_paths(&self) {
        for stream in self.streams() {
            if let Some(results) = stream.results.get() {
                results.close();
            }
        }
    }

    /// Whether the source QEMU still has its main connection open.
    pub(super) fn main_is_open(&self) -> bool {
        self.streams().iter().any(|stream| stream.kind.is_main() && is_open(stream.socket()))
    }

    /// Whether the source QEMU is in postcopy for good.
    pub(super) fn has_switched(&self) -> bool {
        self.switched.load(Ordering::Acquire)
    }

    /// Whether the destination may have all bytes that start its VM. Not before the source QEMU has
    /// written the whole packaged state, even if a STILL_OPEN was sent for a part of it: with its
    /// socket closed, QEMU fails in that write and its own VM goes on. After the session has
    /// failed, no further bytes are sent.
    pub(super) fn may_run_there(&self) -> bool {
        let complete = || self.switchover.get().is_none_or(Switchover::is_packaged);
        self.has_switched() || self.still_open_sent.load(Ordering::Acquire) && complete()
    }

    /// Called before the source QEMU is told to cancel, which starts its VM again: from here on no
    /// bytes that start the destination's VM are sent. False when they may have been sent already.
    pub(super) fn forbid_commit(&self) -> bool {
        let mut cancelling = self.cancelling.lock().unwrap_or_else(PoisonError::into_inner);
        if self.may_run_there() {
            return false;
        }
        *cancelling = true;
        true
    }

    /// The source QEMU has refused to cancel.
    pub(super) fn allow_commit(&self) {
        *self.cancelling.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Records that a STILL_OPEN goes to a link now. False when it must not.
    pub(super) fn commit(&self) -> bool {
        let cancelling = self.cancelling.lock().unwrap_or_else(PoisonError::into_inner);
        if !*cancelling {
            self.still_open_sent.store(true, Ordering::Release);
        }
        !*cancelling
    }

    /// From now on the destination may have the bytes that start its VM. Until the source is
    /// informed, or cannot start its own VM any more, its socket must stay open even if this
    /// process dies.
    pub(super) fn guard(&self, stream: &SourceStream, switchover: Option<Switchover>) {
        let Some(keeper) = self.keeper.get() else { return };
        // In postcopy at every call, since the remaining bytes become fewer.
        if switchover.is_some() || !self.keeper_has_socket.swap(true, Ordering::AcqRel) {
            if let Err(error) = keeper.hold(stream.socket(), switchover) {
                // The migration goes on without a keeper.
                let _ = self.events.send(Event::Notice(format!(
                    "the process that would keep QEMU's socket if this relay were killed has gone ({error}): if it is \
                     killed before the destination has answered, look there before the source VM goes on"
                )));
            }
        }
    }

    /// Records that the bytes to be sent next show that the source QEMU is in postcopy for good, at
    /// which the destination starts the VM. False when they must not be sent: the source QEMU is
    /// being told to cancel (W20b).
    pub(super) fn switch(&self) -> bool {
        if self.has_switched() {
            return true;
        }
        let cancelling = self.cancelling.lock().unwrap_or_else(PoisonError::into_inner);
        if !*cancelling {
            self.set_switched();
        }
        !*cancelling
    }

    /// Records that the source QEMU is in postcopy for good.
    pub(super) fn set_switched(&self) {
        if !self.switched.swap(true, Ordering::AcqRel) {
            // As in `Sink::still_open`: either the session has failed and the bytes that show the
            // switch are not sent, or `decision` sees the flag.
            fence(Ordering::SeqCst);
            if let Some(keeper) = self.keeper.get() {
                keeper.release();
            }
        }
    }
}
