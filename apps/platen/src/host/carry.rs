//! A carrier: the process of one migration. The service that starts it passes it its task and its
//! sockets. It outlives that service.

use super::carriage::{Carriage, Outcome, Stop};
use super::destination;
use super::settings::Settings;
use super::source;
use crate::say::say_panics;
use anyhow::{bail, Context};
use host::{connection, Carrier, Channel, DoorListener, Job, Order, Phase, Record, Status, Task};
use relay::{Promise, QemuSocket};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use turns::{Priority, Turns};

/// The task and sockets that the service has passed to a carrier.
struct Orders {
    job: Job,
    connections: Vec<QemuSocket>,
    door: Option<DoorListener>,
    turns: Option<OwnedFd>,
}

/// The way to end the migration, while there is one.
type Stopping = Arc<Mutex<Option<Stop>>>;

pub(super) fn run() -> anyhow::Result<ExitCode> {
    // Otherwise `ps` without arguments would show the last part of /proc/self/exe.
    let _ = rustix::thread::set_name(c"platen");
    say_panics();
    let channel = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    let channel = Channel::from(channel);
    let Orders { job, connections, door, turns } = orders(&channel)?;
    // No terminal and no service shall end this process.
    let _ = rustix::process::setsid();
    let (links, taken) = mpsc::channel();
    let copy = door.as_ref().map(DoorListener::try_clone).transpose()?;
    let carrier =
        Carrier::start(&job.config.run_dir, job.record.clone(), channel, copy, links.clone())?;
    let turns = turns.map(|file| Turns::open(&file, Priority::default()));
    let turns = turns.transpose().context("the turns of this host's migrations")?.map(Arc::new);
    let sockets = (connections, door);
    let stop = Stopping::default();
    let outcome = carry(&carrier, job, sockets, turns, (&taken, &stop))
        .unwrap_or_else(|error| Outcome::failed(format!("{error:#}")));
    let code = match outcome.status {
        Status::Failed => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    };
    let Record { id, vm, .. } = carrier.record();
    carrier.end(outcome.status, outcome.cause);
    // A signal that comes later ends this process. Before, the service would take the migration for
    // a failed one.
    *stop.lock().unwrap_or_else(PoisonError::into_inner) = None;
    drop(links);
    if let Some(departure) = outcome.departure {
        departure.write(vm.as_deref(), &id);
    }
    Ok(code)
}

/// Waits for the service's orders.
fn orders(channel: &Channel) -> anyhow::Result<Orders> {
    let (mut connections, mut door, mut turns) = (Vec::new(), None, None);
    loop {
        let message = channel.receive::<Order>().context("the orders of the service")?;
        match message.context("the service has gone before it had given its orders")? {
            (Order::Connection, Some(fd)) => connections.push(connection(fd)),
            (Order::Listener, Some(fd)) => door = Some(DoorListener::from(fd)),
            (Order::Turns, Some(fd)) => turns = Some(fd),
            (Order::Carry(job), _) => return Ok(Orders { job: *job, connections, door, turns }),
            (order, _) => bail!("an order out of place: {order:?}"),
        }
    }
}

fn carry(
    carrier: &Arc<Carrier>,
    job: Job,
    (connections, door): (Vec<QemuSocket>, Option<DoorListener>),
    turns: Option<Arc<Turns>>,
    (links, stop): (&Receiver<(TcpStream, String)>, &Stopping),
) -> anyhow::Result<Outcome> {
    let settings = Settings::given(job.config, job.me)?;
    let stopping = stop.clone();
    ctrlc::set_handler(move || {
        match &*stopping.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(stop) => stop(),
            // Nothing was carried yet.
            None => std::process::exit(1),
        }
    })
    .context("cannot handle signals")?;
    let carriage = Carriage { settings, carrier: carrier.clone(), stop: stop.clone(), turns };
    match job.task {
        Task::Source => {
            let door = door.context("a migration without its door")?;
            source::run(&carriage, door, connections)
        }
        Task::Destination(order) => destination::run(carriage, &Promise::from(order), links),
        Task::Disk => source::disk(&carriage, connections),
        Task::Forward => {
            carrier.update(|record| record.phase = Phase::Active);
            source::forward_strangers(&carriage, connections)
        }
    }
}
