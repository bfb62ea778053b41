//! `platen restore`: loads a saved VM into a QEMU that waits with -incoming defer.

use crate::monitor::{refuse_in_progress, OLDEST};
use crate::restore_fit::{
    is_preallocated, machine_differs, refuse_another_image, was_paused, why_not_instant,
};
use crate::restore_load::load;
use crate::restore_player::PlayerOptions;
use crate::restore_source::Source;
use crate::restore_supervisor::Supervisor;
use crate::saved_vm::{write_json, PLAIN};
use crate::say::say;
use crate::settings::Before;
use crate::size::Size;
use anyhow::{bail, ensure, Context};
use clap::Args;
use image::Options;
use player::{PlainOptions, PlayOptions, Reader};
use qmp::Qmp;
use relay::UnixAddress;
use serde_json::{json, Value};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Arguments of `platen restore`.
#[derive(Args, Debug)]
pub(crate) struct RestoreArgs {
    /// Image of the VM
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Monitor socket of a QEMU for the VM; start QEMU with the VM's options, -incoming defer and
    /// -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "unix:PATH")]
    qmp: UnixAddress,
    /// Another copy of the image, used if IMAGE is damaged. Repeatable
    #[arg(long, value_name = "IMAGE")]
    copy: Vec<PathBuf>,
    /// Load everything before the VM runs. Without this option the VM runs at once, where its QEMU
    /// can do that, and its RAM is loaded while it runs
    #[arg(long)]
    load: bool,
    /// Continue with a VM that runs at this QEMU already and lacks pages, because `platen restore`
    /// was killed or its image damaged. IMAGE is the same image, or a copy
    #[arg(long, conflicts_with = "load")]
    recover: bool,
    /// Compare the checksums of all units of IMAGE and its copies before QEMU is touched
    #[arg(long)]
    verify: bool,
    /// Permit other restores of this image that have --shared, too. Each VM needs disks and a network
    /// of its own: it has the MAC addresses that were saved
    #[arg(long)]
    shared: bool,
    /// Number of decompression threads, 1 to 255 [default: the number of CPUs, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=255))]
    decompress_threads: Option<u16>,
    /// Bytes a second at which RAM that the VM has not asked for is loaded while it runs; 0 is no
    /// limit. What it asks for is not limited
    #[arg(long, value_name = "SIZE", default_value = "0")]
    push_rate: Size,
    /// Neither send the pages that earlier restores of this image asked for before the VM runs, nor
    /// note those that this one asks for
    #[arg(long)]
    no_hot_set: bool,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Time limit for an answer of the monitor.
const MONITOR: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let monitor = || format!("monitor {}", args.qmp);
    let mut images = Source::all(&args.image, &args.copy, args.shared)?;
    if args.verify {
        Source::verify(&mut images, threads(args))?;
    }
    let mut before = Before::default();
    let mut qmp = connect_monitor(args).with_context(monitor)?;
    let result = restore(args, images, &mut qmp, &mut before).with_context(monitor);
    let put_back = before.put_back(&mut qmp).with_context(monitor);
    let report = match &result {
        Ok(report) => report.clone(),
        Err(error) => json!({ "status": "failed", "error": format!("{error:#}") }),
    };
    write_json(args.json.as_deref(), &report);
    // After a failure QEMU may have ended, or may refuse, since its migration is not over.
    result.and(put_back).map(|()| ExitCode::SUCCESS)
}

fn threads(args: &RestoreArgs) -> usize {
    args.decompress_threads.map_or(Options::default().threads, usize::from)
}

fn options(args: &RestoreArgs) -> PlayerOptions {
    let rate = Some(args.push_rate.0).filter(|&rate| rate > 0);
    let play = PlayOptions { threads: threads(args), rate };
    PlayerOptions { play, hot_set: !args.no_hot_set }
}

fn connect_monitor(args: &RestoreArgs) -> anyhow::Result<Qmp> {
    // Out of band from the beginning: a QEMU whose main loop waits for a page cannot negotiate it
    // later.
    let qmp = Qmp::connect_out_of_band(args.qmp.path(), MONITOR)?;
    let version = qmp.version();
    if (version.major, version.minor) < OLDEST {
        bail!("this is QEMU {version}; platen knows QEMU 7.2 and later: upgrade QEMU");
    }
    Ok(qmp)
}

fn restore(
    args: &RestoreArgs,
    images: VecDeque<Source<'_>>,
    qmp: &mut Qmp,
    before: &mut Before,
) -> anyhow::Result<Value> {
    let image = &Arc::clone(&images[0].image);
    let dir = tempfile::Builder::new()
        .prefix("platen-")
        .tempdir()
        .context("cannot make a private directory")?;
    if args.recover {
        refuse_another_image(qmp, image)?;
        return Supervisor::new(&args.qmp, qmp, images, options(args), dir).go_on();
    }
    let vm = qmp.query_status()?;
    ensure!(
        vm.status == "inmigrate",
        "the VM is '{}', and a saved VM needs a QEMU that waits for one: start it with -incoming defer",
        vm.status
    );
    refuse_in_progress(qmp, "this QEMU")?;
    if let Some(other) = machine_differs(qmp, image)? {
        bail!(
            "the VM was saved from machine type {}, and this QEMU has {other}: start it with -machine {}",
            image.state().machine().unwrap_or_default(),
            image.state().machine().unwrap_or_default(),
        );
    }
    before.set(qmp, &PLAIN)?;
    let mut reason = why_not_instant(qmp, image)?;
    if reason.is_none() {
        // QEMU itself checks whether its host and its RAM permit postcopy.
        let set = before.set(qmp, &[("postcopy-ram", true)]);
        reason = set.err().map(|error| format!("{error:#}"));
    }
    if args.load || reason.is_some() {
        if let (Some(reason), false) = (&reason, args.load) {
            say(&format!("everything is loaded before the VM runs, because {reason}"));
        }
        let empty = reason.is_none() && !is_preallocated(qmp)?;
        let reader = if empty { Reader::EmptyQemu } else { Reader::Qemu };
        let fallback = reason.filter(|_| !args.load);
        let how = PlainOptions { threads: threads(args), reader };
        load(&images[0], qmp, &dir, how, fallback.as_deref())
    } else {
        if was_paused(image) {
            // After RUN QEMU starts every VM, unless it was told before not to.
            qmp.execute("stop", None)?;
        }
        Supervisor::new(&args.qmp, qmp, images, options(args), dir).begin()
    }
}
