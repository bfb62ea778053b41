//! Compares a restore of several VMs from one image with as many restores at once.
//!
//! ```text
//! cargo run -p vm-tests --bin clone_bench [-- --clones 4 --qemu 10 --data 100 --cache 64M]
//! ```
//!
//! One VM is saved. Then it is restored into `--clones` QEMUs, by one `platen restore`, and by as
//! many with `--shared`. The figures are sums over all players. Each guest then recomputes every
//! byte of its memory.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use serde_json::Value;
use vm_tests::bench::large_vm;
use vm_tests::platen::Platen;
use vm_tests::table::render;
use vm_tests::{cleanup, Lab, Vm};

/// Restores several VMs from one image, together and apart, and prints what that costs.
#[derive(Debug, Parser)]
struct Options {
    /// Number of VMs.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=16))]
    clones: u64,
    /// The QEMU: the system's, or the 10 that scripts/fetch-qemu has unpacked.
    #[arg(long, value_parser = ["system", "10"], default_value = "10")]
    qemu: String,
    /// Data in the guest, in MiB (at most 800).
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=800))]
    data: u64,
    /// Value of `--cache`.
    #[arg(long, default_value = "64M")]
    cache: String,
}

const LIMIT: Duration = Duration::from_secs(900);

fn main() -> ExitCode {
    vm_tests::end("clone_bench", bench(&Options::parse()))
}

fn bench(options: &Options) -> Result<()> {
    cleanup::install()?;
    let lab = Lab::new()?;
    let spec = large_vm(&options.qemu, options.data, 150)?;
    let vm = lab.boot(&spec, options.data)?;
    let image = lab.scratch("saved").display().to_string();
    let words = ["save", "--qmp", &address(&vm), &image, "--then", "pause"];
    Platen::start(&lab, "save", vm.side(), &words)?.succeed(LIMIT)?;
    let mut rows = Vec::new();
    for together in [true, false] {
        let mut clones = Vec::new();
        for _ in 0..options.clones {
            clones.push(lab.incoming_for(&vm)?);
        }
        let begin = Instant::now();
        let groups: Vec<&[Vm]> = clones.chunks(if together { clones.len() } else { 1 }).collect();
        let mut restores = Vec::new();
        for group in &groups {
            let mut words = ["restore", &image, "--shared", "--cache", &options.cache]
                .map(str::to_owned)
                .to_vec();
            for vm in *group {
                words.extend(["--qmp".to_owned(), address(vm)]);
            }
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            restores.push(Platen::start(&lab, "restore", vm.side().other(), &words)?);
        }
        let mut reports = Vec::new();
        for restore in &mut restores {
            restore.succeed(LIMIT)?;
            reports.push(restore.report()?);
        }
        let seconds = begin.elapsed().as_secs_f64();
        for vm in &mut clones {
            vm.guest.verify().with_context(|| vm.name().to_owned())?;
        }
        let name = format!("{} by {}", options.clones, if together { "one" } else { "several" });
        let mib = |what| format!("{:.1}", sum(&reports, what) / f64::from(1 << 20));
        rows.push(vec![
            name,
            reports.len().to_string(),
            mib("decoded-bytes"),
            mib("peak-memory-bytes"),
            format!("{:.2}", sum(&reports, "cpu-s")),
            format!("{seconds:.2}"),
        ]);
    }
    let head =
        ["restores", "players", "decoded, MiB", "peak memory, MiB", "CPU, s", "all loaded, s"];
    println!("{}", render(&head, &rows));
    Ok(())
}

fn address(vm: &Vm) -> String {
    format!("unix:{}", vm.platen_monitor().display())
}

/// The sum of a figure of all players.
fn sum(reports: &[Value], what: &str) -> f64 {
    let players = reports.iter().filter_map(|report| report["players"].as_array()).flatten();
    players.filter_map(|player| player[what].as_f64()).sum()
}
