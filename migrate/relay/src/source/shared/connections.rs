//! Accepts the source QEMU's connections, classifies them by their first bytes, and closes them.

use super::{Connection, Connections, Refused, Shared, SourceStream};
use crate::qemu_socket::QemuSocket;
use crate::sockets::{drop_waiting, is_open};
use rustix::io::ioctl_fionread;
use rustix::net::{recv, RecvFlags};
use session::MAX_STREAMS;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::sync::atomic::{fence, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
use stream::Kind;

/// Bytes of a multifd channel's init packet, which QEMU writes at once.
const FIRST_BYTES: usize = 64;
/// Connections that may wait before their kind is known: as many as QEMU can open.
const MAX_WAITING: usize = MAX_STREAMS;

impl Shared {
    fn lock_connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The streams so far, by number.
    pub(in crate::source) fn streams(&self) -> Vec<Arc<SourceStream>> {
        self.lock_connections().streams.clone()
    }

    /// Stream `id`, if there is one.
    pub(in crate::source) fn stream(&self, id: u16) -> Option<Arc<SourceStream>> {
        self.lock_connections().streams.get(usize::from(id)).cloned()
    }

    /// Whether the migration has begun.
    pub(in crate::source) fn has_main(&self) -> bool {
        self.lock_connections().streams.iter().any(|stream| stream.kind.is_main())
    }

    /// Whether the relay accepts connections. Once this is false, it accepts none any more.
    pub(in crate::source) fn accepts(&self) -> bool {
        let connections = self.lock_connections();
        self.may_accept(&connections)
    }

    /// As [`accepts`](Self::accepts). With the lock, no other thread is about to accept.
    fn may_accept(&self, _: &MutexGuard<'_, Connections>) -> bool {
        let returns = || self.entrance.get().is_some_and(|entrance| entrance.returns());
        let is_back = || self.session.failure().is_some() && returns();
        !self.over.load(Ordering::Acquire) && !is_back()
    }

    /// Accepts every waiting connection. The lock is held across `accept`: a connection that QEMU
    /// made before the call is in `connections` after it.
    ///
    /// # Errors
    /// A connection waits and cannot be accepted, or no thread can be started for it.
    pub(in crate::source) fn accept_waiting(self: &Arc<Self>) -> io::Result<()> {
        let Some(entrance) = self.entrance.get() else { return Ok(()) };
        loop {
            let mut connections = self.lock_connections();
            if !self.may_accept(&connections) {
                return Ok(());
            }
            if let Some(connection) = connections.unread.pop() {
                drop(connections);
                self.start_reading(connection)?;
                continue;
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
            self.start_reading(connection)?;
        }
    }

    /// Has a thread read the connection, now or by a later call of `accept_waiting`: QEMU waits
    /// meanwhile, as for a connection that is not accepted.
    fn start_reading(self: &Arc<Self>, connection: Arc<Connection>) -> io::Result<()> {
        (self.read)(self, &connection)
            .inspect_err(|_| self.lock_connections().unread.push(connection))
    }

    /// The kind of a connection, by its first bytes; `None` before they arrive.
    pub(in crate::source) fn classify(&self, connection: &Connection) -> Option<Kind> {
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
    pub(in crate::source) fn admit(
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
        let is_preempt = |stream: &Arc<SourceStream>| stream.kind == Kind::Preempt;
        if kind == Kind::Preempt && connections.streams.iter().any(is_preempt) {
            return Err(Refused::SecondPreempt);
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
            read_by: OnceLock::new(),
        });
        connections.streams.push(stream.clone());
        Ok(stream)
    }

    /// Makes an NBD connection the only stream.
    pub(in crate::source) fn admit_disk(&self, socket: QemuSocket) -> Arc<SourceStream> {
        let _ = self.started.set(Instant::now());
        let connection = Arc::new(Connection { socket, kind: OnceLock::from(Kind::Other) });
        let (id, kind, results, read_by) = (0, Kind::Other, OnceLock::new(), OnceLock::new());
        let stream = Arc::new(SourceStream { id, connection, kind, results, read_by });
        self.lock_connections().streams = vec![stream.clone()];
        stream
    }

    /// Removes every stream, without closing its connection.
    pub(in crate::source) fn forget_streams(&self) {
        self.lock_connections().streams.clear();
    }

    /// Removes a connection that ended before it was a stream.
    pub(in crate::source) fn remove_waiting(&self, connection: &Arc<Connection>) {
        let mut connections = self.lock_connections();
        connections.waiting.retain(|waiting| !Arc::ptr_eq(waiting, connection));
    }

    /// The number of multifd channels now (W18).
    ///
    /// # Errors
    /// A connection waits and cannot be accepted.
    pub(in crate::source) fn multifd_channels(self: &Arc<Self>) -> io::Result<u32> {
        self.accept_waiting()?;
        let connections = self.lock_connections();
        let streams = connections.streams.iter().map(|stream| &stream.connection);
        let all = streams.chain(&connections.waiting);
        let multifd = all.filter(|one| self.classify(one) == Some(Kind::Multifd)).count();
        Ok(u32::try_from(multifd).unwrap_or(0))
    }

    /// Whether bytes of a preempt channel wait in its socket, or are not acknowledged yet.
    pub(in crate::source) fn has_urgent(&self) -> bool {
        let connections = self.lock_connections();
        let is_no_stream = |one: &Arc<Connection>| self.classify(one) == Some(Kind::Preempt);
        let is_under_way = |one: &Arc<SourceStream>| {
            // Looked for first: a reader that takes bytes meanwhile has a permit, and then a frame.
            let unread = ioctl_fionread(one.socket()).is_ok_and(|bytes| bytes > 0);
            unread || !self.session.credits().is_idle(one.id)
        };
        let mut streams = connections.streams.iter().filter(|one| one.kind == Kind::Preempt);
        streams.any(is_under_way) || connections.waiting.iter().any(is_no_stream)
    }

    /// After the session has ended: reads and drops the pages of the preempt channel. QEMU writes
    /// them with a lock that the thread of its main channel needs. A recovery sends them again.
    pub(in crate::source) fn drop_urgent(&self) {
        let connections = self.lock_connections();
        // Its reader, which takes bytes until it ends, does so when some come.
        let has_ended = |one: &&Arc<SourceStream>| one.read_by.get().is_some();
        let streams = connections.streams.iter().filter(|one| one.kind == Kind::Preempt);
        let streams = streams.filter(has_ended).map(|one| &one.connection);
        let waiting = connections.waiting.iter();
        let others = waiting.filter(|one| self.classify(one) == Some(Kind::Preempt));
        for connection in streams.chain(others) {
            drop_waiting(&connection.socket);
        }
    }

    /// Ends every connection, also one in whose write QEMU waits. A source whose sockets close
    /// before SHUT goes on running its VM.
    pub(in crate::source) fn abort_sockets(&self) {
        self.each_connection(QemuSocket::abort);
    }

    /// Ends every connection in order: QEMU still reads what was written to it.
    pub(in crate::source) fn close_sockets(&self) {
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
    pub(in crate::source) fn close_return_paths(&self) {
        // Pairs with the fence where a main stream gets its queue.
        fence(Ordering::SeqCst);
        for stream in self.streams() {
            if let Some(results) = stream.results.get() {
                results.close();
            }
        }
    }

    /// Whether the source QEMU has this connection open at this moment, also where its end would
    /// not have come yet.
    pub(in crate::source) fn is_open(&self, socket: &QemuSocket) -> bool {
        is_open(socket) && !self.entrance.get().is_some_and(|entrance| entrance.has_left(socket))
    }

    /// Whether the source QEMU still has its main connection open.
    pub(in crate::source) fn main_is_open(&self) -> bool {
        self.streams().iter().any(|stream| stream.kind.is_main() && self.is_open(stream.socket()))
    }
}
