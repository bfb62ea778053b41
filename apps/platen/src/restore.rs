//! `platen restore`: loads a saved VM into a QEMU that waits with -incoming defer, or into several.
//!
//! All VMs are checked first, each by a thread of its own. Then each thread restores its VM. The
//! VMs share the players, which serve the image, and nothing else: no VM waits for another one.

use crate::monitor::{refuse_in_progress, OLDEST};
use crate::network::private_dir;
use crate::restore_args::Loading;
use crate::restore_clash::{clashes, Traits};
use crate::restore_fit::{
    is_paused_by_its_state_alone, is_preallocated, machine_differs, ram_differs,
    refuse_another_image, was_paused, why_not_instant,
};
use crate::restore_interrupt::explained;
use crate::restore_load::load;
use crate::restore_players::Players;
use crate::restore_supervisor::Supervisor;
use crate::restore_vm::{Vm, MOST};
use crate::saved_vm::{bytes, PLAIN};
use crate::say::say;
use crate::settings::Before;
use crate::size::Size;
use anyhow::{bail, ensure, Context};
use clap::Args;
use image::Image;
use player::{PlainOptions, Reader};
use qmp::Qmp;
use relay::UnixAddress;
use serde_json::{json, Value};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// Arguments of `platen restore`.
#[derive(Args, Debug)]
pub(crate) struct RestoreArgs {
    /// Image of the VM. platen://HOST:PORT/NAME is an image that `platen serve-images` serves there
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Monitor socket of a QEMU for the VM; start QEMU with the VM's options, -incoming defer and
    /// -qmp unix:PATH,server=on,wait=off. Repeatable: several VMs, each with disks of its own, are
    /// restored at once
    #[arg(long, value_name = "unix:PATH", required = true)]
    qmp: Vec<UnixAddress>,
    /// Number of VMs. With it, one --qmp names all of their monitors: the letter n in braces in its
    /// path is 1 to N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MOST)))]
    clones: Option<u16>,
    /// Restore several VMs even if two of them seem to write to one file, or if a VM that runs
    /// writes to it: each of them has an overlay of its own
    #[arg(long)]
    i_have_overlays: bool,
    #[command(flatten)]
    loading: Loading,
    /// Permit other restores of this image that have --shared, too. Each VM needs disks and a
    /// network of its own: it has the MAC addresses that were saved. Several --qmp imply it
    #[arg(long)]
    shared: bool,
    /// Bytes of decompressed pages that several VMs share in memory. With less, a VM that lags
    /// behind the others costs more CPU time
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    cache: Size,
}

/// Time limit for an answer of the monitor.
const MONITOR: Duration = Duration::from_secs(10);

/// Decompressed pages that the player of one VM keeps, bytes: those that the VM is about to get.
const CACHE_OF_ONE: u64 = 4 << 20;

/// The outcome of the restore of one VM.
struct Outcome {
    report: Value,
    error: Option<anyhow::Error>,
}

impl Outcome {
    fn failed(error: anyhow::Error) -> Self {
        let report = json!({ "status": "failed", "error": format!("{error:#}") });
        Self { report, error: Some(error) }
    }
}

/// A VM whose QEMU waits for the VM, or for the rest of it.
struct Waiting {
    qmp: Qmp,
    traits: Traits,
}

pub(crate) fn run(args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let vms = Vm::all(&args.qmp, args.clones)?;
    explained()?;
    let are_several = vms.len() > 1;
    let (loading, shared) = (&args.loading, args.shared || are_several);
    let cache = if are_several { args.cache.0 } else { CACHE_OF_ONE };
    let images = loading.sources(&args.image, shared)?;
    let players = Players::new(images, loading.players(cache, shared));
    let waiting = each(&vms, vms.iter().map(|_| ()), |vm, ()| {
        check(args, vm, players.image()).with_context(|| format!("monitor {}", vm.address))
    });
    if are_several && !loading.recover {
        refuse_clashes(args, &vms, &waiting)?;
    }
    let outcomes = each(&vms, waiting.into_iter(), |vm, waiting| {
        let outcome = match waiting {
            Ok(waiting) => restore(args, vm, &players, waiting.qmp, vms.len()),
            Err(error) => Outcome::failed(error),
        };
        if let (Some(error), true) = (&outcome.error, are_several) {
            vm.say(&format!("{error:#}"));
        }
        outcome
    });
    end(args, &vms, outcomes, players.end())
}

/// Runs `work` for each VM, on a thread of its own: a QEMU may answer late, or never.
fn each<T: Send, R: Send>(
    vms: &[Vm],
    with: impl Iterator<Item = T>,
    work: impl Fn(&Vm, T) -> R + Sync,
) -> Vec<R> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> =
            vms.iter().zip(with).map(|(vm, with)| scope.spawn(move || work(vm, with))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a panic ends the process")).collect()
    })
}

/// Reports how the restores have ended.
fn end(
    args: &RestoreArgs,
    vms: &[Vm],
    mut outcomes: Vec<Outcome>,
    players: Vec<Value>,
) -> anyhow::Result<ExitCode> {
    if let [outcome] = &mut outcomes[..] {
        outcome.report["players"] = players.into();
        args.loading.write_report(&outcome.report);
        return outcome.error.take().map_or(Ok(ExitCode::SUCCESS), Err);
    }
    let failed = outcomes.iter().filter(|outcome| outcome.error.is_some()).count();
    let status = match vms.len() - failed {
        0 => "failed",
        done if done == vms.len() => "completed",
        _ => "partial",
    };
    let reports = vms.iter().zip(outcomes).map(|(vm, outcome)| {
        let mut report = outcome.report;
        report["qmp"] = vm.address.to_string().into();
        report
    });
    let reports: Vec<Value> = reports.collect();
    if failed == 0 {
        say("all VMs are loaded: the image is not needed any more");
    }
    let report = json!({ "status": status, "clones": reports, "players": players });
    args.loading.write_report(&report);
    ensure!(failed == 0, "{failed} of {} VMs have failed, as said above", vms.len());
    Ok(ExitCode::SUCCESS)
}

fn connect_monitor(vm: &Vm) -> anyhow::Result<Qmp> {
    // The monitor is out of band from the beginning: a QEMU whose main loop waits for a page cannot
    // negotiate that later.
    let qmp = Qmp::connect_out_of_band(vm.address.path(), MONITOR)?;
    let version = qmp.version();
    if (version.major, version.minor) < OLDEST {
        bail!("this is QEMU {version}; platen knows QEMU 7.2 and later: upgrade QEMU");
    }
    Ok(qmp)
}

/// Checks whether the image fits a QEMU. Changes nothing.
fn check(args: &RestoreArgs, vm: &Vm, image: &Image) -> anyhow::Result<Waiting> {
    let mut qmp = connect_monitor(vm)?;
    if args.loading.recover {
        refuse_another_image(&mut qmp, image)?;
        return Ok(Waiting { qmp, traits: Traits::default() });
    }
    let state = qmp.query_status()?.status;
    // A VM that waits for pages of its restore is not to be started anew.
    refuse_in_progress(&mut qmp, "this QEMU")?;
    ensure!(
        state == "inmigrate",
        "the VM is '{state}', and a saved VM needs a QEMU that waits for one: start it with -incoming defer"
    );
    if let Some(other) = machine_differs(&mut qmp, image)? {
        bail!(
            "the VM was saved from machine type {}, and this QEMU has {other}: start it with -machine {}",
            image.state().machine().unwrap_or_default(),
            image.state().machine().unwrap_or_default(),
        );
    }
    if let Some((block, saved, here)) = ram_differs(&mut qmp, image)? {
        let [saved, here] = match bytes(saved) == bytes(here) {
            true => [saved, here].map(|length| format!("{length} bytes")),
            false => [saved, here].map(bytes),
        };
        bail!(
            "RAM block {block} has {saved} in the image and {here} in this QEMU: start QEMU with the VM's options, \
             its -m and memory backends among them"
        );
    }
    let traits = if vm.is_one_of_several { Traits::of(&mut qmp)? } else { Traits::default() };
    Ok(Waiting { qmp, traits })
}

/// Refuses VMs that would destroy each other's disks, before any of them is touched.
fn refuse_clashes(
    args: &RestoreArgs,
    vms: &[Vm],
    waiting: &[anyhow::Result<Waiting>],
) -> anyhow::Result<()> {
    let those = vms.iter().zip(waiting);
    let those = those.filter_map(|(vm, waiting)| Some((vm, &waiting.as_ref().ok()?.traits)));
    let found = clashes(those);
    let warnings = if args.i_have_overlays { &found.grave[..] } else { &[] };
    for text in found.other.iter().chain(warnings) {
        say(&format!("warning: {text}"));
    }
    ensure!(
        found.grave.is_empty() || args.i_have_overlays,
        "{}. Nothing was touched. Give each VM an overlay (qemu-img create -f qcow2 -b DISK -F FORMAT OVERLAY); if each \
         has one, --i-have-overlays says so",
        found.grave.join("; ")
    );
    Ok(())
}

/// Restores one VM of `vms`.
fn restore(
    args: &RestoreArgs,
    vm: &Vm,
    players: &Players<'_>,
    mut qmp: Qmp,
    vms: usize,
) -> Outcome {
    let monitor = || format!("monitor {}", vm.address);
    let mut before = Before::default();
    let result = start(args, vm, players, &mut qmp, &mut before, vms).with_context(monitor);
    let put_back = before.put_back(&mut qmp).with_context(monitor);
    match result {
        Ok(report) => Outcome { report, error: put_back.err() },
        // After a failure QEMU may have ended, or may refuse, since its migration is not over.
        Err(error) => Outcome::failed(error),
    }
}

fn start(
    args: &RestoreArgs,
    vm: &Vm,
    players: &Players<'_>,
    qmp: &mut Qmp,
    before: &mut Before,
    vms: usize,
) -> anyhow::Result<Value> {
    let (image, dir) = (players.image(), private_dir()?);
    if args.loading.recover {
        return Supervisor::new(vm, qmp, players, dir).go_on();
    }
    before.set(qmp, &PLAIN)?;
    let mut reason = why_not_instant(qmp, image)?;
    if reason.is_none() {
        // QEMU itself checks whether its host and its RAM permit postcopy.
        let set = before.set(qmp, &[("postcopy-ram", true)]);
        reason = set.err().map(|error| format!("{error:#}"));
    }
    if args.loading.load || reason.is_some() {
        if let (Some(reason), false) = (&reason, args.loading.load) {
            vm.say(&format!("everything is loaded before the VM runs, because {reason}"));
        }
        let empty = reason.is_none() && !is_preallocated(qmp)?;
        let reader = if empty { Reader::EmptyQemu } else { Reader::Qemu };
        let fallback = reason.filter(|_| !args.loading.load);
        // Unlike RUN, the end of a load obeys the run state in the device state.
        let runs = is_paused_by_its_state_alone(image);
        let how = PlainOptions { threads: (args.loading.threads() / vms).max(1), reader, runs };
        let source = players.source(0).context("no image")?;
        load(vm, source, qmp, &dir, how, fallback.as_deref())
    } else {
        if was_paused(image) {
            // After RUN QEMU starts every VM, unless it was told before not to.
            qmp.execute("stop", None)?;
        }
        Supervisor::new(vm, qmp, players, dir).begin()
    }
}
