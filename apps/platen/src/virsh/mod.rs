//! `platen virsh-restore`: makes a saved VM run under libvirt before its RAM is loaded.
//!
//! libvirt starts the QEMU and owns its monitor. platen acts as the client and the source of a
//! postcopy migration. It asks libvirt to prepare the domain, and a player sends the image to the
//! QEMU. Once the QEMU has loaded the devices, platen asks libvirt to finish, which starts the
//! CPUs.

mod daemon;
mod fit;
mod folder;
#[cfg(test)]
mod made;
mod outcome;
mod supervisor;

use crate::restore_args::Loading;
use crate::restore_fit::{image_not_instant, was_paused};
use crate::restore_interrupt::explained;
use crate::restore_load::send_whole;
use crate::restore_players::Players;
use crate::say::say;
use anyhow::{ensure, Context};
use clap::Args;
use daemon::Daemon;
use fit::{domain_not_instant, machine_differs, refuses_postcopy};
use folder::Folder;
use libvirt::{Connection, Domain, Handover, LibvirtError};
use outcome::{cancelled, refuse_unless_it_waits, taken_over, NOTICES};
use player::{PlainOptions, Reader};
use relay::UnixAddress;
use serde_json::{json, Value};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use supervisor::Supervisor;

/// Arguments of `platen virsh-restore`.
#[derive(Args, Debug)]
pub(crate) struct VirshRestoreArgs {
    /// The domain as XML: of `virsh save-image-dumpxml FILE` or `virsh dumpxml --migratable DOMAIN`
    #[arg(value_name = "DOMAIN.xml")]
    domain: PathBuf,
    /// Image of the VM. platen://HOST:PORT/NAME is an image that `platen serve-images` serves there
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Socket of libvirt's daemon [default: the first of virtqemud-sock and libvirt-sock in
    /// /run/libvirt]
    #[arg(long, value_name = "unix:PATH")]
    connect: Option<UnixAddress>,
    /// Folder for the sockets on which QEMU waits for the VM; its path is the same for libvirt
    #[arg(long, value_name = "DIR", default_value = "/run/platen-restore")]
    socket_dir: PathBuf,
    #[command(flatten)]
    loading: Loading,
}

/// The longest XML that is read, bytes. libvirt accepts 4 MiB.
const MAX_XML: u64 = 4 << 20;

/// Decompressed pages that the player keeps, bytes: those that the VM is about to get.
const CACHE: u64 = 4 << 20;

pub(crate) fn run(args: &VirshRestoreArgs) -> anyhow::Result<ExitCode> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "this command makes a folder for libvirt's QEMUs: run it as root"
    );
    let domain = read_domain(&args.domain)?;
    explained()?;
    let sources = args.loading.sources(&args.image, false)?;
    let players = Players::new(sources, args.loading.players(CACHE, false));
    let result = restore(args, &domain, &players);
    let figures = players.end();
    let mut report = match &result {
        Ok(report) => report.clone(),
        Err(error) => json!({ "status": "failed", "error": format!("{error:#}") }),
    };
    report["domain"] = domain.name().into();
    report["players"] = figures.into();
    args.loading.write_report(&report);
    result.map(|_| ExitCode::SUCCESS)
}

fn read_domain(path: &Path) -> anyhow::Result<Domain> {
    let name = || path.display().to_string();
    let mut xml = String::new();
    let file = File::open(path).with_context(name)?;
    file.take(MAX_XML + 1).read_to_string(&mut xml).with_context(name)?;
    Domain::parse(&xml).with_context(name)
}

/// Restores the VM; returns the report.
fn restore(
    args: &VirshRestoreArgs,
    domain: &Domain,
    players: &Players<'_>,
) -> anyhow::Result<Value> {
    let image = players.image();
    let daemon = Daemon::find(args.connect.as_ref())?;
    if args.loading.recover {
        refuse_unless_it_waits(&daemon, domain)?;
        let folder = Folder::find(&args.socket_dir, domain, image)?;
        let report = Supervisor::new(&daemon, domain, players, &folder).go_on()?;
        folder.remove();
        return Ok(report);
    }
    if let Some(saved) = machine_differs(domain, image) {
        anyhow::bail!(
            "the VM was saved from machine type {saved}, and {} has {}: give the XML of the saved VM",
            args.domain.display(),
            domain.machine().unwrap_or_default()
        );
    }
    let mut connection = daemon.open()?;
    let owner = connection.owner()?.context("libvirt does not tell the user of its QEMUs")?;
    let state = connection.state(domain)?;
    ensure!(
        !matches!(state, Some(libvirt::State::Running(_) | libvirt::State::Paused(_))),
        "domain {} is there already: a saved VM runs once",
        domain.name()
    );
    let folder = Folder::make(&args.socket_dir, domain, image, owner)?;
    let restored = start(args, domain, players, &daemon, connection, &folder);
    // The folder's name is needed to continue a VM that waits for another player.
    if restored.is_ok() || !daemon.has(domain) {
        folder.remove();
    }
    restored
}

fn start(
    args: &VirshRestoreArgs,
    domain: &Domain,
    players: &Players<'_>,
    daemon: &Daemon,
    mut connection: Connection,
    folder: &Folder,
) -> anyhow::Result<Value> {
    let begin = Instant::now();
    let socket = folder.next_socket()?;
    let paused = was_paused(players.image());
    let mut reason = image_not_instant(players.image()).or_else(|| domain_not_instant(domain));
    if paused {
        reason = Some("it was paused when it was saved, and libvirt starts what it can run".into());
    }
    if !args.loading.load && reason.is_none() {
        match connection.prepare(domain, &socket, Handover::AtOnce) {
            Ok(()) => {
                let prepared = begin.elapsed();
                let supervisor = Supervisor::new(daemon, domain, players, folder);
                let mut report = supervisor.begin(connection, socket)?;
                report["prepared-ms"] = (prepared.as_secs_f64() * 1e3).into();
                return Ok(report);
            }
            // libvirt has ended the QEMU that it had started.
            Err(LibvirtError::Said { message, .. }) if refuses_postcopy(&message) => {
                reason = Some(format!(
                    "libvirt says: {message} (vm.unprivileged_userfaultfd=1 permits it to QEMU's user)"
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
    if let (Some(reason), false) = (&reason, args.loading.load) {
        say(&format!("everything is loaded before the VM runs, because {reason}"));
    }
    let socket = folder.next_socket()?;
    let handover = Handover::Whole { paused };
    connection.prepare(domain, &socket, handover)?;
    let prepared = begin.elapsed();
    let source = players.source(0).context("no image")?;
    let how = PlainOptions { threads: args.loading.threads(), reader: Reader::Qemu, runs: false };
    let bytes = match send_whole(source, Path::new(&socket), how) {
        Ok(bytes) => bytes,
        Err(error) => {
            let left = cancelled(connection, daemon, domain, handover);
            return Err(left.context(format!("{error:#}")));
        }
    };
    let finished = connection.finish(domain, handover);
    let loaded = begin.elapsed();
    let assumed = if paused { "paused" } else { "running" };
    let vm = taken_over(finished, daemon, domain, assumed, NOTICES)?;
    say(&format!("loaded in {:.2} s: the VM is '{vm}' under libvirt", loaded.as_secs_f64()));
    Ok(json!({
        "status": "completed", "mode": "load", "vm": vm, "bytes": bytes,
        "fallback": reason.filter(|_| !args.loading.load), "prepared-ms": prepared.as_secs_f64() * 1e3,
        "loaded-ms": loaded.as_secs_f64() * 1e3, "cpu-s": crate::report::process_cpu(),
    }))
}
