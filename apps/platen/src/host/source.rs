//! A carrier beside the source QEMU: of a migration, of a disk, or of a connection that goes past
//! platen.

use super::carriage::{Carriage, Outcome};
use super::journal::say_of;
use crate::keeper;
use crate::report::process_cpu;
use crate::seed::{Departure, OFFERS};
use anyhow::{anyhow, bail, Context};
use host::{
    forward, reset, Care, DoorEntrance, DoorListener, Phase, Place, Policy, Record, Status, Target,
    What,
};
use relay::{DiskError, QemuSocket, RelayError, Source, SourceConfig};
use serde_json::json;
use session::SessionError;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long the disk of a seed may take for the beginning: the source QEMU waits meanwhile.
const BEGINS: Duration = Duration::from_secs(1);
/// The error if the source QEMU gave up before anything was read of it.
const LEFT: &str =
    "the source QEMU had left before the other host answered: nothing of its VM was sent";

/// Migrates the VM of the connections.
pub(super) fn run(
    carriage: &Carriage,
    door: DoorListener,
    connections: Vec<QemuSocket>,
) -> anyhow::Result<Outcome> {
    let record = carriage.carrier.record();
    let settings = &carriage.settings;
    let (said, of) = (record.clone(), settings.allowed_users());
    let entrance = DoorEntrance::new(door, connections, of, move |why| {
        say_of(&said, &format!("{}: reset another connection: {why}", said.title()));
    });
    let entrance = Arc::new(entrance);
    let peer = settings.config.find(&record.peer)?;
    let turns = carriage.turns.clone();
    let target = Target { place: record.place(), what: record.what };
    let departure = departure(carriage);
    let pages = departure.as_ref().map(Departure::sink);
    let config = SourceConfig { turns, pages, ..settings.source(peer, target)? };
    // The configuration does not say where a unix socket would lead in the clear.
    let may_forward = settings.config.unreachable == Policy::Forward
        && !matches!(record.place(), Place::Socket(_));
    // Before the peer is contacted, so that a failure here costs the peer nothing.
    let keeper = keeper::start()?;
    let opened = Source::connect_with(&config, None, &mut |text| carriage.say(text));
    let goes_on = match &opened {
        Ok(_) => true,
        Err(RelayError::Session(SessionError::Connect { .. })) => may_forward,
        Err(_) => false,
    };
    // The other host may have answered late: libvirt has given the port there to the next VM.
    if goes_on && entrance.source_has_left() {
        bail!("{LEFT}");
    }
    let source = match opened {
        Ok(source) => Arc::new(source),
        Err(RelayError::Session(error @ SessionError::Connect { .. })) if may_forward => {
            let why = format!("{:#}", anyhow::Error::from(error));
            carriage.say(&format!("goes in the clear: {why}"));
            let care = Care { unmarked: true, migrations: false };
            return forward_all(carriage, || entrance.next(), &why, care);
        }
        Err(error) => {
            // QEMU must see its sockets close now; those that still wait at the door, too.
            entrance.refuse_waiting();
            return Err(error.into());
        }
    };
    source.set_keeper(keeper);
    let (handle, stopped) = (source.handle(), Arc::new(AtomicBool::new(false)));
    let (stopping, asked) = (handle.clone(), Arc::clone(&stopped));
    // From here on a signal to end reaches the peer, too. Without a message the peer waits for a
    // new link.
    carriage.stop_by(move || {
        asked.store(true, Ordering::Release);
        stopping.stop();
    });
    // Pages that QEMU sent before the offers have come would cross.
    let go_on = || !entrance.source_has_left() && !stopped.load(Ordering::Acquire);
    source.await_seed(OFFERS, go_on);
    if entrance.source_has_left() {
        bail!("{LEFT}");
    }
    source.accept_on(entrance.clone())?;
    carriage.carrier.update(|record| record.phase = Phase::Active);
    let progress = |record: &mut Record| {
        record.plain = source.counters().plain.load(Ordering::Relaxed);
        record.transferred = source.session().bytes_out.load(Ordering::Relaxed);
        record.ram = source.counters().ram.load(Ordering::Relaxed);
        record.ram_sent = source.counters().ram_seen(config.page_size);
        record.phase = if handle.is_over() { Phase::Ending } else { Phase::Active };
        // A connection that the relay does not accept any more is another migration's.
        record.holds_port = handle.accepts();
    };
    let cpu = process_cpu();
    let report = || {
        let cpu = process_cpu() - cpu;
        json!({ "status": "completed", "cpu-seconds": { "source": cpu } }).to_string().into_bytes()
    };
    let result = carriage.while_telling(progress, || source.run(|text| carriage.say(text), report));
    match result {
        Ok(end) if end.return_path => {
            Ok(Outcome { departure, ..Outcome::new(Status::Completed, None) })
        }
        Ok(_) => {
            let cause = "the source QEMU used no return path".into();
            Ok(Outcome::new(Status::Unconfirmed, Some(cause)))
        }
        Err(error) => Err(error.into()),
    }
}

/// Begins a seed of the VM, if the configuration wants one. Without a seed the VM migrates all the
/// same.
fn departure(carriage: &Carriage) -> Option<Departure> {
    let config = &carriage.settings.config;
    let folder = config.write_seed.clone()?;
    let (limit, page_size) = (config.seed_limit, config.page_size);
    let begin =
        move || folder.exists().then(|| Departure::begin(&folder, limit, page_size)).transpose();
    in_time(BEGINS, begin)
        .unwrap_or_else(|| Err(anyhow!("its disk has not answered for {BEGINS:?}")))
        .inspect_err(|error| carriage.say(&format!("no seed will be written: {error:#}")))
        .ok()
        .flatten()
}

/// The result of `work` on a thread of its own; `None` if it is not there in time. A late one is
/// dropped.
fn in_time<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, over) = channel();
    let body = move || drop(done.send(work()));
    std::thread::Builder::new().name("seed".into()).spawn(body).ok()?;
    over.recv_timeout(limit).ok()
}

/// Carries the connection of an NBD client.
pub(super) fn disk(carriage: &Carriage, connections: Vec<QemuSocket>) -> anyhow::Result<Outcome> {
    let record = carriage.carrier.record();
    let settings = &carriage.settings;
    let connection = connections.into_iter().next().context("a disk without its connection")?;
    let peer = settings.config.find(&record.peer)?;
    let turns = carriage.turns.clone();
    let target = Target { place: record.place(), what: record.what };
    let config = SourceConfig { turns, ..settings.source(peer, target)? };
    let source = match Source::connect_with(&config, None, &mut |text| carriage.say(text)) {
        Ok(source) => source,
        Err(error) => {
            let is_unreachable = matches!(error, RelayError::Session(SessionError::Connect { .. }));
            let policy = match is_unreachable {
                true => settings.config.unreachable,
                false => policy(carriage),
            };
            return past_platen(carriage, Some(connection), policy, error);
        }
    };
    carriage.carrier.update(|record| record.phase = Phase::Active);
    let handle = source.handle();
    carriage.stop_by(move || handle.stop());
    let progress = |record: &mut Record| {
        record.plain = source.counters().plain.load(Ordering::Relaxed);
        record.transferred = source.session().bytes_out.load(Ordering::Relaxed);
        record.phase = Phase::Active;
    };
    let report = || json!({ "status": "completed" }).to_string().into_bytes();
    let carry = || source.carry_disk(connection, |text| carriage.say(text), report);
    match carriage.while_telling(progress, carry) {
        Ok(_) => Ok(Outcome::new(Status::Completed, None)),
        Err(DiskError { error, untouched }) => {
            past_platen(carriage, untouched, policy(carriage), error)
        }
    }
}

/// The policy for a connection that turns out to be no NBD client's.
fn policy(carriage: &Carriage) -> Policy {
    match carriage.carrier.record().place() {
        // A connection that was intercepted is forwarded unharmed.
        Place::Address(_) => Policy::Forward,
        _ => carriage.settings.config.stranger,
    }
}

/// Forwards a silent connection that was not carried, unencrypted, or resets it.
fn past_platen(
    carriage: &Carriage,
    untouched: Option<QemuSocket>,
    policy: Policy,
    error: RelayError,
) -> anyhow::Result<Outcome> {
    let Some(connection) = untouched else { return Err(error.into()) };
    // The configuration does not say where a unix socket would lead in the clear.
    let is_socket = matches!(carriage.carrier.record().place(), Place::Socket(_));
    if policy == Policy::Refuse || is_socket {
        reset(connection);
        return Err(error.into());
    }
    let why = format!("{:#}", anyhow::Error::from(error));
    carriage.say(&format!("goes in the clear: {why}"));
    forward_strangers(carriage, vec![connection])
}

/// Forwards connections that are no migration, unencrypted.
pub(super) fn forward_strangers(
    carriage: &Carriage,
    connections: Vec<QemuSocket>,
) -> anyhow::Result<Outcome> {
    let waiting = Mutex::new(connections);
    let next = || {
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.pop().ok_or_else(|| io::Error::from(ErrorKind::WouldBlock))
    };
    let care = Care { unmarked: true, migrations: true };
    forward_all(carriage, next, "it is no migration", care)
}

fn forward_all(
    carriage: &Carriage,
    next: impl Fn() -> io::Result<QemuSocket>,
    why: &str,
    care: Care,
) -> anyhow::Result<Outcome> {
    let record = carriage.carrier.record();
    // Only a connection that was intercepted is redirected. A connection that was silent may still
    // turn out to be a migration.
    let own = rustix::process::geteuid().as_raw();
    let is_led = matches!(record.place(), Place::Address(_));
    let care = Care {
        unmarked: care.unmarked && is_led && carriage.settings.qemu_users().contains(&own),
        migrations: care.migrations && (is_led || record.what == What::Disk),
    };
    let peer = carriage.settings.config.find(&record.peer)?;
    let to = match record.place() {
        Place::Address(address) => address.to_string(),
        place => peer.address_with(place.port()),
    };
    let copied = AtomicU64::new(0);
    let progress = |record: &mut Record| {
        record.plain = copied.load(Ordering::Relaxed);
        record.transferred = record.plain;
        record.phase = Phase::Active;
    };
    carriage
        .while_telling(progress, || forward(next, &to, &copied, care))
        .with_context(|| format!("cannot forward to {to}, because {why}"))?;
    Ok(Outcome::new(Status::Forwarded, Some(why.into())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_waits_for_no_disk_of_a_seed_that_hangs() {
        assert_eq!(in_time(Duration::from_secs(600), || 7), Some(7));
        let (disk, answers) = channel::<()>();
        assert_eq!(in_time(Duration::from_millis(50), move || answers.recv().is_ok()), None);
        drop(disk);
    }
}
