//! The service's end of its carriers: the running carriers, their links, and the outcomes of
//! carriers that have ended.
//!
//! The folder holds two files per migration: `ID.json`, its record as it began or ended, and
//! `ID.sock`, at which its carrier can be reached. If a record does not say `ended` and no process
//! answers at its socket, its carrier was killed.

mod ended;
mod found;
mod records;

use crate::channel::Channel;
use crate::doors::Door;
use crate::error::HostError;
use crate::listener::DoorListener;
use crate::order::Order;
use crate::place::Place;
use crate::record::{Phase, Record, Role};
use rustix::fd::AsFd;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use records::new_id;
pub(crate) use records::{folder, socket_of, write_record};

/// The migrations of this host.
pub struct Registry {
    folder: PathBuf,
    carriers: Mutex<HashMap<String, Known>>,
    /// The doors that carriers have sent, until [`Registry::take_doors`].
    doors: Mutex<Vec<(Door, DoorListener)>>,
    watcher: Arc<dyn Watcher>,
}

/// Gets the changes of the migrations, in order for each migration.
pub trait Watcher: Send + Sync {
    /// Called when a migration has changed, or has begun or was found again (then `before` is
    /// `None`). For each migration it is called once with the phase `ended`. It must not wait.
    fn changed(&self, before: Option<&Record>, now: &Record);
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("folder", &self.folder).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Known {
    /// `None` while the carrier cannot be reached.
    channel: Option<Arc<Channel>>,
    record: Record,
    /// Whether it was given its door's listening socket, which it keeps to its end.
    has_door: bool,
}

/// The carriers and doors that a starting service finds.
#[derive(Debug, Default)]
pub struct Found {
    /// Doors whose listening sockets carriers have.
    pub doors: Vec<(Door, DoorListener)>,
    /// Migrations that run.
    pub running: usize,
}

/// The door whose listening socket a carrier with this record has.
fn door_of(record: &Record) -> Door {
    Door { peer: record.peer.clone(), place: record.held() }
}

/// The record that counts until its carrier has gone: the end counts then, since the carrier may
/// report it twice. Its bytes count at once.
fn without_end(record: &Record, before: Phase) -> Record {
    let phase = if record.phase == Phase::Ended { before } else { record.phase };
    Record { phase, ..record.clone() }
}

impl Registry {
    /// Opens the registry in a folder below `run_dir`.
    ///
    /// # Errors
    /// The folder cannot be made or used.
    pub fn open(run_dir: &Path, watcher: Arc<dyn Watcher>) -> Result<Arc<Self>, HostError> {
        let folder = folder(run_dir)?;
        let (carriers, doors) = (Mutex::default(), Mutex::default());
        Ok(Arc::new(Self { folder, carriers, doors, watcher }))
    }

    /// The folder of the records, which is this user's alone.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.carriers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_doors(&self) -> MutexGuard<'_, Vec<(Door, DoorListener)>> {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The doors whose listening sockets carriers have sent since the last call.
    pub fn take_doors(&self) -> Vec<(Door, DoorListener)> {
        std::mem::take(&mut *self.lock_doors())
    }

    /// Adds a carrier that begins, and follows it until it has gone. Returns its channel, for
    /// sending orders.
    ///
    /// # Errors
    /// The system refuses a thread; the channel is closed.
    pub fn add(
        self: &Arc<Self>,
        channel: Channel,
        record: Record,
    ) -> Result<Arc<Channel>, HostError> {
        let (channel, has_door) = (Arc::new(channel), record.holds_port);
        self.know(Some(channel.clone()), record, has_door).map(|()| channel)
    }

    /// Adds a carrier, and follows it; without a channel, it is first reached.
    fn know(
        self: &Arc<Self>,
        channel: Option<Arc<Channel>>,
        record: Record,
        has_door: bool,
    ) -> Result<(), HostError> {
        let id = record.id.clone();
        let known = Known { channel: channel.clone(), record: record.clone(), has_door };
        self.lock().insert(id.clone(), known);
        let (registry, followed) = (self.clone(), id.clone());
        let follow = move || {
            registry.watcher.changed(None, &without_end(&record, record.reached));
            if let Some(channel) = channel.or_else(|| registry.reach(&record)) {
                registry.follow(&followed, &channel);
            }
            registry.gone(&followed);
        };
        let thread = std::thread::Builder::new().name("carrier".into()).spawn(follow);
        thread.map(drop).map_err(|error| {
            // No thread would remove it, and its port would stay taken.
            self.lock().remove(&id);
            HostError::system("cannot start a thread")(error)
        })
    }

    /// Records what a carrier reports, until its channel ends.
    fn follow(&self, id: &str, channel: &Channel) {
        loop {
            match channel.receive::<Record>() {
                Ok(Some((record, listener))) => {
                    // The first message of a carrier. A service that has not found the carrier in
                    // time could not open the door itself.
                    if let Some(listener) = listener.map(DoorListener::from) {
                        self.lock_doors().push((door_of(&record), listener));
                        if let Some(known) = self.lock().get_mut(id) {
                            known.has_door = true;
                        }
                    }
                    self.update(id, record);
                }
                // This version does not understand the message and ignores it. The end of the
                // carrier counts.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Records what a carrier has reported about its migration.
    fn update(&self, id: &str, record: Record) {
        let before = match self.lock().get_mut(id) {
            Some(known) => std::mem::replace(&mut known.record, record.clone()),
            None => return,
        };
        let now = without_end(&record, before.phase);
        self.watcher.changed(Some(&before), &now);
    }

    /// Whether a migration of this role occupies the place now: at a source a door, at a
    /// destination the address at which a QEMU of this host listens.
    pub fn has(&self, role: Role, peer: Option<&str>, place: Place) -> bool {
        self.lock().values().any(|known| {
            let record = &known.record;
            record.role == role
                && record.held() == place
                && peer.is_none_or(|peer| record.peer == peer)
                && record.holds_port
        })
    }

    /// The doors whose listening sockets carriers have, and at which only these accept now.
    pub fn lent(&self) -> HashSet<Door> {
        self.doors_of(|known| known.record.holds_port)
    }

    /// The doors whose listening sockets carriers have at all.
    pub fn held(&self) -> HashSet<Door> {
        self.doors_of(|known| known.has_door)
    }

    fn doors_of(&self, counts: impl Fn(&Known) -> bool) -> HashSet<Door> {
        let carriers = self.lock();
        let sources = carriers.values().filter(|known| known.record.role == Role::Source);
        sources.filter(|known| counts(known)).map(|known| door_of(&known.record)).collect()
    }

    /// Tells the carrier of a migration that comes to `place` that another source wants the place
    /// (W4d). If its session gives way, its record says so soon.
    pub fn give_way(&self, place: Place) {
        for known in self.lock().values() {
            let record = &known.record;
            let is_there = record.role == Role::Destination && record.held() == place;
            if let (true, Some(channel)) = (is_there && record.holds_port, &known.channel) {
                // A carrier that cannot take it keeps its place.
                let _ = channel.send(&Order::GiveWay, None);
            }
        }
    }

    /// Whether a carrier has this session.
    pub fn has_session(&self, session: &str) -> bool {
        self.lock().values().any(|known| known.record.session.as_deref() == Some(session))
    }

    /// Passes a link to the carrier of its session.
    ///
    /// # Errors
    /// The link, if no carrier takes it.
    pub fn hand_on(&self, session: &str, link: TcpStream, peer: &str) -> Result<(), TcpStream> {
        let channel = {
            let carriers = self.lock();
            let found = carriers
                .values()
                .find(|known| known.record.session.as_deref() == Some(session))
                .and_then(|known| known.channel.clone());
            found
        };
        match channel.map(|channel| channel.send(&Order::Link(peer.into()), Some(link.as_fd()))) {
            Some(Ok(())) => Ok(()),
            _ => Err(link),
        }
    }

    /// The migrations that run, in the order of their begin.
    pub fn running(&self) -> Vec<Record> {
        let mut running: Vec<_> = self.lock().values().map(|known| known.record.clone()).collect();
        running.sort_by(|a, b| a.id.cmp(&b.id));
        running
    }
}

#[cfg(test)]
mod tests;
