//! Accepts connections, and serves each on a thread.

mod clients;
mod dialled;
mod given_up;
mod notices;
mod room;
mod session;

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use device::{Backend, Device, Queue};
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;

pub(crate) use self::clients::hung_up;
use self::clients::Open;
use self::notices::Notices;
use self::room::Threads;
use crate::handshake::Export;
use crate::slices::Slices;

/// A server's options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerOptions {
    /// The export's name; clients that give no name get it too.
    pub name: String,
    /// The most connections at a time; further ones are closed at once. Each takes the memory of
    /// [`connection_memory`](crate::connection_memory) and one of the store's workers.
    pub connections: usize,
    /// How many of them are for [`dial`](Server::dial) alone, and come first: while a disk of the
    /// kernel has no server, its other clients connect. They are accepted when so many connections
    /// of `dial` have their memory, or by [`admit_others`](Server::admit_others).
    pub dialled: usize,
    /// The process whose child connects the kernel's client of the disk that this server is for;
    /// connections of [`dial`](Server::dial) are that client's, too. Another client of the kernel,
    /// with a disk of its own, is a client like any other.
    pub attacher: Option<u32>,
    /// The time limit of a handshake.
    pub handshake: Duration,
    /// Whether to refuse a connection for which there is no memory, instead of aborting in it. The
    /// check allocates that memory for a moment, so it is not for a process whose memory is locked.
    pub check_memory: bool,
    /// Whether a connection takes 1 MiB of memory and not 3. Requests of more than 48 KiB are then
    /// slower. Without structured replies an error ends the connection if it is found after the
    /// first 288 KiB of a longer read (otherwise after the first 1.5 MiB).
    pub compact: bool,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            name: "platen".to_owned(),
            connections: 16,
            dialled: 0,
            attacher: None,
            handshake: Duration::from_secs(10),
            check_memory: true,
            compact: false,
        }
    }
}

/// Serves a device to any number of clients.
pub struct Server<B: Backend> {
    backend: Arc<B>,
    export: Export,
    options: ServerOptions,
    stop: OwnedFd,
    /// Readable when [`run`](Self::run) has to look for connections of [`dial`](Self::dial), or no
    /// longer has to wait for them.
    dialled: OwnedFd,
    open: Mutex<Open>,
    kernel_ended: AtomicU64,
    /// Connections in `open` with simple replies only. A connection that is counted here does
    /// nothing before it has checked those counted before it.
    simple: AtomicUsize,
    /// Connections in `wait_for_others`, for observers.
    waiting: AtomicUsize,
    /// The reads of connections that have ended, and how many places for them are taken or
    /// promised.
    stranded: Mutex<Vec<Stranded<B::Queue>>>,
    places: AtomicUsize,
}

/// The most ended connections whose reads of a backing device do not complete: each still has its
/// buffers and one of the store's workers.
pub const STRANDED: usize = 8;

/// Reads whose client is gone, with the buffers that they fill.
struct Stranded<Q> {
    queue: Q,
    slices: Slices,
}

impl<Q: Queue> Stranded<Q> {
    fn is_over(&mut self) -> bool {
        let slices = &mut self.slices;
        self.queue.reap(&mut |tag, _| slices.give_back(usize::try_from(tag).expect("a slice")));
        self.queue.in_flight() == 0
    }
}

impl Server<Device> {
    /// [`run`](Self::run) for a device. Its code, on the path of each page, belongs to this crate,
    /// while the caller's may be compiled for size.
    ///
    /// # Errors
    ///
    /// The errors of `run`.
    pub fn serve(&self, listener: &UnixListener, notice: fn(&str)) -> io::Result<()> {
        self.run(listener, notice)
    }
}

impl<B: Backend> Server<B> {
    /// Creates a server of `backend`.
    ///
    /// # Errors
    ///
    /// The kernel's error, if it has no eventfd.
    pub fn new(backend: Arc<B>, options: ServerOptions) -> io::Result<Self> {
        let size = backend.pages().saturating_mul(device::PAGE as u64);
        let open = Open { awaited: options.dialled, ..Open::default() };
        Ok(Self {
            backend,
            export: Export { name: options.name.clone(), size },
            options,
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            dialled: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            open: Mutex::new(open),
            kernel_ended: AtomicU64::new(0),
            simple: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            stranded: Mutex::new(Vec::with_capacity(STRANDED)),
            places: AtomicUsize::new(0),
        })
    }

    /// Accepts connections until [`stop`](Self::stop); then ends all of them and returns. `notice`
    /// gets a line for each client that misbehaves or is lost, at most 10 a minute.
    ///
    /// # Errors
    ///
    /// The listener's error.
    pub fn run(
        &self,
        listener: &UnixListener,
        notice: impl Fn(&str) + Send + Sync,
    ) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let notices = Notices::new(notice);
        thread::scope(|scope| {
            let mut number = 0_u64;
            let mut threads = Threads::new();
            let result = loop {
                let mut fds = [
                    PollFd::new(&self.stop, PollFlags::IN),
                    PollFd::new(&self.dialled, PollFlags::IN),
                    PollFd::new(listener, PollFlags::IN),
                ];
                let fds = if self.others_wait() { &mut fds[..2] } else { &mut fds[..] };
                // Stranded reads are few, and no event reports their completion.
                let soon = Timespec { tv_sec: 1, tv_nsec: 0 };
                match poll(fds, (self.stranded() > 0).then_some(&soon)) {
                    Ok(_) if !fds[0].revents().is_empty() => break Ok(()),
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => break Err(error.into()),
                }
                self.look_at_stranded();
                let (stream, dialled) = match self.accept(listener) {
                    Ok(accepted) => accepted,
                    Err(error) if is_of_one_client(&error) => continue,
                    Err(error) => {
                        // No descriptors or no memory: connections that end may free some.
                        notices.add(&format!("cannot accept a connection: {error}"));
                        thread::sleep(Duration::from_millis(100));
                        continue;
                    }
                };
                number += 1;
                let connection = number;
                let stack = threads.next_stack();
                let reserved = match self.enter(connection, &stream, dialled, stack) {
                    Ok(reserved) => reserved,
                    Err(why) => {
                        notices.add(&format!("client {connection} refused: {why}"));
                        continue;
                    }
                };
                let notices = &notices;
                let thread = thread::Builder::new().name(format!("nbd-{connection}"));
                let spawned = thread.spawn_scoped(scope, move || {
                    if let Err(why) = self.client(connection, &stream, reserved) {
                        notices.add(&format!("client {connection}: {why}"));
                    }
                    // Copies of the socket see the end too.
                    let _ = stream.shutdown(Shutdown::Both);
                    self.remove_client(connection);
                });
                match spawned {
                    Ok(thread) => threads.add(thread),
                    Err(error) => {
                        notices.add(&format!("client {connection}: no thread: {error}"));
                        self.remove_client(connection);
                    }
                }
            };
            let mut open = self.open();
            open.stopped = true;
            open.dialled.clear();
            for client in open.streams.values() {
                // An error means that the client is gone.
                let _ = client.stream.shutdown(Shutdown::Both);
            }
            drop(open);
            result
        })
    }

    /// Ends [`run`](Self::run).
    pub fn stop(&self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// The number of connections.
    pub fn connections(&self) -> usize {
        self.open().streams.len()
    }

    /// The number of connections of the kernel's client ([`ServerOptions::attacher`]) that have
    /// ended, or that the client has given up with a request in flight. Its server learns from this
    /// number that the kernel has given one up. Connections of other clients do not count.
    pub fn kernel_ended(&self) -> u64 {
        let given_up = self.open().given_up(true, None).count() as u64;
        self.kernel_ended.load(Ordering::Acquire) + given_up
    }

    /// Connections that wait for requests which their client has given up on another connection,
    /// and may have sent again.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// Connections that ended before their reads, which wait for a backing device; at most 8.
    pub fn stranded(&self) -> usize {
        self.places.load(Ordering::Acquire)
    }

    /// Takes a place for a connection that ends before its reads.
    fn may_strand(&self) -> bool {
        let next = |taken| (taken < STRANDED).then_some(taken + 1);
        self.places.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).is_ok()
    }

    fn look_at_stranded(&self) {
        if self.stranded() == 0 {
            return;
        }
        let mut all = self.stranded.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.len();
        all.retain_mut(|one| !one.is_over());
        self.places.fetch_sub(before - all.len(), Ordering::AcqRel);
    }
}

impl<B: Backend> Drop for Server<B> {
    fn drop(&mut self) {
        self.look_at_stranded();
        let all = self.stranded.get_mut().unwrap_or_else(PoisonError::into_inner);
        // This does not wait for a disk that does not answer. Until the disk answers, the buffers
        // belong to the device.
        all.drain(..).for_each(std::mem::forget);
    }
}

impl<B: Backend> fmt::Debug for Server<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("export", &self.export)
            .field("connections", &self.connections())
            .finish_non_exhaustive()
    }
}

fn is_of_one_client(error: &io::Error) -> bool {
    use ErrorKind as Kind;
    matches!(error.kind(), Kind::WouldBlock | Kind::Interrupted | Kind::ConnectionAborted)
}
