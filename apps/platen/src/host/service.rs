//! The service in the foreground: doors, links, control socket, and messages to the service manager.

use super::settings::Settings;
use super::status::{self, Counters};
use super::switchboard::Carriers;
use super::ServiceArgs;
use crate::device::control;
use crate::say::{say, say_panics};
use anyhow::Context;
use host::{reset, Door, Doorkeeper, Doors, Policy, Record, Registry, Role, Status, Task};
use relay::{Front, FrontConfig, UnixAddress};
use rustix::process::{getrlimit, setrlimit, Resource};
use session::Grants;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use swap::Notify;

/// How often the doors are looked at for ports that carriers have given back.
const TURN: Duration = Duration::from_millis(100);
/// The service manager's time-out is at least this; it hears twice as often.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Refusals that are said in a minute: any local user can cause any number.
const SAID: u32 = 10;

pub(super) fn run(args: &ServiceArgs) -> anyhow::Result<ExitCode> {
    say_panics();
    raise_descriptors();
    let settings = Settings::new(args)?;
    let acceptor = settings.acceptor()?;
    let registry = Registry::open(&settings.config.run_dir, tell)?;
    // Refuses a second service, too.
    let control = UnixAddress::from(status::socket(&settings.config.run_dir)).listen()?;
    let links = listen(&settings)?;
    let found = registry.find_again()?;
    if found.running > 0 {
        say(&format!("{} migrations of a service before this one go on", found.running));
    }
    let carriers = Carriers::new(settings.clone(), registry);
    let counters = Arc::new(Counters::default());
    let answering = (carriers.clone(), counters.clone());
    let _control = control::start(control.listener.try_clone()?, move |question| {
        status::answer(question, &answering.0, &answering.1)
    })?;

    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    ctrlc::set_handler(move || stopping.store(true, Ordering::Release))
        .context("cannot handle signals")?;
    let front = Front::new(
        FrontConfig {
            acceptor,
            page_size: settings.config.page_size,
            grants: Grants::default(),
            delta_cache: crate::args::delta_cache_default(),
        },
        carriers.clone(),
    );
    let beat = Arc::new(AtomicU64::new(0));
    let broken = Arc::new(AtomicBool::new(false));
    let (linking, beating, breaking) = (stop.clone(), beat.clone(), broken.clone());
    let address = links.local_addr()?;
    let accept = move || {
        let go_on = || {
            beating.fetch_add(1, Ordering::Relaxed);
            !linking.load(Ordering::Acquire)
        };
        if let Err(error) = front.run(&links, go_on) {
            say(&format!("{:#}", anyhow::Error::from(error)));
            // Without links the service is none.
            breaking.store(true, Ordering::Release);
            linking.store(true, Ordering::Release);
        }
    };
    std::thread::Builder::new().name("links".into()).spawn(accept)?;

    let others = settings.others();
    let hosts = others.map(|host| (host.name.clone(), host.door, host.ports.0.clone()));
    let mut doors = Doors::new(hosts, found.doors, settings.allowed_users());
    let mut keeper = Keeper { carriers, counters, said: Said::new() };
    // The first turn opens them.
    doors.turn(Duration::ZERO, &mut keeper)?;
    keeper.counters.doors.store(doors.open() as u64, Ordering::Relaxed);
    let names: Vec<_> =
        settings.others().map(|host| format!("{} ({})", host.name, host.door)).collect();
    say(&format!(
        "listening on {address} for other hosts; {} doors to {}",
        doors.open(),
        if names.is_empty() { "no other host".into() } else { names.join(", ") }
    ));
    let notify = Notify::new(std::env::var("NOTIFY_SOCKET").ok().as_deref());
    notify.say("READY=1");
    let mut heart = (Instant::now(), u64::MAX);
    while !stop.load(Ordering::Acquire) {
        doors.turn(TURN, &mut keeper)?;
        keeper.counters.doors.store(doors.open() as u64, Ordering::Relaxed);
        let beats = beat.load(Ordering::Relaxed);
        if heart.0.elapsed() >= HEARTBEAT && beats != heart.1 {
            heart = (Instant::now(), beats);
            notify.say("WATCHDOG=1");
        }
    }
    notify.say("STOPPING=1");
    let running = keeper.carriers.registry.running().len();
    say(&format!("ends; {running} migrations go on without it"));
    Ok(if broken.load(Ordering::Acquire) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Allows as many descriptors as may be: each door is one. If there are too few, some doors stay shut,
/// which is said.
fn raise_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Listens for links of other hosts.
fn listen(settings: &Settings) -> anyhow::Result<TcpListener> {
    let port = settings.config.port;
    let all = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
    // A kernel without IPv6 takes the second.
    let addresses: Vec<_> = match settings.me().listen {
        Some(address) => vec![SocketAddr::new(address, port)],
        None => all.map(|address| SocketAddr::new(address, port)).into(),
    };
    TcpListener::bind(&addresses[..])
        .with_context(|| format!("cannot listen on port {port} for other hosts"))
}

/// Says how a migration has ended.
fn tell(record: &Record) {
    let outcome = match (record.status, &record.cause) {
        (Some(Status::Completed), _) => "completed".into(),
        (Some(Status::Unconfirmed), _) => {
            "is unconfirmed: look at the destination for the VM".into()
        }
        (Some(Status::Forwarded), Some(cause)) => format!("went in the clear: {cause}"),
        (Some(Status::Forwarded), None) => "went in the clear".into(),
        (_, cause) => {
            let cause = cause.as_deref().unwrap_or("its cause is not known");
            format!("failed (phase {}): {cause}", record.reached.name())
        }
    };
    let (plain, transferred) = (record.plain, record.transferred);
    let title = record.title();
    say(&format!("{title} {outcome}; {plain} bytes of QEMU's stream as {transferred} bytes"));
}

/// Lets some messages of a minute through.
struct Said {
    since: Instant,
    count: u32,
}

impl Said {
    fn new() -> Self {
        Self { since: Instant::now(), count: 0 }
    }

    fn say(&mut self, text: &str) {
        if self.since.elapsed() >= Duration::from_secs(60) {
            *self = Self::new();
        }
        self.count += 1;
        if self.count <= SAID {
            say(text);
        }
    }
}

/// What becomes of connections at the doors.
struct Keeper {
    carriers: Arc<Carriers>,
    counters: Arc<Counters>,
    said: Said,
}

impl Keeper {
    fn count(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Doorkeeper for Keeper {
    fn is_lent(&self, door: &Door) -> bool {
        self.carriers.registry.has_port(Role::Source, Some(&door.peer), door.port)
    }

    fn migration(&mut self, door: &Door, listener: &TcpListener, connections: Vec<TcpStream>) {
        let started = self.carriers.leave(door, Task::Source, Some(listener), &connections);
        if let Err(error) = started {
            say(&format!("a migration to {} (port {}) failed: {error:#}", door.peer, door.port));
            connections.into_iter().for_each(reset);
        }
    }

    fn stranger(&mut self, door: &Door, connection: TcpStream, why: &str) {
        let Door { peer, port } = door;
        Self::count(&self.counters.strangers);
        let policy = self.carriers.settings.config.stranger;
        if policy == Policy::Forward {
            let connections = [connection];
            let forwarded = self.carriers.leave(door, Task::Forward, None, &connections);
            let Err(error) = forwarded else { return };
            self.said
                .say(&format!("cannot forward a connection to {peer} (port {port}): {error:#}"));
            connections.into_iter().for_each(reset);
            return;
        }
        reset(connection);
        self.said.say(&format!(
            "reset a connection to {peer} (port {port}) that is no migration: {why}"
        ));
    }

    fn refused(&mut self, door: &Door, why: &str) {
        Self::count(&self.counters.refused);
        self.said.say(&format!("reset a connection to {} (port {}): {why}", door.peer, door.port));
    }

    fn shut(&mut self, door: &Door, why: &str) {
        self.said.say(&format!("the door to {} on port {} is shut: {why}", door.peer, door.port));
    }
}
