//! Measures what a seed saves a VM that returns to its host.
//!
//! ```text
//! cargo run --release -p vm-tests --bin seed_bench [-- --rounds 5 --link 1000 --data 700]
//! ```
//!
//! Each round has three migrations of one VM by platen: one as without seeds; the way back, whose
//! source writes a seed; then the guest writes for a while; and one to the host with the seed. The
//! guest recomputes every byte after each round. The output is medians with their ranges.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use clap::Parser;
use vm_tests::bench::large_vm;
use vm_tests::table::{render, to_f64};
use vm_tests::{cleanup, platen, Lab, Method, Outcome, Patience, Rate, Vm, VmSpec};

/// Migrates a VM away and back, with a seed and without one, and prints medians.
#[derive(Debug, Parser)]
struct Options {
    /// Times that each migration is measured.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The QEMU: the system's, or the 10 that scripts/fetch-qemu has unpacked.
    #[arg(long, value_parser = ["system", "10"], default_value = "system")]
    qemu: String,
    /// Rate of the link, Mbit/s; 0 for no limit.
    #[arg(long, default_value_t = 1000)]
    link: u32,
    /// Data in the guest, in MiB (at most 3000).
    #[arg(long, default_value_t = 700, value_parser = clap::value_parser!(u64).range(1..=3000))]
    data: u64,
    /// Updates a second, per cent of whole pages, and MiB that are written to, after the VM has
    /// gone.
    #[arg(long, value_delimiter = ',', num_args = 3, default_value = "300,30,175")]
    dirty: Vec<u64>,
    /// Seconds for which the guest writes.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Both QEMUs touch their memory first (`-mem-prealloc`).
    #[arg(long)]
    prealloc: bool,
    /// Further flags of `platen migrate`.
    #[arg(long, allow_hyphen_values = true, value_delimiter = ' ')]
    flags: Vec<String>,
}

const WAYS: [&str; 3] = ["without a seed", "while a seed is written", "with the seed"];

fn main() -> ExitCode {
    vm_tests::end("seed_bench", bench(&Options::parse()))
}

fn bench(options: &Options) -> Result<()> {
    cleanup::install()?;
    let lab = Lab::new()?;
    let spec = large_vm(&options.qemu, options.data, 300.max(options.data / 2))?;
    let spec = VmSpec { prealloc: options.prealloc, ..spec };
    let mut vm = lab.boot(&spec, options.data)?;
    lab.net.shape(if options.link == 0 { Rate::Unlimited } else { Rate::Mbit(options.link) })?;
    let mut runs: [Vec<Outcome>; 3] = Default::default();
    for _ in 0..options.rounds {
        let store = lab.scratch("store").display().to_string();
        let platen = platen::binary()?.display().to_string();
        let init = [platen, "image".into(), "init".into(), store.clone()];
        let mut init = lab.spawn("init", vm.side(), &init)?;
        ensure!(init.wait(Duration::from_secs(60))?.status.success(), "{}", init.tail());
        let (there, cold) = moves(&lab, vm, options, &[])?;
        let (back, written) = moves(&lab, there, options, &["--write-seed", &store])?;
        vm = back;
        if options.seconds > 0 {
            vm.guest.dirty(options.dirty[0], options.dirty[1], options.dirty[2])?;
            std::thread::sleep(Duration::from_secs(options.seconds));
            vm.guest.stop()?;
        }
        let (there, warm) = moves(&lab, vm, options, &[&format!("--seed={store}")])?;
        vm = there;
        vm.guest.verify().context("after a round")?;
        std::fs::remove_dir_all(&store)?;
        for (runs, run) in runs.iter_mut().zip([cold, written, warm]) {
            runs.push(run);
        }
    }
    print(&runs);
    Ok(())
}

fn moves(lab: &Lab, vm: Vm, options: &Options, extra: &[&str]) -> Result<(Vm, Outcome)> {
    let flags: Vec<&str> = options.flags.iter().map(String::as_str).collect();
    let limit = Patience::ByItself(Duration::from_secs(600));
    Method::platen(&[&flags, extra].concat()).run(lab, vm, limit)
}

/// A figure of a migration.
type Figure = fn(&Outcome) -> f64;

fn print(runs: &[Vec<Outcome>; 3]) {
    let columns: [(&str, Figure); 4] = [
        ("seconds", |run| to_f64(run.total_ms) / 1e3),
        ("downtime, ms", |run| to_f64(run.downtime_ms)),
        ("MB", |run| to_f64(run.wire) / 1e6),
        ("CPU s", |run| run.cost.total()),
    ];
    let cold: Vec<f64> = columns.iter().map(|(_, of)| median(&runs[0], *of)).collect();
    let row = |(way, runs): (&&str, &Vec<Outcome>)| {
        let cells = columns.iter().zip(&cold).map(|((_, of), cold)| {
            let value = median(runs, *of);
            format!("{value:.2} ({:.2})", value / cold)
        });
        std::iter::once((*way).to_owned()).chain(cells).collect()
    };
    let rows: Vec<Vec<String>> = WAYS.iter().zip(runs).map(row).collect();
    let head: Vec<&str> = std::iter::once("").chain(columns.iter().map(|c| c.0)).collect();
    println!("{}", render(&head, &rows));
    println!("In brackets: of the migration without a seed. CPU s of the second row include the");
    println!("writing of the seed, behind the migration.");
    let pages = |key: &str| {
        let of = |run: &Outcome| run.report.as_ref().and_then(|it| it["seed"][key].as_f64());
        median(&runs[2], |run| of(run).unwrap_or(0.0))
    };
    println!("with the seed: {} pages not sent, of {} offered", pages("pages"), pages("offered"));
}

fn median(runs: &[Outcome], of: impl Fn(&Outcome) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
