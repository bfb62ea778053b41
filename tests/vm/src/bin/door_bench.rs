//! The cost of a migration through the doors of `platen host`, beside that through explicit relays
//! (`platen relay`, `platen receive`), in one interleaved run.
//!
//! One VM goes back and forth. Every round migrates it once each way of carrying, in turns, with
//! the same codec and threads, and the guest recomputes every byte after it. The CPU time is that
//! of both QEMUs, without the guest's CPUs, and of platen: the relays' whole lives, and the time of
//! the services and their processes until they rest again.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::Parser;
use serde_json::json;
use vm_tests::table::{render, seconds};
use vm_tests::{bench, cleanup, platen, Lab, Method, Rate, Services, Side, Vm};

/// Migrates one VM through doors and through explicit relays, and prints medians.
#[derive(Debug, Parser)]
struct Options {
    /// Migrations each way of carrying.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The link's speed each way in Mbit/s; 0 is unlimited.
    #[arg(long, default_value_t = 1000)]
    link: u32,
    /// Data in the guest, in MiB.
    #[arg(long, default_value_t = 300)]
    data: u64,
}

/// The limit of what only a hang takes.
const LIMIT: Duration = Duration::from_secs(600);
/// The same for both: by default the two would not have one codec.
const CODEC: [&str; 4] = ["--codec", "zstd", "--level", "1"];
const SETTINGS: &str = "codec = \"zstd\"\nlevel = 1\n";
/// The way of carrying, for the output.
const WAYS: [&str; 2] = ["explicit relays", "doors"];

/// A figure of a run.
type Figure = fn(&Run) -> f64;

/// A migration's milliseconds, and CPU seconds.
struct Run {
    total_ms: u64,
    qemus: f64,
    platen: f64,
}

fn main() -> ExitCode {
    vm_tests::end("door_bench", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    cleanup::install()?;
    println!("binary under test: {}", platen::binary()?.display());
    let lab = Lab::new()?;
    ensure!(
        lab.net.describe() == "two network namespaces",
        "a door address is one on two hosts: this needs network namespaces, which root makes"
    );
    if options.link > 0 {
        lab.net.shape(Rate::Mbit(options.link))?;
    }
    let services = Services::start(&lab, SETTINGS)?;
    let mut vm = lab.boot_or_load(&bench::large_vm("system", options.data, 250)?, options.data)?;
    let mut runs: [Vec<Run>; 2] = Default::default();
    for round in 0..options.rounds {
        for turn in 0..2 {
            let way = (round + turn) % 2;
            let (there, run) = match way {
                0 => by_relays(&lab, vm)?,
                _ => by_doors(&lab, &services, vm)?,
            };
            vm = there;
            let verified = vm.guest.verify()?;
            ensure!(verified.pages >= options.data * 256, "only {verified:?}");
            println!(
                "round {round} {:16} {:>8} {:>6.2} CPU s of QEMU, {:>6.2} of platen",
                WAYS[way],
                seconds(run.total_ms),
                run.qemus,
                run.platen
            );
            runs[way].push(run);
        }
    }
    print(&runs);
    Ok(())
}

fn by_relays(lab: &Lab, mut vm: Vm) -> Result<(Vm, Run)> {
    let (mut destination, before) = prepare(lab, &mut vm)?;
    let incoming = format!("unix:{}", destination.incoming_socket().display());
    destination.listen(&incoming)?;
    let flags = ["--deliver", &incoming, "--once"];
    let mut receive = platen::receive_with(lab, destination.side(), &flags)?;
    let socket = lab.scratch("relay");
    let mut relay = platen::relay(lab, vm.side(), &socket, receive.peer, &CODEC)?;
    let total_ms = migrate(&mut vm, &mut destination, &format!("unix:{}", socket.display()))?;
    let qemus = qemus(&vm, &destination)? - before;
    let platen = relay.succeed(LIMIT)?.cpu + receive.platen.succeed(LIMIT)?.cpu;
    Ok((destination, Run { total_ms, qemus, platen }))
}

fn by_doors(lab: &Lab, services: &Services, mut vm: Vm) -> Result<(Vm, Run)> {
    let sides = [Side::Source, Side::Destination];
    let of_services =
        || -> Result<f64> { sides.iter().map(|side| services.cpu(*side)).sum::<Result<f64>>() };
    let (mut destination, before) = prepare(lab, &mut vm)?;
    let started = of_services()?;
    let door = format!("tcp:{}", services.door(destination.side()));
    destination.listen(&door)?;
    let total_ms = migrate(&mut vm, &mut destination, &door)?;
    let qemus = qemus(&vm, &destination)? - before;
    let platen = of_services()? - started;
    Ok((destination, Run { total_ms, qemus, platen }))
}

/// A QEMU that awaits the VM, both with QEMU's defaults, and the CPU time of both so far.
fn prepare(lab: &Lab, vm: &mut Vm) -> Result<(Vm, f64)> {
    let mut destination = lab.incoming_for(vm)?;
    for end in [&mut *vm, &mut destination] {
        Method::platen(&[]).prepare(end)?;
    }
    let cpu = qemus(vm, &destination)?;
    Ok((destination, cpu))
}

fn qemus(vm: &Vm, destination: &Vm) -> Result<f64> {
    Ok(vm.process.host_cpu()? + destination.process.host_cpu()?)
}

/// Migrates, and returns the milliseconds that QEMU counts.
fn migrate(vm: &mut Vm, destination: &mut Vm, uri: &str) -> Result<u64> {
    vm.monitor.execute("migrate", json!({"uri": uri}))?;
    let state = vm.wait_migration_end(&["completed", "failed", "cancelled"], LIMIT)?;
    ensure!(state == "completed", "the source's migration is {state}");
    vm.wait_left()?;
    destination.assert_running()?;
    let stats = vm.monitor.query_migrate()?;
    stats["total-time"].as_u64().with_context(|| format!("no total-time in {stats}"))
}

fn median(runs: &[Run], figure: impl Fn(&Run) -> f64) -> f64 {
    let mut all: Vec<f64> = runs.iter().map(figure).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

fn print(runs: &[Vec<Run>; 2]) {
    let figures: [(&str, Figure); 3] = [
        ("time, s", |run| vm_tests::table::to_f64(run.total_ms) / 1e3),
        ("CPU of platen, s", |run| run.platen),
        ("CPU in all, s", |run| run.platen + run.qemus),
    ];
    let rows = figures.map(|(name, figure)| {
        let [relays, doors] = [0, 1].map(|way| median(&runs[way], figure));
        let more = format!("{:+.1} %", (doors / relays - 1.0) * 100.0);
        vec![name.to_owned(), format!("{relays:.2}"), format!("{doors:.2}"), more]
    });
    let head = ["medians", WAYS[0], WAYS[1], "doors over relays"];
    println!("\n{}", render(&head, &rows));
}
