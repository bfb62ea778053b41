//! The service's end of its carriers: the running ones, their links, and the outcomes of the
//! others.
//!
//! The folder holds two files per migration: `ID.json`, its record as it began or ended, and
//! `ID.sock`, at which its carrier can be reached. If a record does not say `ended` and no process
//! answers at its socket, its carrier was killed.

use crate::channel::Channel;
use crate::doors::Door;
use crate::error::HostError;
use crate::listener::DoorListener;
use crate::order::Order;
use crate::place::Place;
use crate::record::{now, Phase, Record, Role, Status};
use rustix::fd::AsFd;
use std::collections::HashMap;
use std::fmt;
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Records of ended migrations that are stored.
const HISTORY: usize = 100;
/// Longest time in which a carrier reports the state of its migration.
const FIRST_WORD: Duration = Duration::from_secs(2);
/// The largest record that is read.
const MAX_RECORD: u64 = 64 << 10;

/// The migrations of this host.
pub struct Registry {
    folder: PathBuf,
    carriers: Mutex<HashMap<String, Known>>,
    watcher: Arc<dyn Watcher>,
}

/// Gets the changes of the migrations, in order for each of them.
pub trait Watcher: Send + Sync {
    /// A migration has changed, or has begun or was found again (`before` is none). It is called
    /// once with the phase `ended` for each. It must not wait.
    fn changed(&self, before: Option<&Record>, now: &Record);
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("folder", &self.folder).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Known {
    channel: Arc<Channel>,
    record: Record,
}

/// Migrations and problems that a starting service finds.
#[derive(Debug, Default)]
pub struct Found {
    /// Doors that carriers have.
    pub doors: Vec<(Door, DoorListener)>,
    /// Migrations that run.
    pub running: usize,
}

/// A new identifier: later ones sort behind earlier ones.
pub fn new_id() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed) % 1000;
    format!("{:013}-{}-{count:03}", now(), std::process::id())
}

/// The path of a carrier's socket.
pub(crate) fn socket_of(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{id}.sock"))
}

/// Writes a record, whole or not at all.
pub(crate) fn write_record(folder: &Path, record: &Record) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix(".record-").tempfile_in(folder)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.persist(folder.join(format!("{}.json", record.id))).map(drop).map_err(|error| error.error)
}

fn read_record(path: &Path) -> Option<Record> {
    let size = fs::metadata(path).ok().filter(fs::Metadata::is_file)?.len();
    (size <= MAX_RECORD)
        .then(|| fs::read(path).ok())?
        .and_then(|text| serde_json::from_slice(&text).ok())
}

/// The folder of the records below `run_dir`, made if it is missing, for this user alone.
///
/// # Errors
/// It cannot be made, or belongs to another user.
pub(crate) fn folder(run_dir: &Path) -> Result<PathBuf, HostError> {
    let folder = run_dir.join("migrations");
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .map_err(HostError::system(format!("cannot make the folder {}", folder.display())))?;
    let found = fs::metadata(&folder)
        .map_err(HostError::system(format!("cannot look at {}", folder.display())))?;
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user || found.mode() & 0o022 != 0 {
        let what = format!(
            "{} belongs to user {} with mode {:o}, and this is user {user}: give the service a run_dir \
             of its own",
            folder.display(),
            found.uid(),
            found.mode() & 0o7777
        );
        return Err(HostError::system(what)(io::ErrorKind::PermissionDenied.into()));
    }
    Ok(folder)
}

impl Registry {
    /// The registry in a folder below `run_dir`.
    ///
    /// # Errors
    /// The folder cannot be made or used.
    pub fn open(run_dir: &Path, watcher: Arc<dyn Watcher>) -> Result<Arc<Self>, HostError> {
        let folder = folder(run_dir)?;
        Ok(Arc::new(Self { folder, carriers: Mutex::default(), watcher }))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.carriers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds the carriers of a service before this one again.
    ///
    /// # Errors
    /// The folder cannot be read, or the system refuses threads.
    pub fn find_again(self: &Arc<Self>) -> Result<Found, HostError> {
        let mut found = Found::default();
        for record in self.stored()? {
            if record.phase == Phase::Ended {
                continue;
            }
            let Ok(channel) = Channel::connect(&socket_of(&self.folder, &record.id)) else {
                self.bury(&record);
                continue;
            };
            let patience = HostError::system("cannot wait for a carrier");
            channel.set_patience(Some(FIRST_WORD)).map_err(patience)?;
            let first = channel.receive::<Record>();
            let forever = HostError::system("cannot wait for a carrier");
            channel.set_patience(None).map_err(forever)?;
            let record = match first {
                Ok(Some((now, listener))) => {
                    let door = Door { peer: now.peer.clone(), place: now.held() };
                    if let Some(listener) = listener.map(DoorListener::from) {
                        found.doors.push((door, listener));
                    }
                    now
                }
                // Stopped, or out of time: it is heard when it goes on. Or of another version.
                Err(error)
                    if [io::ErrorKind::WouldBlock, io::ErrorKind::InvalidData]
                        .contains(&error.kind()) =>
                {
                    record
                }
                _ => {
                    self.bury(&record);
                    continue;
                }
            };
            found.running += 1;
            self.add(channel, record)?;
        }
        Ok(found)
    }

    /// Adds a carrier, and follows it until it has gone. Returns its channel, for its orders.
    ///
    /// # Errors
    /// The system refuses a thread; the channel is closed.
    pub fn add(
        self: &Arc<Self>,
        channel: Channel,
        record: Record,
    ) -> Result<Arc<Channel>, HostError> {
        let (id, channel) = (record.id.clone(), Arc::new(channel));
        let known = Known { channel: channel.clone(), record: record.clone() };
        let orders = channel.clone();
        self.lock().insert(id.clone(), known);
        let (registry, followed) = (self.clone(), id.clone());
        let follow = move || {
            registry.watcher.changed(None, &record);
            loop {
                match channel.receive::<Record>() {
                    Ok(Some((record, _))) => registry.update(&followed, record),
                    // A message that this version does not understand tells nothing; the end does.
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                    Ok(None) | Err(_) => break,
                }
            }
            registry.gone(&followed);
        };
        let thread = std::thread::Builder::new().name("carrier".into()).spawn(follow);
        thread.map(|_| orders).map_err(|error| {
            // Nobody would remove it, and its port would stay taken.
            self.lock().remove(&id);
            HostError::system("cannot start a thread")(error)
        })
    }

    /// A carrier has said how its migration stands.
    fn update(&self, id: &str, record: Record) {
        let before = match self.lock().get_mut(id) {
            Some(known) => std::mem::replace(&mut known.record, record.clone()),
            None => return,
        };
        // The end counts when the carrier has gone: it may send it twice. Its bytes count now.
        let phase = if record.phase == Phase::Ended { before.phase } else { record.phase };
        self.watcher.changed(Some(&before), &Record { phase, ..record });
    }

    /// A carrier has gone, in order or not.
    fn gone(&self, id: &str) {
        let Some(known) = self.lock().remove(id) else { return };
        match read_record(&self.folder.join(format!("{id}.json"))) {
            Some(record) if record.phase == Phase::Ended => {
                self.watcher.changed(Some(&known.record), &record);
            }
            // It could not write its record.
            _ if known.record.phase == Phase::Ended => {
                let _ = write_record(&self.folder, &known.record);
                self.watcher.changed(Some(&known.record), &known.record);
            }
            _ => self.bury(&known.record),
        }
        self.prune();
    }

    /// Records the end of a carrier that could not do so itself.
    fn bury(&self, found: &Record) {
        let cause = "the process that carried it was killed: look at both hosts for the VM";
        let record = Record {
            phase: Phase::Ended,
            ended: Some(now()),
            status: Some(Status::Failed),
            cause: Some(cause.into()),
            ..found.clone()
        };
        let _ = fs::remove_file(socket_of(&self.folder, &record.id));
        let _ = write_record(&self.folder, &record);
        self.watcher.changed(Some(found), &record);
    }

    /// Whether a migration of this role has the place now: as source a door, as destination what a
    /// QEMU of this host listens at.
    pub fn has(&self, role: Role, peer: Option<&str>, place: Place) -> bool {
        self.lock().values().any(|known| {
            let record = &known.record;
            record.role == role
                && record.held() == place
                && peer.is_none_or(|peer| record.peer == peer)
                && record.holds_port
        })
    }

    /// Whether a carrier has this session.
    pub fn has_session(&self, session: &str) -> bool {
        self.lock().values().any(|known| known.record.session.as_deref() == Some(session))
    }

    /// Gives a link to the carrier of its session.
    ///
    /// # Errors
    /// The link, if no carrier takes it.
    pub fn hand_on(&self, session: &str, link: TcpStream, peer: &str) -> Result<(), TcpStream> {
        let channel = {
            let carriers = self.lock();
            let found = carriers
                .values()
                .find(|known| known.record.session.as_deref() == Some(session))
                .map(|known| known.channel.clone());
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

    /// The last migrations that have ended, in the order of their begin.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn history(&self) -> Result<Vec<Record>, HostError> {
        let mut all = self.stored()?;
        all.retain(|record| record.phase == Phase::Ended);
        let surplus = all.len().saturating_sub(HISTORY);
        Ok(all.split_off(surplus))
    }

    /// All records in the folder, in the order of their begin.
    fn stored(&self) -> Result<Vec<Record>, HostError> {
        let failed = || HostError::system(format!("cannot read {}", self.folder.display()));
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(failed())? {
            let path = entry.map_err(failed())?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if path.extension().is_some_and(|end| end == "json") && !name.starts_with('.') {
                // The name is what sorts, and what is removed.
                all.extend(read_record(&path).map(|record| Record { id: name, ..record }));
            }
        }
        all.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(all)
    }

    /// Removes the oldest records.
    fn prune(&self) {
        let Ok(mut all) = self.stored() else { return };
        all.retain(|record| record.phase == Phase::Ended);
        let surplus = all.len().saturating_sub(HISTORY);
        for record in &all[..surplus] {
            let _ = fs::remove_file(self.folder.join(format!("{}.json", record.id)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carrier::Carrier;
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::time::Instant;

    /// The phase before a change, the phase and the status after it.
    type Heard = (Option<Phase>, Phase, Option<Status>);

    /// Messages of a registry.
    #[derive(Default)]
    struct Told(Mutex<Vec<Heard>>);

    impl Watcher for Told {
        fn changed(&self, before: Option<&Record>, now: &Record) {
            let told = (before.map(|record| record.phase), now.phase, now.status);
            self.0.lock().unwrap().push(told);
        }
    }

    fn silent() -> Arc<Told> {
        Arc::default()
    }

    fn wait(done: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(120);
        while !done() {
            assert!(Instant::now() < until, "it does not happen");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn record() -> Record {
        let session = Some("5".repeat(32));
        let (peer, port) = ("b".to_owned(), 49152);
        Record { id: new_id(), peer, port, session, holds_port: true, ..Record::default() }
    }

    #[test]
    fn a_second_service_finds_the_carrier_its_door_and_its_end() {
        let run = tempfile::tempdir().unwrap();
        let told = Arc::new(Told::default());
        let first = Registry::open(run.path(), told.clone()).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let door = DoorListener::Tcp(door);
        let address = door.address().unwrap();
        let (links, taken) = mpsc::channel();
        let begin = record();
        first.add(ours, begin.clone()).unwrap();
        let carrier =
            Carrier::start(run.path(), begin.clone(), theirs.into(), Some(door), links).unwrap();
        carrier.update(|record| record.phase = Phase::Active);
        wait(|| first.running().iter().any(|record| record.phase == Phase::Active));
        let place = Place::Door(49152);
        assert!(first.has(Role::Source, Some("b"), place));
        assert!(!first.has(Role::Source, Some("b"), Place::Socket(49152)));
        assert!(!first.has(Role::Source, Some("c"), place));
        assert!(!first.has(Role::Destination, None, place));

        let second = Registry::open(run.path(), silent()).unwrap();
        let found = second.find_again().unwrap();
        assert_eq!(found.running, 1);
        assert_eq!(found.doors[0].0, Door { peer: "b".into(), place });
        assert_eq!(found.doors[0].1.address().unwrap(), address);
        // A link reaches it by its session.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let from = link.local_addr().unwrap();
        let link = second.hand_on(&"6".repeat(32), link, "10.0.0.1:1").unwrap_err();
        second.hand_on(&"5".repeat(32), link, "10.0.0.1:1").unwrap();
        let (link, peer) = taken.recv().unwrap();
        assert_eq!((link.local_addr().unwrap(), peer.as_str()), (from, "10.0.0.1:1"));

        carrier.end(Status::Failed, Some("a reason".into()));
        drop(carrier);
        wait(|| second.running().is_empty() && first.running().is_empty());
        let history = second.history().unwrap();
        assert_eq!(history.len(), 1);
        assert_eq!(history[0].cause.as_deref(), Some("a reason"));
        assert!(history[0].ended.is_some());
        let (opening, active, ended) = (Phase::Opening, Phase::Active, Phase::Ended);
        wait(|| told.0.lock().unwrap().last().is_some_and(|last| last.1 == ended));
        let told: Vec<_> = told.0.lock().unwrap().drain(..).collect();
        assert_eq!(told[0], (None, opening, None), "{told:?}");
        // The carrier says first how it began.
        assert!(told[1..].contains(&(Some(opening), active, None)), "{told:?}");
        let ends: Vec<_> = told.iter().filter(|one| one.1 == ended).collect();
        assert_eq!(ends.len(), 1, "{told:?}");
        assert_eq!(ends[0].2, Some(Status::Failed));
    }

    #[test]
    fn a_carrier_that_was_killed_is_recorded_by_the_service() {
        let run = tempfile::tempdir().unwrap();
        let registry = Registry::open(run.path(), silent()).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        let begin = record();
        write_record(&registry.folder, &begin).unwrap();
        registry.add(ours, begin.clone()).unwrap();
        drop(theirs);
        // The service writes the history after it has taken the carrier from its list.
        wait(|| {
            registry.running().is_empty() && registry.history().is_ok_and(|all| all.len() == 1)
        });
        let history = registry.history().unwrap();
        assert!(history[0].cause.as_ref().unwrap().contains("killed"), "{history:?}");

        // The same when no service was there to see it.
        let unseen = record();
        write_record(&registry.folder, &unseen).unwrap();
        assert_eq!(registry.find_again().unwrap().running, 0);
        let history = registry.history().unwrap();
        assert_eq!(history.len(), 2);
        assert_eq!(history[1].status, Some(Status::Failed));
    }

    #[test]
    fn a_message_that_is_not_understood_does_not_end_a_carrier() {
        let run = tempfile::tempdir().unwrap();
        let registry = Registry::open(run.path(), silent()).unwrap();
        let (ours, theirs) = Channel::pair().unwrap();
        let carrier = Channel::from(theirs);
        let begin = record();
        registry.add(ours, begin.clone()).unwrap();
        carrier.send(&"a record of another version", None).unwrap();
        carrier.send(&Record { plain: 7, ..begin.clone() }, None).unwrap();
        wait(|| registry.running().first().is_none_or(|record| record.plain == 7));
        assert!(registry.has(Role::Source, Some("b"), Place::Door(49152)));
        // One whose record cannot be written has told its end all the same.
        let cause = Some("the disk is full".to_owned());
        let end = Record { phase: Phase::Ended, cause: cause.clone(), ..begin };
        carrier.send(&end, None).unwrap();
        drop(carrier);
        wait(|| registry.running().is_empty() && !registry.history().unwrap().is_empty());
        assert_eq!(registry.history().unwrap()[0].cause, cause);
    }

    #[test]
    fn a_carrier_that_is_stopped_holds_up_no_service() {
        let run = tempfile::tempdir().unwrap();
        let registry = Registry::open(run.path(), silent()).unwrap();
        let begin = record();
        write_record(&registry.folder, &begin).unwrap();
        let post = crate::channel::Post::listen(&socket_of(&registry.folder, &begin.id)).unwrap();
        assert_eq!(registry.find_again().unwrap().running, 1);
        assert_eq!(registry.running()[0], begin);
        // It goes on, and is heard.
        let carrier = post.accept().unwrap();
        carrier.send(&Record { plain: 7, ..begin }, None).unwrap();
        wait(|| registry.running()[0].plain == 7);
    }

    #[test]
    fn the_last_hundred_are_stored() {
        let run = tempfile::tempdir().unwrap();
        let registry = Registry::open(run.path(), silent()).unwrap();
        for number in 0..130 {
            let id = format!("{number:013}-1-000");
            write_record(&registry.folder, &Record { id, phase: Phase::Ended, ..record() })
                .unwrap();
        }
        let history = registry.history().unwrap();
        assert_eq!((history.len(), history[0].id.as_str()), (100, "0000000000030-1-000"));
        registry.prune();
        assert_eq!(fs::read_dir(&registry.folder).unwrap().count(), 100);
        // A file that is no record is no reason to fail.
        fs::write(registry.folder.join("x.json"), "{").unwrap();
        assert_eq!(registry.history().unwrap().len(), 100);
    }
}
