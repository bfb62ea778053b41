//! A carrier's end of its channels: its record, which every service gets, and the links that
//! services pass to it.

use crate::channel::{Channel, Post};
use crate::error::HostError;
use crate::listener::DoorListener;
use crate::order::Order;
use crate::record::{now, Phase, Record, Status};
use crate::registry::{folder, socket_of, write_record};
use rustix::fd::AsFd;
use std::fmt;
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Pause after a failure to accept a service.
const BACK_OFF: Duration = Duration::from_millis(100);

/// The most bytes of a cause as JSON, parts of which the other host may have sent. With this limit,
/// the status of a service with all its migrations and causes stays below the limit of an answer.
const MAX_CAUSE: usize = 2000;

/// Links, each with the address of the other host.
type Links = Sender<(TcpStream, String)>;

/// The call by which a carrier gives its place to another source.
#[derive(Default)]
struct GiveWay(OnceLock<Box<dyn Fn() + Send + Sync>>);

impl fmt::Debug for GiveWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GiveWay").finish_non_exhaustive()
    }
}

/// The process that carries a migration, as services see it.
#[derive(Debug)]
pub struct Carrier {
    folder: PathBuf,
    give_way: Arc<GiveWay>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    record: Record,
    /// The door's listening socket, which a new service gets; `None` at the end. This process may
    /// live on, and then a new service, which does not find it, could not open the door.
    door: Option<DoorListener>,
    /// There is more than one while one service takes over from another.
    services: Vec<Service>,
}

/// A service that follows the carrier.
#[derive(Debug)]
struct Service {
    channel: Arc<Channel>,
    /// It did not read, and lacks the last record.
    is_behind: bool,
}

impl Carrier {
    /// Makes this process a carrier. `service` has started it; from now on other services can reach
    /// it.
    ///
    /// # Errors
    /// The folder below `run_dir` cannot be used.
    pub fn start(
        run_dir: &Path,
        record: Record,
        service: Channel,
        door: Option<DoorListener>,
        links: Links,
    ) -> Result<Arc<Self>, HostError> {
        let folder = folder(run_dir)?;
        let socket = socket_of(&folder, &record.id);
        let failed = || HostError::system(format!("cannot listen at {}", socket.display()));
        // The record comes first: a socket without a record would not be found.
        write_record(&folder, &record)
            .map_err(HostError::system(format!("cannot write to {}", folder.display())))?;
        let post = Post::listen(&socket).map_err(failed())?;
        let state = Mutex::new(State { record, door, services: Vec::new() });
        let carrier = Arc::new(Self { folder, give_way: Arc::default(), state });
        carrier.follow(service, links.clone()).map_err(failed())?;
        let accepting = carrier.clone();
        let accept = move || loop {
            match post.accept() {
                Ok(service) => drop(accepting.follow(service, links.clone())),
                // No descriptor or memory is left, perhaps only for a moment. A carrier that a new
                // service cannot reach counts as killed, and its port as free.
                Err(_) => std::thread::sleep(BACK_OFF),
            }
        };
        spawn("services", accept).map_err(failed())?;
        Ok(carrier)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports to a service how the migration stands, and takes its links until the service has
    /// gone.
    fn follow(&self, service: Channel, links: Links) -> io::Result<()> {
        let service = Arc::new(service);
        {
            let mut state = self.lock();
            service.send(&state.record, state.door.as_ref().map(AsFd::as_fd))?;
            // It was accepted behind the end, which the end of its channel tells it.
            if state.record.phase == Phase::Ended {
                return Ok(());
            }
            state.services.push(Service { channel: service.clone(), is_behind: false });
        }
        let give_way = self.give_way.clone();
        spawn("service", move || {
            loop {
                match service.receive::<Order>() {
                    Ok(Some((Order::Link(peer), Some(link)))) => {
                        let _ = links.send((link.into(), peer));
                    }
                    Ok(Some((Order::GiveWay, _))) => {
                        if let Some(give_way) = give_way.0.get() {
                            give_way();
                        }
                    }
                    // The order is of another version.
                    Ok(Some(_)) => {}
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                    Ok(None) | Err(_) => break,
                }
            }
        })
    }

    /// Sets what the carrier does when another source wants its place. Call it once.
    pub fn give_way_by(&self, give_way: impl Fn() + Send + Sync + 'static) {
        let _ = self.give_way.0.set(Box::new(give_way));
    }

    /// Changes the record, and sends it to the services that lack it.
    pub fn update(&self, change: impl FnOnce(&mut Record)) {
        let mut state = self.lock();
        let before = state.record.clone();
        change(&mut state.record);
        if state.record.phase != before.phase {
            state.record.since = now();
        }
        if matches!(state.record.phase, Phase::Opening | Phase::Active) {
            state.record.reached = state.record.phase;
        }
        let State { record, services, .. } = &mut *state;
        let has_changed = *record != before;
        // A service that has gone asks again if it comes back.
        services.retain_mut(|service| {
            if !has_changed && !service.is_behind {
                return true;
            }
            let sent = service.channel.send(record, None);
            // It is sent again at a later call: that a door is free is the last change of a
            // migration in doubt.
            service.is_behind =
                matches!(&sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
            sent.is_ok() || service.is_behind
        });
    }

    /// A copy of the record as it is now.
    pub fn record(&self) -> Record {
        self.lock().record.clone()
    }

    /// Records the outcome, and closes the door. Call this last.
    pub fn end(&self, status: Status, cause: Option<String>) {
        self.update(|record| {
            record.phase = Phase::Ended;
            record.holds_port = false;
            record.ended = Some(now());
            record.status = Some(status);
            record.cause = cause.map(|cause| cut(cause, MAX_CAUSE));
        });
        let mut state = self.lock();
        state.door = None;
        // Then the end of the channel follows, at which the service reads the record.
        let _ = write_record(&self.folder, &state.record);
        let _ = std::fs::remove_file(socket_of(&self.folder, &state.record.id));
        for service in state.services.drain(..) {
            let _ = rustix::net::shutdown(&*service.channel, rustix::net::Shutdown::Both);
        }
    }
}

/// Cuts the text to `most` bytes as JSON, with a mark if something is missing.
fn cut(mut text: String, most: usize) -> String {
    let mut bytes = 0;
    let end = text.char_indices().find(|(_, char)| {
        bytes += match char {
            '"' | '\\' => 2,
            // `\u0001`
            char if char.is_control() => 6,
            char => char.len_utf8(),
        };
        bytes > most
    });
    if let Some((end, _)) = end {
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listener::DoorAddress;
    use crate::peer_user::AllowedUsers;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::mpsc;

    /// A carrier that writes a seed lives on. A service that starts then does not find it.
    #[test]
    fn a_carrier_whose_migration_has_ended_has_no_door_any_more() {
        let run = tempfile::tempdir().unwrap();
        let (service, theirs) = Channel::pair().unwrap();
        let (links, _taken) = mpsc::channel();
        let users = AllowedUsers::default();
        let any = DoorAddress::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let door = DoorListener::open(&any, &users).unwrap();
        let address = door.address().unwrap();
        let begin = Record { id: "1".into(), ..Record::default() };
        let carrier = Carrier::start(run.path(), begin, theirs.into(), Some(door), links).unwrap();
        // With the door, which the service that ends closes.
        drop(service.receive::<Record>().unwrap());
        assert!(DoorListener::open(&address, &users).is_err(), "the migration has the door");
        carrier.end(Status::Completed, None);
        DoorListener::open(&address, &users).unwrap();
    }

    /// Its process may go on for minutes, to write a seed.
    #[test]
    fn a_service_that_comes_behind_the_end_is_told_and_let_go() {
        let run = tempfile::tempdir().unwrap();
        let (service, _theirs) = Channel::pair().unwrap();
        let (links, _taken) = mpsc::channel();
        let begin = Record { id: "1".into(), ..Record::default() };
        let carrier = Carrier::start(run.path(), begin, service, None, links.clone()).unwrap();
        carrier.end(Status::Completed, None);
        let (late, theirs) = Channel::pair().unwrap();
        carrier.follow(late, links).unwrap();
        let theirs = Channel::from(theirs);
        theirs.set_patience(Some(Duration::from_secs(5))).unwrap();
        let (record, door) = theirs.receive::<Record>().unwrap().unwrap();
        assert!(record.phase == Phase::Ended && door.is_none());
        assert!(theirs.receive::<Record>().unwrap().is_none(), "the end of the channel");
    }

    /// It was stopped, as by a debugger.
    #[test]
    fn a_service_that_does_not_read_for_long_gets_the_last_record_all_the_same() {
        let run = tempfile::tempdir().unwrap();
        let (service, theirs) = Channel::pair().unwrap();
        let (links, _taken) = mpsc::channel();
        let begin = Record { id: "1".into(), holds_port: true, ..Record::default() };
        let carrier = Carrier::start(run.path(), begin, theirs.into(), None, links).unwrap();
        // More than the socket holds.
        (1..10_000).for_each(|plain| carrier.update(|record| record.plain = plain));
        carrier.update(|record| record.holds_port = false);
        service.set_patience(Some(Duration::from_millis(100))).unwrap();
        let next = || service.receive::<Record>().ok().flatten().map(|(record, _)| record);
        let last = std::iter::from_fn(next).last().unwrap();
        assert!(last.holds_port, "the socket holds all");
        // Nothing changes any more.
        carrier.update(|_| {});
        assert!(!next().unwrap().holds_port);
        carrier.update(|_| {});
        assert_eq!(next(), None);
    }

    #[test]
    fn a_cause_is_cut_between_characters() {
        assert_eq!(cut("short".into(), 5), "short");
        assert_eq!(cut("a\u{fc}b".into(), 2), "a ...");
        assert_eq!(cut("x".repeat(9000), MAX_CAUSE).len(), MAX_CAUSE + 4);
        for text in ["\u{1}", "\"\\", "\u{1f600}", "\n"] {
            let json = serde_json::to_string(&cut(text.repeat(9000), MAX_CAUSE)).unwrap();
            // And quotes and mark.
            assert!(json.len() <= MAX_CAUSE + 6, "{text:?}: {}", json.len());
        }
    }
}
