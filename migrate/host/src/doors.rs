//! The doors: listening sockets for migrations to the other hosts, and the connections to them
//! until the service knows their kind.
//!
//! A door is *lent* while a carrier has its listening socket: then only the carrier accepts there.

use crate::awaits::Awaits;
use crate::entrance::{has_closed, has_ended, reset, OTHER_WAY};
use crate::error::HostError;
use crate::listener::{admit, DoorAddress, DoorListener};
use crate::peer_user::AllowedUsers;
use crate::place::Place;
use crate::wanted::place_of;
use relay::QemuSocket;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{recv, RecvFlags};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use stream::Kind;

/// Longest time for which a connection's kind may stay unknown: a multifd channel may come before
/// its migration.
const UNDECIDED: Duration = Duration::from_secs(10);
/// A connection that is silent for this long makes the service ask the other host what awaits it
/// there. Most migrations have written by then. An NBD server writes first. Its client waits for
/// that, and a VM may wait for the client.
const ASK: Duration = Duration::from_millis(100);
/// Interval of checks of a connection whose bytes do not show its kind yet.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// The most connections that may wait at one door: as many as QEMU opens.
const MAX_WAITING: usize = 264;
/// Why a multifd channel is refused that waits without its migration.
const NO_MAIN: &str = "a multifd channel whose migration did not begin within";
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
    /// Whether a carrier has the door's listening socket now.
    fn is_lent(&self, door: &Door) -> bool;
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
}

/// A door with its state.
#[derive(Debug)]
struct Gate {
    door: Door,
    address: DoorAddress,
    listener: Option<DoorListener>,
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
    /// The last answer of the other host.
    awaited: Option<Awaits>,
}

/// Kind of a waiting connection.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Migration,
    /// A multifd channel: its main connection is still silent, or has not come.
    Channel,
    /// Too few bytes.
    Undecided,
    Silent,
    Stranger(String),
    Gone,
}

impl Doors {
    /// Creates doors at these addresses. `open` are listening sockets that carriers got from an
    /// earlier service. The other doors open at the first [`turn`](Self::turn).
    pub fn new(
        wanted: impl IntoIterator<Item = (Door, DoorAddress)>,
        mut open: Vec<(Door, DoorListener)>,
        allowed: AllowedUsers,
    ) -> Self {
        let mut doors = Vec::new();
        for (door, address) in wanted {
            // The configuration may give the host another address than the one at which this was
            // opened.
            let found = open.iter().position(|(known, listener)| {
                *known == door && listener.address().is_ok_and(|at| at == address)
            });
            let listener = found.map(|at| open.swap_remove(at).1);
            doors.push(Gate { door, address, listener, again: None, waiting: Vec::new() });
        }
        Self { doors, allowed }
    }

    /// Replaces the doors and the users who may connect. A door that stays keeps its listening
    /// socket and its connections. The connections of a removed door are reset; a carrier that has
    /// the door's listening socket continues to use it.
    pub fn change(
        &mut self,
        wanted: impl IntoIterator<Item = (Door, DoorAddress)>,
        allowed: AllowedUsers,
    ) {
        let before = std::mem::take(&mut self.doors);
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
        let shut = before.into_values().flat_map(|gate| gate.waiting);
        shut.for_each(|one| reset(one.socket));
    }

    /// Adopts the listening sockets of doors that could not be opened because carriers have them.
    pub fn adopt(&mut self, found: Vec<(Door, DoorListener)>) {
        for (door, listener) in found {
            let Ok(address) = listener.address() else { continue };
            let gate = self.doors.iter_mut().find(|gate| {
                gate.listener.is_none() && gate.door == door && gate.address == address
            });
            if let Some(gate) = gate {
                (gate.listener, gate.again) = (Some(listener), None);
            }
        }
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
        let lent: Vec<bool> = self.doors.iter().map(|gate| keeper.is_lent(&gate.door)).collect();
        let is_looked_at = |one: &Waiting| one.spoke || one.asked;
        let undecided = self.doors.iter().any(|gate| gate.waiting.iter().any(is_looked_at));
        let patience = if undecided { patience.min(LOOK_AGAIN) } else { patience };
        self.wait(&lent, patience)?;
        let allowed = &self.allowed;
        let mut short = false;
        for (gate, lent) in self.doors.iter_mut().zip(lent) {
            if !lent {
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

    fn wait(&self, lent: &[bool], patience: Duration) -> Result<(), HostError> {
        let listeners = self.doors.iter().zip(lent).filter(|(_, lent)| !**lent);
        let listeners = listeners.filter_map(|(gate, _)| gate.listener.as_ref());
        let waiting = self.doors.iter().flat_map(|gate| &gate.waiting).filter(|one| !one.spoke);
        let mut fds: Vec<_> = listeners
            .map(|listener| PollFd::new(listener, PollFlags::IN))
            .chain(waiting.map(|one| PollFd::new(&one.socket, PollFlags::IN)))
            .collect();
        match poll(&mut fds, Timespec::try_from(patience).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
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
            let (spoke, asked, awaited) = (false, false, None);
            self.waiting.push(Waiting { socket, wanted, since, spoke, asked, awaited });
        }
        true
    }

    /// Finds the kinds of the waiting connections.
    fn sort(&mut self, lent: bool, keeper: &mut impl Doorkeeper) {
        let mut at = 0;
        while at < self.waiting.len() {
            let one = &mut self.waiting[at];
            // Before the look: what comes while this thread stands still behind it is no silence.
            let so_long = one.since.elapsed();
            match look(&one.socket) {
                // Two carriers at one listening socket would take each other's connections.
                Look::Migration if lent => {
                    reset(self.waiting.remove(at).socket);
                    keeper.refused(&self.door, OTHER_WAY);
                }
                Look::Migration => {
                    let Some(listener) = &self.listener else { return };
                    // Connections with another destination are another VM's.
                    let wanted = one.wanted;
                    // A source opens its channels behind its main connection. A channel that came
                    // before it and has ended was left by a migration that was cancelled.
                    let mut nth = 0..;
                    self.waiting.retain(|other| {
                        let came_before = nth.next() < Some(at);
                        !(came_before && other.wanted == wanted && has_ended(&other.socket))
                    });
                    let all = self.waiting.extract_if(.., |other| other.wanted == wanted);
                    let all = all.map(|one| one.socket).collect();
                    keeper.migration(&self.door, listener, all);
                    return;
                }
                Look::Stranger(why) => {
                    keeper.stranger(&self.door, self.waiting.remove(at).socket, &why);
                }
                Look::Gone => drop(self.waiting.remove(at)),
                found => {
                    let spoke = found != Look::Silent;
                    if so_long >= ASK {
                        let answer = keeper.awaits(&self.door, &one.socket, one.since);
                        one.asked = answer.is_none();
                        one.awaited = answer.or(one.awaited);
                    }
                    one.spoke = spoke;
                    let patience = Awaits::patience(one.awaited);
                    let patience = patience.max(if spoke { UNDECIDED } else { ASK });
                    match so_long < patience {
                        true => at += 1,
                        // A stranger may be forwarded. This one has pages of a VM, and no QEMU
                        // there would know whose they are.
                        false if found == Look::Channel => {
                            reset(self.waiting.remove(at).socket);
                            let why = format!("{NO_MAIN} {} s", so_long.as_secs());
                            keeper.refused(&self.door, &why);
                        }
                        false if spoke => {
                            let why = format!("it began no migration in {} s", so_long.as_secs());
                            keeper.stranger(&self.door, self.waiting.remove(at).socket, &why);
                        }
                        false => keeper.silent(&self.door, self.waiting.remove(at).socket),
                    }
                }
            }
        }
    }
}

fn look(socket: &QemuSocket) -> Look {
    let mut first = [0; 8];
    let got = match recv(socket, &mut first[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => return Look::Gone,
        Ok((_, got)) => got,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Look::Silent,
        Err(_) => return Look::Gone,
    };
    match stream::classify(&first[..got]) {
        None => Look::Undecided,
        Some(Kind::Multifd) => Look::Channel,
        Some(Kind::Main | Kind::Recovery) => Look::Migration,
        Some(_) if first.starts_with(&[0x16, 0x03]) => Look::Stranger(
            "it begins with TLS: turn TLS off in libvirt (platen secures the links between the \
             hosts itself)"
                .into(),
        ),
        Some(_) => Look::Stranger(format!("it begins with {:02x?}", &first[..got])),
    }
}

#[cfg(test)]
mod tests;
