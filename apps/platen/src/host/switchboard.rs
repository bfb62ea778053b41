//! The service's processes: starts a carrier for each migration, and finds the carrier of a link.

use super::activity::Activity;
use super::journal::say_of;
use super::question;
use super::room;
use super::settings::Settings;
use crate::say::say;
use anyhow::Context;
use host::{
    intercepted, new_id, now, of_connection, of_listener, of_path, Awaits, Channel, Door,
    DoorListener, Job, Order, Place, Record, Registry, Role, Target, Task, What,
};
use relay::{Promise, QemuAddress, QemuSocket, Switchboard};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use turns::Turns;

/// Longest time in which the last migration with a port returns it: that migration is ending when
/// the next one begins.
const PORT_FREE: Duration = Duration::from_secs(2);
/// Pause before a migration that has the wanted port is asked again to give way.
const GIVE_WAY: Duration = Duration::from_millis(200);
/// How long a carrier that starts may take to read its orders.
const ORDERS: Duration = Duration::from_secs(10);
/// Pause before another check of a state that has to change.
const LOOK: Duration = Duration::from_millis(5);

/// The processes of a service.
pub(super) struct Carriers {
    /// For new migrations; replaced when the configuration is read again.
    settings: Mutex<Arc<Settings>>,
    pub(super) registry: Arc<Registry>,
    /// Locked from the check whether a port is free until it is in use.
    opening: Mutex<()>,
    activity: Arc<Activity>,
    /// The turns of all migrations that leave this host.
    turns: OwnedFd,
}

impl Carriers {
    pub(super) fn new(
        settings: Settings,
        registry: Arc<Registry>,
        activity: Arc<Activity>,
    ) -> anyhow::Result<Arc<Self>> {
        // Migrations of a service before this one have the same memory.
        let turns = registry.folder().join("turns");
        let turns = Turns::file_at(&turns, settings.config.max_bandwidth_host);
        let turns = turns.context("no memory for the turns of migrations")?;
        let (opening, settings) = (Mutex::new(()), Mutex::new(Arc::new(settings)));
        Ok(Arc::new(Self { settings, registry, opening, activity, turns }))
    }

    /// The configuration for a new migration.
    pub(super) fn settings(&self) -> Arc<Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the configuration for new migrations.
    pub(super) fn change(&self, settings: Settings) {
        if let Err(error) = Turns::limit(&self.turns, settings.config.max_bandwidth_host) {
            say(&format!("max_bandwidth_host is as before: {error}"));
        }
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
    }

    /// Starts the carrier of a migration that leaves this host, or of a forwarded one.
    pub(super) fn leave(
        &self,
        door: &Door,
        task: Task,
        listener: Option<&DoorListener>,
        connections: &[QemuSocket],
    ) -> anyhow::Result<()> {
        let what = if matches!(task, Task::Disk) { What::Disk } else { What::Vm };
        let record = Record {
            role: Role::Source,
            what,
            peer: door.peer.clone(),
            port: door.place.port(),
            place: Some(connections.first().map_or(door.place, |first| place_of(door, first))),
            vm: connections.first().and_then(of_connection),
            holds_port: listener.is_some(),
            ..self.record()
        };
        self.start(task, record, listener, connections)
    }

    fn record(&self) -> Record {
        Record { id: new_id(), began: now(), ..Record::default() }
    }

    fn start(
        &self,
        task: Task,
        mut record: Record,
        listener: Option<&DoorListener>,
        connections: &[QemuSocket],
    ) -> anyhow::Result<()> {
        room::for_another(&self.registry.running(), record.role, &record.peer)
            .map_err(anyhow::Error::msg)?;
        let (ours, theirs) = Channel::pair().context("no socket for a carrier")?;
        // The carrier runs this process's own file, so an upgrade does not matter; `ps` shows the
        // name.
        let mut child = Command::new("/proc/self/exe")
            .arg0("platen")
            .arg("carry")
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            // The terminal's signals to the service (Ctrl-C) must not reach it.
            .process_group(0)
            .spawn()
            .context("cannot start a carrier")?;
        record.pid = child.id();
        let reap = move || drop(child.wait());
        // A child that is not waited for would stay in the process table.
        let _ = std::thread::Builder::new().name("wait".into()).spawn(reap);
        let settings = self.settings();
        let (config, me) = (settings.for_carrier(), settings.me().name.clone());
        let job = Job { config, me, record: record.clone(), task };
        for connection in connections {
            send(&ours, &Order::Connection, Some(connection.as_fd()))?;
        }
        send(&ours, &Order::Turns, Some(self.turns.as_fd()))?;
        if let Some(listener) = listener {
            send(&ours, &Order::Listener, Some(listener.as_fd()))?;
        }
        let begun = record.clone();
        // The registry comes before the order: a carrier that nobody follows would migrate while
        // its port counts as free.
        let orders = self.registry.add(ours, record)?;
        send(&orders, &Order::Carry(Box::new(job)), None).inspect_err(|_| orders.close())?;
        self.activity.of(begun.role).begins(begun.what);
        say_of(&begun, &format!("{} begins", begun.title()));
        Ok(())
    }

    /// Starts the carrier of a migration that comes to this host. The error is for the peer's user.
    fn come(&self, promise: Promise) -> Result<(), String> {
        let settings = self.settings();
        let named = promise.hello.name.as_deref().unwrap_or_default();
        let Target { place, what } = settings.target(named)?;
        let until = Instant::now() + PORT_FREE;
        let mut asked: Option<Instant> = None;
        let opening = loop {
            let opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
            // An NBD server takes any number of connections.
            if what == What::Disk || !self.registry.has(Role::Destination, None, place) {
                break opening;
            }
            drop(opening);
            // The loss of a source that was just killed may not be known yet.
            if asked.is_none_or(|at| at.elapsed() >= GIVE_WAY) {
                asked = Some(Instant::now());
                self.registry.give_way(place);
            }
            if Instant::now() >= until {
                let place = place.in_words();
                return Err(format!("a migration to {place} of this host is in progress"));
            }
            std::thread::sleep(LOOK);
        };
        // Another hello may have come since the front has looked.
        if self.registry.has_session(&promise.hello.session) {
            return Err("the session exists already".into());
        }
        let vm = match settings.deliver(place) {
            QemuAddress::Tcp(address) => of_listener(address),
            QemuAddress::Unix(address) => of_path(address.path()),
        };
        let names = &promise.owner.names;
        let known = settings
            .others()
            .find(|host| names.iter().any(|name| *name == host.name || name == host.address()));
        let record = Record {
            role: Role::Destination,
            what,
            peer: known.map_or_else(|| promise.owner.to_string(), |host| host.name.clone()),
            port: place.port(),
            place: Some(place),
            vm,
            session: Some(promise.hello.session.clone()),
            holds_port: what == What::Vm,
            ..self.record()
        };
        let task = Task::Destination(promise.into());
        let started = self.start(task, record, None, &[]);
        drop(opening);
        started.map_err(|error| format!("the other host's service cannot carry it: {error:#}"))
    }
}

/// The place to which a connection at a door goes. For an intercepted connection this is its
/// original destination.
pub(super) fn place_of(door: &Door, connection: &QemuSocket) -> Place {
    intercepted(connection).map_or(door.place, Place::Address)
}

/// Sends an order to a carrier that may still be starting.
fn send(channel: &Channel, order: &Order, fd: Option<BorrowedFd<'_>>) -> anyhow::Result<()> {
    let until = Instant::now() + ORDERS;
    loop {
        match channel.send(order, fd) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < until => {
                std::thread::sleep(LOOK);
            }
            sent => return sent.context("the carrier does not take its orders"),
        }
    }
}

impl Switchboard for Carriers {
    fn holds(&self, session: &str) -> bool {
        self.registry.has_session(session)
    }

    fn hand_on(&self, session: &str, socket: TcpStream, peer: &str) -> Result<(), TcpStream> {
        self.registry.hand_on(session, socket, peer)
    }

    fn open(&self, promise: Promise) -> Result<(), String> {
        self.come(promise)
    }

    fn answer(&self, target: &str) -> Option<String> {
        let settings = self.settings();
        let awaits = |place: &str| Ok(Awaits::at(&settings.deliver(settings.target(place)?.place)));
        question::answer(target, awaits)
    }

    fn notice(&self, text: &str) {
        say(text);
    }
}
