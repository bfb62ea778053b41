//! The client: opens files of a server, and reads them from any number of threads.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use image::{ImageFile, RemoteFile};
use session::Link;
use tls::Connector;

use crate::pool::{Bounded, DialError, Pool};
use crate::wire::{ask, Lock, Request, Status, Token, MAX_READ, OPENED};
use crate::RemoteError;

/// First and longest wait before another attempt to connect.
const WAITS: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];

/// Interval at which a client looks whether the server still has its lock.
const KEEP: Duration = Duration::from_millis(500);

/// How often one read opens its file again: once for each restart of the server in between.
const MOST_OPENS: u32 = 100;

/// Reads the files of one server.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    pool: Pool,
    /// The longest waits for a connection: for the first one, and for one that replaces a lost one.
    waits: [Duration; 2],
    /// Gets a line when the connection is lost, and when it is restored.
    tell: Box<dyn Fn(&str) + Send + Sync>,
    has_connected: AtomicBool,
    /// When the server first did not answer, if it has not answered since.
    lost: Mutex<Option<Instant>>,
    /// Whether the process needs no lock any more. Locked while a lock is being kept.
    has_ended: Mutex<bool>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Client").field(&self.pool.host).finish()
    }
}

impl Client {
    /// Creates a client that reads files from `host` (HOST:PORT), without TLS if `connector` is
    /// `None`. `first` and `outage` are the longest waits for the first connection and after a
    /// loss. `tell` gets a line about each loss.
    pub fn new(
        host: String,
        connector: Option<Connector>,
        session: Token,
        [first, outage]: [Duration; 2],
        tell: Box<dyn Fn(&str) + Send + Sync>,
    ) -> Self {
        let pool = Pool::new(host, connector, session);
        let (has_connected, lost) = (AtomicBool::new(false), Mutex::default());
        let has_ended = Mutex::new(false);
        let inner = Inner { pool, waits: [first, outage], tell, has_connected, lost, has_ended };
        Self { inner: Arc::new(inner) }
    }

    /// As [`Client::open`], and keeps the lock until [`Client::end`], or until this client and its
    /// files are dropped: a server that is started again has lost it, and a client that reads
    /// nothing for a while would not notice.
    ///
    /// # Errors
    ///
    /// The errors of [`Client::open`]; no thread can be started.
    pub fn open_and_keep(&self, name: &str, lock: Lock) -> Result<ImageFile, RemoteError> {
        let (stamp, len) = self.inner.open(name, lock)?;
        let (inner, of) = (Arc::downgrade(&self.inner), name.to_owned());
        let body = move || loop {
            thread::sleep(KEEP);
            let Some(inner) = inner.upgrade() else { return };
            if !inner.keep(&of, lock, stamp) {
                return;
            }
        };
        let thread = thread::Builder::new().name("lock".into()).spawn(body);
        let host = || self.inner.pool.host.clone();
        thread.map_err(|source| RemoteError::Lost { host: host(), source })?;
        Ok(self.opened(name, lock, (stamp, len)))
    }

    /// Opens the file `name` of the server's folder.
    ///
    /// # Errors
    ///
    /// [`RemoteError`] names host and file.
    pub fn open(&self, name: &str, lock: Lock) -> Result<ImageFile, RemoteError> {
        let opened = self.inner.open(name, lock)?;
        Ok(self.opened(name, lock, opened))
    }

    fn opened(&self, name: &str, lock: Lock, (stamp, len): (u128, u64)) -> ImageFile {
        let file =
            Opened { inner: Arc::clone(&self.inner), name: name.to_owned(), lock, stamp, len };
        ImageFile::Remote(Box::new(file))
    }

    /// Tells the server that this process does not need the session any more. The session's locks
    /// end, unless another process has joined it.
    pub fn end(&self) {
        let Some(mut link) = self.inner.pool.idle() else { return };
        // A lock that is taken again after the END would outlive it.
        *self.inner.has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        // A server that has ended holds no locks.
        let _ = ask(&mut Bounded::new(&mut link, 0), &Request::End, &mut []);
    }
}

/// A file that the server has opened.
#[derive(Debug)]
struct Opened {
    inner: Arc<Inner>,
    name: String,
    lock: Lock,
    stamp: u128,
    len: u64,
}

impl RemoteFile for Opened {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        if at.checked_add(out.len() as u64).is_none_or(|end| end > self.len) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for (nth, part) in out.chunks_mut(MAX_READ).enumerate() {
            self.read_part(part, at + (nth * MAX_READ) as u64)?;
        }
        Ok(())
    }
}

impl Opened {
    fn read_part(&self, out: &mut [u8], offset: u64) -> Result<(), RemoteError> {
        let len = u32::try_from(out.len()).expect("at most 1 MiB");
        let request = Request::Read { stamp: self.stamp, offset, len };
        let mut opens = 0;
        loop {
            match self.inner.call(&self.name, &request, out) {
                // The server was restarted, or has dropped this session.
                Err(RemoteError::Refused { status: Status::NotOpen, .. }) if opens < MOST_OPENS => {
                    opens += 1;
                    let (stamp, len) = self.inner.open(&self.name, self.lock)?;
                    if (stamp, len) != (self.stamp, self.len) {
                        let (host, name) = (self.inner.pool.host.clone(), self.name.clone());
                        return Err(RemoteError::Replaced { host, name });
                    }
                }
                result => return result,
            }
        }
    }
}

impl Inner {
    /// Makes the server open a file. Returns the file's stamp and length.
    fn open(&self, name: &str, lock: Lock) -> Result<(u128, u64), RemoteError> {
        let mut opened = [0; OPENED];
        self.call(name, &Request::Open { name: name.to_owned(), lock }, &mut opened)?;
        let (stamp, len) = opened.split_first_chunk().expect("24 bytes");
        let len = u64::from_be_bytes(len.try_into().expect("8 bytes"));
        Ok((u128::from_be_bytes(*stamp), len))
    }

    /// Takes the lock of an open file again if the server has lost it; false if it is not needed
    /// any more. A failure is left to the next call, and to the next read.
    fn keep(&self, name: &str, lock: Lock, stamp: u128) -> bool {
        let has_ended = self.has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *has_ended {
            return false;
        }
        let answer = self.once(&Request::Read { stamp, offset: 0, len: 1 }, &mut [0]);
        if matches!(answer, Some(Err((Status::NotOpen, _)))) {
            let _ = self.once(&Request::Open { name: name.to_owned(), lock }, &mut [0; OPENED]);
        }
        true
    }

    /// Sends a request on the connections that there are, or on a new one.
    fn once(&self, request: &Request, out: &mut [u8]) -> Option<Result<(), (Status, String)>> {
        // The idle ones may all have been lost.
        while let Some(link) = self.pool.idle() {
            if let Ok(answer) = self.exchange(link, request, out) {
                return Some(answer);
            }
        }
        self.exchange(self.pool.dial().ok()?, request, out).ok()
    }

    /// Sends a request until it is answered.
    fn call(&self, name: &str, request: &Request, out: &mut [u8]) -> Result<(), RemoteError> {
        let mut until = None;
        let mut wait = WAITS[0];
        loop {
            // An idle connection may have been lost long ago: no wait before the next attempt.
            let (link, is_new) = match self.pool.idle() {
                Some(link) => (Ok(link), false),
                None => (self.pool.dial(), true),
            };
            let error = match link.map(|link| self.exchange(link, request, out)) {
                Ok(Ok(Ok(()))) => return Ok(()),
                Ok(Ok(Err((status, text)))) => {
                    let (host, name) = (self.pool.host.clone(), name.to_owned());
                    return Err(RemoteError::Refused { host, name, status, text });
                }
                Ok(Err(error)) | Err(DialError::Io(error)) => error,
                Err(error) if self.has_connected.load(Ordering::Relaxed) => described(error),
                Err(error) => return Err(self.no_link(name, error)),
            };
            if !is_new {
                continue;
            }
            let limit = self.waits[usize::from(self.has_connected.load(Ordering::Relaxed))];
            // Read once: a thread that stands still at the first failure tries again all the same.
            let now = Instant::now();
            // All requests share the wait: a unit that cannot be read is read again for each VM.
            let until = *until.get_or_insert_with(|| self.lost_since(now, &error, limit) + limit);
            if now + wait > until {
                return Err(RemoteError::Lost { host: self.pool.host.clone(), source: error });
            }
            thread::sleep(wait);
            wait = (wait * 2).min(WAITS[1]);
        }
    }

    /// Sends a request on a connection. Returns the connection to the pool after the reply.
    fn exchange(
        &self,
        mut link: Link,
        request: &Request,
        out: &mut [u8],
    ) -> io::Result<Result<(), (Status, String)>> {
        let len = out.len();
        let answered = ask(&mut Bounded::new(&mut link, len), request, out)?;
        self.pool.put(link);
        // Relaxed: the flag is for the choice of a limit.
        self.has_connected.store(true, Ordering::Relaxed);
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner).take();
        if lost.is_some() {
            (self.tell)(&format!("{} answers again", self.pool.host));
        }
        Ok(answered)
    }

    /// Since when the server does not answer: `now`, if this request is the first one without a
    /// reply. Reports that once.
    fn lost_since(&self, now: Instant, error: &io::Error, limit: Duration) -> Instant {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(since) = *lost {
            return since;
        }
        *lost = Some(now);
        drop(lost);
        let (host, limit) = (&self.pool.host, limit.as_secs());
        (self.tell)(&format!("{host} does not answer ({error}): trying again for {limit} s"));
        now
    }

    /// The error of a first connection, for a cause that will not pass.
    fn no_link(&self, name: &str, error: DialError) -> RemoteError {
        let host = self.pool.host.clone();
        match error {
            DialError::Tls(source) => RemoteError::Tls { host, source },
            DialError::Refused(text) => {
                RemoteError::Refused { host, name: name.to_owned(), status: Status::Refused, text }
            }
            DialError::Io(source) => RemoteError::Lost { host, source },
        }
    }
}

/// The error of a later connection: during an outage a peer may fail in any way.
fn described(error: DialError) -> io::Error {
    match error {
        DialError::Io(error) => error,
        DialError::Tls(error) => io::Error::other(error),
        DialError::Refused(text) => io::Error::other(text),
    }
}
