//! The doors: listening sockets for migrations to the other hosts, and the connections to them
//! until the service knows their kind.
//!
//! A door is *lent* while a carrier has its listening socket: then only the carrier accepts there.

mod kept;
mod sort;

use crate::awaits::Awaits;
use crate::entrance::{has_closed, reset};
use crate::error::HostError;
use crate::listener::{admit, DoorAddress, DoorListener};
use crate::peer_user::AllowedUsers;
use crate::place::Place;
use crate::wanted::place_of;
use relay::QemuSocket;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Interval of checks of a connection whose bytes do not show its kind yet.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// The most connections that may wait at one door: as many as QEMU opens.
const MAX_WAITING: usize = 264;
/// Pause after a failure to accept a connection.
const BACK_OFF: Duration = Duration::from_millis(100);
/// Interval of attempts to open a door that could not be opened.
const AGAIN: Duration = Duration::from_millis(500);

/// The name of a door: another host, and the place of a VM there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Door {
    /// Name of the other host.
    pub peer: String,
    /// The place there: a port of the host's door address, or one of its unix sockets.
    pub place: Place,
}

impl std::fmt::Display for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.peer, self.place.in_words())
    }
}

/// Handles the connections. The thread that runs [`Doors::turn`] calls it.
pub trait Doorkeeper {
    /// The doors whose listening sockets carriers have, and at which only these accept now.
    fn lent(&self) -> HashSet<Door>;
    /// The doors whose listening sockets carriers have at all: one in doubt accepts nothing more.
    fn held(&self) -> HashSet<Door>;
    /// Called when a migration begins with these connections: a carrier gets them, and the door.
    fn migration(&mut self, door: &Door, listener: &DoorListener, connections: Vec<QemuSocket>);
    /// The purpose of the other host's socket that awaits this connection, which has been silent
    /// since `since`; `None` if the purpose is not known yet. Called repeatedly, and must not wait.
    fn awaits(&mut self, door: &Door, connection: &QemuSocket, since: Instant) -> Option<Awaits>;
    /// Takes a connection whose client waits for its server to write first, as an NBD client does.
    fn silent(&mut self, door: &Door, connection: QemuSocket);
    /// Takes a connection that is no migration, with the reason.
    fn stranger(&mut self, door: &Door, connection: QemuSocket, why: &str);
    /// Called when a connection was reset, with the reason.
    fn refused(&mut self, door: &Door, why: &str);
    /// Called when a door cannot be opened, or a connection there cannot be accepted, with the
    /// reason. The attempt is repeated.
    fn shut(&mut self, door: &Door, why: &str);
}

/// All doors of a host.
#[derive(Debug)]
pub struct Doors {
    doors: Vec<Gate>,
    allowed: AllowedUsers,
    /// The listening sockets of removed doors that carriers have.
    kept: Vec<Kept>,
}

/// A door with its state.
#[derive(Debug)]
struct Gate {
    door: Door,
    address: DoorAddress,
    listener: Option<DoorListener>,
    /// The former name of the door, by which a carrier may have it.
    former: Option<Door>,
    /// When the next attempt to open the door is due, after one that failed.
    again: Option<Instant>,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    socket: QemuSocket,
    /// The connection's original destination, which may differ from this door's address.
    wanted: Option<SocketAddr>,
    since: Instant,
    /// The connection has bytes that do not show its kind: poll would return at once.
    spoke: bool,
    /// The other host is being asked about the connection.
    asked: bool,
    /// Time of the first question.
    first_asked: Option<Instant>,
    /// The last answer of the other host.
    awaited: Option<Awaits>,
}

/// The listening socket of a door that a carrier has, and that was removed here.
#[derive(Debug)]
struct Kept {
    /// The name by which the carrier has it.
    door: Door,
    address: DoorAddress,
    listener: DoorListener,
}

impl Doors {
    /// Creates doors at these addresses. `open` are listening sockets that carriers got from an
    /// earlier service. The other doors open at the first [`turn`](Self::turn).
    pub fn new(
        wanted: impl IntoIterator<Item = (Door, DoorAddress)>,
        open: Vec<(Door, DoorListener)>,
        allowed: AllowedUsers,
    ) -> Self {
        let gate = |(door, address)| {
            let (listener, former, again, waiting) = (None, None, None, Vec::new());
            Gate { door, address, listener, former, again, waiting }
        };
        let doors = wanted.into_iter().map(gate).collect();
        let mut doors = Self { doors, allowed, kept: Vec::new() };
        doors.adopt(open);
        doors
    }

    /// Replaces the doors and the users who may connect. A door that stays keeps its listening
    /// socket and its connections. The connections of a removed door are reset; a carrier that has
    /// the door's listening socket continues to use it, and a later door with that address gets the
    /// socket (`held`: [`Doorkeeper::held`]).
    pub fn change(
        &mut self,
        wanted: impl IntoIterator<Item = (Door, DoorAddress)>,
        allowed: AllowedUsers,
        held: &HashSet<Door>,
    ) {
        let (before, kept) = (std::mem::take(&mut self.doors), std::mem::take(&mut self.kept));
        let mut before: HashMap<_, _> = before
            .into_iter()
            .map(|gate| ((gate.door.clone(), gate.address.clone()), gate))
            .collect();
        *self = Self::new(wanted, Vec::new(), allowed);
        for gate in &mut self.doors {
            if let Some(same) = before.remove(&(gate.door.clone(), gate.address.clone())) {
                *gate = same;
                gate.admit(&self.allowed);
            }
        }
        let mut removed = kept;
        for gate in before.into_values() {
            gate.waiting.into_iter().for_each(|one| reset(one.socket));
            let former = gate.former.filter(|former| held.contains(former));
            let door = former.unwrap_or(gate.door);
            removed.extend(gate.listener.map(|listener| Kept {
                door,
                address: gate.address,
                listener,
            }));
        }
        self.reuse(removed);
        self.kept.retain(|kept| held.contains(&kept.door));
    }

    /// Adopts the listening sockets of doors that could not be opened because carriers have them.
    pub fn adopt(&mut self, found: Vec<(Door, DoorListener)>) {
        let found = found.into_iter().filter_map(|(door, listener)| {
            let address = listener.address().ok()?;
            Some(Kept { door, address, listener })
        });
        self.reuse(found.collect());
    }

    /// The number of doors, open or not.
    pub fn count(&self) -> usize {
        self.doors.len()
    }

    /// The number of doors that are open.
    pub fn open(&self) -> usize {
        self.doors.iter().filter(|gate| gate.listener.is_some()).count()
    }

    /// Waits for at most `patience`, and passes new connections to `keeper`.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn turn(
        &mut self,
        patience: Duration,
        keeper: &mut impl Doorkeeper,
    ) -> Result<(), HostError> {
        let now = Instant::now();
        for gate in self.doors.iter_mut().filter(|gate| gate.listener.is_none()) {
            gate.open(now, &self.allowed, keeper);
        }
        let lent = keeper.lent();
        self.tend_kept(&lent, keeper);
        let lent: Vec<bool> = self.doors.iter().map(|gate| gate.is_lent(&lent)).collect();
        let is_looked_at = |one: &Waiting| one.spoke || one.asked;
        let undecided = self.doors.iter().any(|gate| gate.waiting.iter().any(is_looked_at));
        let patience = if undecided { patience.min(LOOK_AGAIN) } else { patience };
        let come = self.wait(&lent, patience)?;
        let allowed = &self.allowed;
        let mut short = false;
        for ((gate, lent), come) in self.doors.iter_mut().zip(lent).zip(come) {
            if come {
                short |= !gate.accept(allowed, keeper);
            }
            gate.sort(lent, keeper);
        }
        if short {
            // The connection goes on waiting, so poll would return at once.
            std::thread::sleep(BACK_OFF);
        }
        Ok(())
    }

    /// Waits for connections and their bytes. Returns for each door whether connections wait there,
    /// which no carrier accepts.
    fn wait(&self, lent: &[bool], patience: Duration) -> Result<Vec<bool>, HostError> {
        let open = self.doors.iter().zip(lent).enumerate().filter(|(_, (_, lent))| !**lent);
        let open = open.filter_map(|(nth, (gate, _))| Some((nth, gate.listener.as_ref()?)));
        let (numbers, listeners): (Vec<_>, Vec<_>) = open.unzip();
        let waiting = self.doors.iter().flat_map(|gate| &gate.waiting).filter(|one| !one.spoke);
        let mut fds: Vec<_> = listeners
            .into_iter()
            .map(|listener| PollFd::new(listener, PollFlags::IN))
            .chain(waiting.map(|one| PollFd::new(&one.socket, PollFlags::IN)))
            .collect();
        let mut come = vec![false; self.doors.len()];
        match poll(&mut fds, Timespec::try_from(patience).ok().as_ref()) {
            Ok(_) => {
                for (nth, fd) in numbers.into_iter().zip(&fds) {
                    come[nth] = !fd.revents().is_empty();
                }
                Ok(come)
            }
            Err(rustix::io::Errno::INTR) => Ok(come),
            Err(error) => {
                Err(HostError::system("cannot wait for connections at the doors")(error.into()))
            }
        }
    }
}

impl Gate {
    /// Lets users who were not allowed before connect to a socket that is open.
    fn admit(&self, allowed: &AllowedUsers) {
        if let (DoorAddress::Unix(path), Some(_)) = (&self.address, &self.listener) {
            // If this fails, users whom the old list excludes cannot migrate: that is safe, and
            // they see it.
            let _ = admit(path, allowed);
        }
    }

    fn open(&mut self, now: Instant, allowed: &AllowedUsers, keeper: &mut impl Doorkeeper) {
        if self.again.is_some_and(|again| now < again) {
            return;
        }
        match DoorListener::open(&self.address, allowed) {
            Ok(listener) => (self.listener, self.again) = (Some(listener), None),
            Err(error) => {
                if self.again.is_none() {
                    keeper.shut(&self.door, &format!("cannot listen on {}: {error}", self.address));
                }
                self.again = Some(now + AGAIN);
            }
        }
    }

    /// Accepts the waiting connections. Returns false when the system refuses, perhaps only for a
    /// moment.
    fn accept(&mut self, allowed: &AllowedUsers, keeper: &mut impl Doorkeeper) -> bool {
        let Some(listener) = &self.listener else { return true };
        // Further connections wait for the next turn: one door must not keep the others waiting.
        for _ in 0..MAX_WAITING {
            let socket = match listener.accept() {
                Ok(socket) => socket,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                // No descriptor or memory is left.
                Err(error) => {
                    keeper.shut(&self.door, &format!("a connection cannot be accepted: {error}"));
                    return false;
                }
            };
            if has_closed(&socket) {
                continue;
            }
            if let Err(why) = allowed.check(&socket) {
                reset(socket);
                keeper.refused(&self.door, &why);
                continue;
            }
            if self.waiting.len() >= MAX_WAITING {
                // QEMU's connections write at once, so the oldest is the least likely to be QEMU's.
                reset(self.waiting.remove(0).socket);
                keeper.refused(&self.door, "too many connections wrote nothing");
            }
            let wanted = place_of(&socket);
            let since = Instant::now();
            let (spoke, asked, first_asked, awaited) = (false, false, None, None);
            self.waiting.push(Waiting {
                socket,
                wanted,
                since,
                spoke,
                asked,
                first_asked,
                awaited,
            });
        }
        true
    }
}

#[cfg(test)]
mod tests;
