//! The server of `platen device serve`: a store, a device, and its transports. The supervisor
//! starts it; with --no-supervisor it runs alone.

mod answers;
mod heap;
mod open;
mod prepare;
mod succession;
mod supervisor;
mod transports;
mod watch;

use self::answers::{serve_without, Answers};
pub(super) use self::open::with_fuse;
use self::open::Opened;
use self::prepare::Prepared;
use self::supervisor::Supervisor;
use self::watch::{Client, Watch};
use super::args::ServeArgs;
use super::claims::Left;
use super::inherited::Inherited;
use super::plan::Plan;
use crate::say::say;
use crate::size::Size;
use anyhow::Context;
use policy::{Policy, Trainer};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use store::Store;
use swap::supervisor::words;

pub(crate) fn run(args: &ServeArgs, inherited: Option<&Inherited>) -> anyhow::Result<()> {
    let Some(prepared) = Prepared::new(args, inherited)? else { return Ok(()) };
    let Prepared { plan, inherited, supervisor, disk_left, ahead, claims: _claims, ways, left } =
        prepared;
    let mut opened = Opened::new(&plan, &inherited, &supervisor, disk_left, ahead)?;

    let policy = Arc::new(OnceLock::new());
    let answers = Answers::new(&plan, &inherited, &supervisor, &opened, &policy, left.clone());
    let (control, metrics) = answers.start(ways.control, ways.metrics, inherited.replaces)?;
    let stopping = Arc::new(AtomicBool::new(false));
    let watch = watch(&plan, &inherited, &opened, &supervisor, &stopping, left.clone())?;

    say(&announcement(&plan, &opened));
    supervisor.tell(words::READY);
    if let Some(new) = opened.new_backing.take() {
        new.keep();
    }
    let trainer = opened.trainer.take();
    let starting = start_policy(&plan, &opened.store, &policy, trainer);
    let starting = match starting {
        Some(Err(error)) if inherited.replaces => {
            serve_without("policy", &error);
            None
        }
        starting => starting.transpose().context("cannot start the policy")?,
    };
    let Opened { place, file, disk, device, nbd, keeper, offload, .. } = opened;
    let served = match place {
        Some(place) => {
            let mount = |path: &_| open::mount(&device, path);
            transports::serve_file(&place, file, mount, ways.nbd, &nbd, &stopping)
        }
        None => transports::serve(&plan, &inherited, ways.nbd, &nbd, disk, &stopping, &supervisor),
    };

    if let Err(error) = &served {
        supervisor.give_up(error);
    }
    // First the endpoints, which use the objects dropped below.
    drop((control, metrics, watch));
    if let Some(starting) = starting {
        // A panic of that thread ended the process.
        let _ = starting.join();
    }
    drop(policy);
    offload.end();
    drop((nbd, device, keeper));
    if supervisor.is_there() && supervisor.has_gone() {
        left.clear();
    }
    served
}

/// Watches the device, and stops the transports when the supervisor or a signal orders it.
fn watch(
    plan: &Plan<'_>,
    inherited: &Inherited,
    opened: &Opened,
    supervisor: &Supervisor,
    stopping: &Arc<AtomicBool>,
    sockets: Left,
) -> anyhow::Result<Watch> {
    let own = opened.disk.as_ref().map(|disk| disk.disk().display().to_string());
    let own = own.or_else(|| inherited.disk.clone());
    let client = inherited.disk.clone().map(|disk| Client {
        disk,
        nbd: Arc::clone(&opened.nbd),
        stopping: Arc::clone(stopping),
    });
    let watch = Watch::start(&opened.device, client, sockets)?;
    let (nbd, stopping) = (Arc::clone(&opened.nbd), Arc::clone(stopping));
    supervisor.listen(&plan.args.name, own, move || {
        stopping.store(true, Ordering::Release);
        nbd.stop();
    })?;
    Ok(watch)
}

/// The log line of a server that starts: name, size, transports and codec.
fn announcement(plan: &Plan<'_>, opened: &Opened) -> String {
    let (args, codec) = (plan.args, plan.codec);
    let served_on = [
        args.nbd.as_ref().map(ToString::to_string),
        opened.disk.as_ref().map(|disk| disk.disk().display().to_string()),
        opened.place.as_ref().map(|place| place.display().to_string()),
    ];
    format!(
        "device {} of {} on {}, codec {}{}",
        args.name,
        Size(opened.store.pages() * device::PAGE as u64),
        served_on.into_iter().flatten().collect::<Vec<_>>().join(" and "),
        codec.codec(),
        if codec.level() == 0 { String::new() } else { format!(" level {}", codec.level()) },
    )
}

/// Starts the policy, if enabled, on a thread of its own: it allocates memory, for which the kernel
/// may first have to swap to this very device.
fn start_policy(
    plan: &Plan<'_>,
    store: &Arc<Store>,
    policy: &Arc<OnceLock<Policy>>,
    trainer: Option<Trainer>,
) -> Option<std::io::Result<JoinHandle<()>>> {
    if !plan.policy.enabled {
        return None;
    }
    let settings = plan.policy.clone();
    let (store, policy) = (Arc::clone(store), Arc::clone(policy));
    let start = move || match Policy::start_with(&store, &settings, trainer) {
        Ok(started) => drop(policy.set(started)),
        Err(error) => {
            say(&format!("idle pages stay as they are: {:#}", anyhow::Error::from(error)))
        }
    };
    Some(thread::Builder::new().name("policy-start".into()).spawn(start))
}
