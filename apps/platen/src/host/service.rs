//! The service in the foreground: doors, links, sockets, signals, and messages to the service
//! manager.

use super::activity::Activity;
use super::asking::Asking;
use super::links::Links;
use super::metrics::{self, Metrics};
use super::reload::{self, Hangups, Reading, Reload};
use super::said::Said;
use super::settings::Settings;
use super::switchboard::{place_of, Carriers};
use super::{events, status, ServiceArgs};
use crate::descriptors::raise_descriptors;
use crate::device::control;
use crate::device::endpoint::Endpoint;
use crate::say::{say, say_panics};
use anyhow::Context;
use host::{
    intercepted, reset, Awaits, Door, DoorListener, Doorkeeper, Doors, Place, Policy, Registry,
    Task,
};
use relay::{Listening, QemuSocket, UnixAddress};
use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use swap::Notify;

/// Interval of checks of the doors for ports that carriers have returned.
const TURN: Duration = Duration::from_millis(100);
/// The service manager's time-out is at least this; it is notified twice as often.
const HEARTBEAT: Duration = Duration::from_millis(500);

pub(super) fn run(args: &ServiceArgs) -> anyhow::Result<ExitCode> {
    say_panics();
    // Each door needs one. If there are too few, some doors stay closed, and a message says so.
    raise_descriptors();
    let hangups = Hangups::take()?;
    let settings = Settings::new(args)?;
    let (acceptor, certificate_end) = settings.acceptor()?;
    let activity = Arc::new(Activity::new());
    activity.certificate_end.store(certificate_end, Ordering::Relaxed);
    let registry = Registry::open(&settings.config.run_dir, activity.clone())?;
    // Refuses a second service, too.
    let control = UnixAddress::from(status::socket(&settings.config.run_dir)).listen()?;
    settings.make_socket_folder()?;
    let carriers = Carriers::new(settings.clone(), registry, activity.clone())?;
    let mut links = Links::listen(&settings, carriers.clone())?;
    let found = carriers.registry.find_again()?;
    if found.running > 0 {
        say(&format!("{} migrations of a service before this one go on", found.running));
    }
    let sockets = Sockets::open(control, &settings, &carriers, &activity)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    ctrlc::set_handler(move || stopping.store(true, Ordering::Release))
        .context("cannot handle signals")?;
    links.serve(acceptor, settings.config.page_size)?;

    let mut doors = Doors::new(settings.doors(), found.doors, settings.allowed_users());
    let mut keeper =
        Keeper { carriers, activity, said: Said::new(Instant::now()), asking: Asking::default() };
    // The first turn opens them.
    doors.turn(Duration::ZERO, &mut keeper)?;
    let notify = Notify::new(std::env::var("NOTIFY_SOCKET").ok().as_deref());
    let reading = None;
    let service = Service { args, links, doors, keeper, notify, reading, _sockets: sockets };
    service.count();
    let address = service.links.address;
    say(&format!("listening on {address} for other hosts; {}", service.doors_in_words()));
    service.notify.say("READY=1");
    service.serve(&stop, &hangups)
}

/// A service that runs.
struct Service<'a> {
    args: &'a ServiceArgs,
    links: Links,
    doors: Doors,
    keeper: Keeper,
    notify: Notify,
    /// The configuration that is being read.
    reading: Option<Reading>,
    _sockets: Sockets,
}

impl Service<'_> {
    /// Serves until it is ordered to stop, or cannot accept links any more.
    fn serve(mut self, stop: &AtomicBool, hangups: &Hangups) -> anyhow::Result<ExitCode> {
        let mut heart = (Instant::now(), u64::MAX);
        let mut is_asked = false;
        while !stop.load(Ordering::Acquire) && !self.links.are_broken() {
            self.doors.adopt(self.keeper.carriers.registry.take_doors());
            self.doors.turn(TURN, &mut self.keeper)?;
            is_asked |= hangups.came();
            // One that came while the file was being read may be for a later change of it.
            if is_asked && self.reading.is_none() {
                is_asked = false;
                self.reload();
            }
            if let Some(result) = self.reading.as_ref().and_then(Reading::end) {
                self.reading = None;
                self.reloaded(result);
            }
            self.count();
            let beats = self.links.beats();
            if heart.0.elapsed() >= HEARTBEAT && beats != heart.1 {
                heart = (Instant::now(), beats);
                self.notify.beat(true);
            }
        }
        self.notify.say("STOPPING=1");
        let running = self.keeper.carriers.registry.running().len();
        say(&format!("ends; {running} migrations go on without it"));
        Ok(if self.links.are_broken() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    fn count(&self) {
        let activity = &self.keeper.activity;
        activity.doors.store(self.doors.open() as u64, Ordering::Relaxed);
        activity.doors_configured.store(self.doors.count() as u64, Ordering::Relaxed);
        activity.links_refused.store(self.links.turned_away(), Ordering::Relaxed);
    }

    fn doors_in_words(&self) -> String {
        let settings = self.keeper.carriers.settings();
        let names = settings.others().map(|host| format!("{} ({})", host.name, host.door));
        let names: Vec<_> = names.collect();
        let to = if names.is_empty() { "no other host".into() } else { names.join(", ") };
        format!("{} doors to {to}", self.doors.open())
    }

    /// Begins to read the configuration again.
    fn reload(&mut self) {
        self.notify.say(&reload::reloading());
        match Reading::begin(self.args.clone(), self.keeper.carriers.settings()) {
            Ok(reading) => self.reading = Some(reading),
            Err(error) => self.reloaded(Err(error)),
        }
    }

    /// Adopts a new configuration for new migrations, or changes nothing and prints the reason.
    fn reloaded(&mut self, new: anyhow::Result<Reload>) {
        let activity = self.keeper.activity.clone();
        match new.and_then(|new| self.take_configuration(new)) {
            Ok(text) => {
                activity.reloads.fetch_add(1, Ordering::Relaxed);
                say(&format!("read {} again: {text}", self.args.config.display()));
            }
            Err(error) => {
                activity.reloads_failed.fetch_add(1, Ordering::Relaxed);
                say(&format!("the configuration stays as it was: {error:#}"));
            }
        }
        self.notify.say("READY=1");
    }

    fn take_configuration(&mut self, new: Reload) -> anyhow::Result<String> {
        let carriers = self.keeper.carriers.clone();
        // First what may fail.
        new.settings.make_socket_folder()?;
        self.links.serve(new.acceptor, new.settings.config.page_size)?;
        self.keeper.activity.certificate_end.store(new.certificate_end, Ordering::Relaxed);
        let held = self.keeper.held();
        self.doors.change(new.settings.doors(), new.settings.allowed_users(), &held);
        carriers.change(new.settings);
        self.doors.turn(Duration::ZERO, &mut self.keeper)?;
        Ok(format!("{}; {}", new.change.describe(), self.doors_in_words()))
    }
}

/// Answers questions about the service.
struct Sockets {
    _control: (Listening, Endpoint),
    _events: (Listening, Endpoint),
    _metrics: Option<Metrics>,
}

impl Sockets {
    fn open(
        control: Listening,
        settings: &Settings,
        carriers: &Arc<Carriers>,
        activity: &Arc<Activity>,
    ) -> anyhow::Result<Self> {
        let answering = (carriers.clone(), activity.clone());
        let answers = control::start(control.listener.try_clone()?, move |question| {
            status::answer(question, &answering.0, &answering.1)
        })?;
        let events = events::listen(&settings.config.run_dir)?;
        let of_all = activity.clone();
        let follow = move |follower| of_all.feed.add(follower);
        let followed = events::start(events.listener.try_clone()?, follow)?;
        let metrics = metrics::start(settings.config.metrics.as_deref(), activity, carriers)?;
        let (_control, _events) = ((control, answers), (events, followed));
        Ok(Self { _control, _events, _metrics: metrics })
    }
}

/// Handler of the connections at the doors.
struct Keeper {
    carriers: Arc<Carriers>,
    activity: Arc<Activity>,
    said: Said,
    asking: Asking,
}

impl Keeper {
    fn count(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Doorkeeper for Keeper {
    fn lent(&self) -> HashSet<Door> {
        self.carriers.registry.lent()
    }

    fn held(&self) -> HashSet<Door> {
        self.carriers.registry.held()
    }

    fn migration(&mut self, door: &Door, listener: &DoorListener, connections: Vec<QemuSocket>) {
        let started = self.carriers.leave(door, Task::Source, Some(listener), &connections);
        if let Err(error) = started {
            say(&format!("a migration to {door} failed: {error:#}"));
            connections.into_iter().for_each(reset);
        }
    }

    fn awaits(&mut self, door: &Door, connection: &QemuSocket, since: Instant) -> Option<Awaits> {
        let (settings, place) = (self.carriers.settings(), place_of(door, connection));
        self.asking.about(&settings, &door.peer, place, since)
    }

    fn silent(&mut self, door: &Door, connection: QemuSocket) {
        let connections = [connection];
        if let Err(error) = self.carriers.leave(door, Task::Disk, None, &connections) {
            self.said.failed(&format!("a disk to {door} failed: {error:#}"));
            connections.into_iter().for_each(reset);
        }
    }

    fn stranger(&mut self, door: &Door, connection: QemuSocket, why: &str) {
        Self::count(&self.activity.strangers);
        let policy = match door.place {
            // The configuration does not say where a unix socket would lead in the clear.
            Place::Socket(_) => Policy::Refuse,
            // A connection that was intercepted is forwarded unharmed.
            _ if intercepted(&connection).is_some() => Policy::Forward,
            _ => self.carriers.settings().config.stranger,
        };
        if policy == Policy::Forward {
            let connections = [connection];
            let forwarded = self.carriers.leave(door, Task::Forward, None, &connections);
            let Err(error) = forwarded else { return };
            self.said.failed(&format!("cannot forward a connection to {door}: {error:#}"));
            connections.into_iter().for_each(reset);
            return;
        }
        reset(connection);
        self.said.refused(&format!("reset a connection to {door} that is no migration: {why}"));
    }

    fn refused(&mut self, door: &Door, why: &str) {
        Self::count(&self.activity.refused);
        self.said.refused(&format!("reset a connection to {door}: {why}"));
    }

    fn shut(&mut self, door: &Door, why: &str) {
        self.said.failed(&format!("the door to {door} is shut: {why}"));
    }
}
