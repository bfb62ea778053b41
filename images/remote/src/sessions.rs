//! The sessions of a server: the open files of each restore, and how long they stay open.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::folder::{Folder, OpenFile};
use crate::wire::{Lock, Status, Token};

/// Maximum number of sessions.
const MAX_SESSIONS: usize = 64;
/// Maximum number of open files of a session: an image, its packs, and its hot set.
const MAX_FILES: usize = 512;

/// How long a session outlives its last connection.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Time after the last connection was closed: the client's process has most likely ended.
    pub closed: Duration,
    /// Time after the peer of the last connection has stopped answering: the network is most likely
    /// down.
    pub lost: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { closed: Duration::from_secs(5), lost: Duration::from_secs(600) }
    }
}

/// How a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The client's process does not need the session any more.
    Done,
    /// The peer, or its kernel, has closed the connection.
    Closed,
    /// The peer does not answer any more.
    Lost,
}

/// All sessions of a server.
#[derive(Debug)]
pub struct Sessions {
    folder: Folder,
    patience: Patience,
    all: Mutex<HashMap<Token, Entry>>,
    /// Until this time a lock is given only to a session that a server before this one knew.
    returns_until: Instant,
}

#[derive(Debug)]
struct Entry {
    session: Arc<Session>,
    /// Number of connections of each client's process.
    clients: HashMap<u32, usize>,
    /// When the session ends, if it has no connections.
    until: Option<Instant>,
}

#[derive(Debug)]
struct Session {
    /// Names in the peer's certificate; none without TLS.
    peer: Vec<String>,
    files: Mutex<Vec<Arc<OpenFile>>>,
    /// Whether it has named a file that is not open: it is older than this server.
    has_returned: AtomicBool,
}

impl Sessions {
    /// Creates the sessions that read `folder`.
    pub fn new(folder: Folder, patience: Patience) -> Self {
        Self { folder, patience, all: Mutex::default(), returns_until: Instant::now() }
    }

    /// Lets no new session have a lock for `time`: the sessions of a server before this one have
    /// lost their locks with it, and take them again first (W33).
    #[must_use]
    pub fn returning_for(self, time: Duration) -> Self {
        Self { returns_until: Instant::now() + time, ..self }
    }

    /// How long the session has to wait for a lock.
    fn waits(&self, session: &Session, now: Instant) -> Duration {
        match session.has_returned.load(Ordering::Relaxed) {
            true => Duration::ZERO,
            false => self.returns_until.saturating_duration_since(now),
        }
    }

    /// Adds a connection of process `client` to a session. The session begins if it does not exist
    /// yet.
    ///
    /// # Errors
    ///
    /// The session is of another peer, or there are too many.
    pub fn join(&self, token: Token, client: u32, peer: &[String]) -> Result<Joined<'_>, String> {
        self.expire();
        let mut all = lock(&self.all);
        if !all.contains_key(&token) && all.len() >= MAX_SESSIONS {
            return Err(format!("there are {MAX_SESSIONS} restores already"));
        }
        let entry = all.entry(token).or_insert_with(|| {
            let (peer, files, has_returned) =
                (peer.to_vec(), Mutex::default(), AtomicBool::new(false));
            let session = Session { peer, files, has_returned };
            Entry { session: Arc::new(session), clients: HashMap::new(), until: None }
        });
        if entry.session.peer != peer {
            return Err("this session is of another host".into());
        }
        *entry.clients.entry(client).or_default() += 1;
        entry.until = None;
        let session = Arc::clone(&entry.session);
        Ok(Joined { sessions: self, token, client, session, seen: Vec::new(), end: Ended::Closed })
    }

    /// Ends the sessions that have had no connection for too long.
    pub fn expire(&self) {
        let now = Instant::now();
        let over = |entry: &mut Entry| entry.until.is_some_and(|until| until <= now);
        // The files are closed without the lock: a file system may hang.
        let ended: Vec<_> = lock(&self.all).extract_if(|_, entry| over(entry)).collect();
        drop(ended);
    }

    /// Number of sessions.
    pub fn count(&self) -> usize {
        lock(&self.all).len()
    }

    /// Waits for the end of sessions whose clients have most likely ended: a restore that was
    /// killed is continued by another one. Returns whether there were any.
    fn wait_for_closed(&self) -> bool {
        let limit = Instant::now() + self.patience.closed;
        let soon = lock(&self.all)
            .values()
            .filter_map(|entry| entry.until)
            .filter(|at| *at <= limit)
            .max();
        let Some(until) = soon else { return false };
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        self.expire();
        true
    }

    fn leave(&self, token: Token, client: u32, end: Ended) {
        {
            let mut all = lock(&self.all);
            let Some(entry) = all.get_mut(&token) else { return };
            let Some(connections) = entry.clients.get_mut(&client) else { return };
            *connections -= 1;
            // With END, the client's other connections count no more: the network may have lost
            // them long ago.
            if *connections > 0 && end != Ended::Done {
                return;
            }
            entry.clients.remove(&client);
            if entry.clients.is_empty() {
                let more = match end {
                    Ended::Done => Duration::ZERO,
                    Ended::Closed => self.patience.closed,
                    Ended::Lost => self.patience.lost,
                };
                entry.until = Some(Instant::now() + more);
            }
        }
        self.expire();
    }
}

/// A connection's part in its session.
#[derive(Debug)]
pub struct Joined<'a> {
    sessions: &'a Sessions,
    token: Token,
    client: u32,
    session: Arc<Session>,
    /// Files that this connection has read. Looking them up needs no lock.
    seen: Vec<Arc<OpenFile>>,
    end: Ended,
}

impl Joined<'_> {
    /// Opens a file, or finds it among those that are open.
    pub(crate) fn open(
        &mut self,
        name: &str,
        how: Lock,
    ) -> Result<Arc<OpenFile>, (Status, String)> {
        if how != Lock::None {
            std::thread::sleep(self.sessions.waits(&self.session, Instant::now()));
        }
        // The lock is held while the file is locked: two connections of a session do not exclude
        // each other.
        let mut files = lock(&self.session.files);
        let is_it =
            |file: &&Arc<OpenFile>| file.name == name && (how == Lock::None || file.lock == how);
        if let Some(file) = files.iter().find(is_it) {
            return Ok(Arc::clone(file));
        }
        if files.len() >= MAX_FILES {
            return Err((Status::Refused, format!("{MAX_FILES} files are open already")));
        }
        let mut file = self.sessions.folder.file(name, how);
        if matches!(file, Err((Status::InUse, _))) && self.sessions.wait_for_closed() {
            file = self.sessions.folder.file(name, how);
        }
        let file = Arc::new(file?);
        files.push(Arc::clone(&file));
        Ok(file)
    }

    /// The open file with this stamp.
    pub(crate) fn file(&mut self, stamp: u128) -> Option<Arc<OpenFile>> {
        let with = |file: &&Arc<OpenFile>| file.stamp == stamp;
        if let Some(file) = self.seen.iter().find(with) {
            return Some(Arc::clone(file));
        }
        let Some(file) = lock(&self.session.files).iter().find(with).cloned() else {
            // Relaxed: the flag is for the next request of this connection.
            self.session.has_returned.store(true, Ordering::Relaxed);
            return None;
        };
        self.seen.push(Arc::clone(&file));
        Some(file)
    }

    /// Records how the connection ends.
    pub fn ends(&mut self, end: Ended) {
        self.end = end;
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        self.seen.clear();
        self.sessions.leave(self.token, self.client, self.end);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
