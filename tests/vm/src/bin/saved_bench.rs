//! Measures saving and restoring a VM with platen and with QEMU's own methods, in one interleaved
//! run.
//!
//! ```text
//! cargo run --release -p vm-tests --bin saved_bench [-- --rounds 5 --qemu 10 --data 700 --cold]
//! ```
//!
//! Each method saves one VM and restores it from the file, round after round in rotating order, so
//! that a change of the machine's speed affects all methods alike. The guest recomputes every byte
//! after each restore. The output is medians with their ranges. Times of `runs` end when QEMU
//! reports the VM as running, and exclude the start of QEMU. CPU time is that of QEMU without its
//! vCPUs, plus that of all other processes of the method.

use std::fs::File;
use std::process::ExitCode;

use anyhow::{ensure, Context, Result};
use clap::{Parser, ValueEnum};
use rustix::fs::{fadvise, Advice};
use vm_tests::bench::large_vm;
use vm_tests::saved::{Restored, Saved, Way};
use vm_tests::table::{render, to_f64};
use vm_tests::{cleanup, Lab};

/// Saves and restores one VM by several ways, and prints medians.
#[derive(Debug, Parser)]
struct Options {
    /// Times that each way is measured.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The QEMU: the system's, or the 10 that scripts/fetch-qemu10 has unpacked.
    #[arg(long, value_parser = ["system", "10"], default_value = "10")]
    qemu: String,
    /// Data in the guest, in MiB (at most 3000).
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=3000))]
    data: u64,
    /// Take each file out of the page cache before it is restored.
    #[arg(long)]
    cold: bool,
    /// Measure only these ways. Repeatable.
    #[arg(long, value_enum)]
    only: Vec<Way>,
}

fn main() -> ExitCode {
    vm_tests::end("saved_bench", bench(&Options::parse()))
}

fn bench(options: &Options) -> Result<()> {
    cleanup::install()?;
    let lab = Lab::new()?;
    let spec = large_vm(&options.qemu, options.data, 300.max(options.data / 2))?;
    let mut vm = lab.boot(&spec, options.data)?;
    let mut ways = Vec::new();
    for way in Way::value_variants() {
        if (options.only.is_empty() || options.only.contains(way)) && way.is_known(&mut vm)? {
            ways.push(*way);
        }
    }
    ensure!(!ways.is_empty(), "QEMU {} has none of these ways", options.qemu);
    let mut saves: Vec<Vec<Saved>> = vec![Vec::new(); ways.len()];
    let mut restores: Vec<Vec<Restored>> = vec![Vec::new(); ways.len()];
    for round in 0..options.rounds as usize {
        for nth in 0..ways.len() {
            let nth = (nth + round) % ways.len();
            let way = ways[nth];
            let file = lab.scratch("saved");
            saves[nth].push(way.save(&lab, &mut vm, &file)?);
            let destination = lab.incoming_for(&vm)?;
            drop(std::mem::replace(&mut vm, destination));
            if options.cold {
                // The cache keeps pages that are not written yet.
                let file = File::open(&file)?;
                file.sync_all()?;
                fadvise(&file, 0, None, Advice::DontNeed)?;
            }
            restores[nth].push(way.restore(&lab, &mut vm, &file)?);
            vm.guest.verify().with_context(|| format!("after {}", way.name()))?;
            std::fs::remove_file(&file)?;
        }
    }
    print(
        &ways,
        &saves,
        &[
            ("saved, ms", |save| save.seconds * 1e3),
            ("CPU s", |save| save.cpu),
            ("MB", |save| to_f64(save.bytes) / 1e6),
        ],
    );
    print(
        &ways,
        &restores,
        &[
            ("runs, ms", |restore| restore.runs * 1e3),
            ("answers, ms", |restore| restore.answers * 1e3),
            ("CPU s", |restore| restore.cpu),
        ],
    );
    let reports: Vec<_> = restores.iter().flatten().filter_map(|r| r.report.as_ref()).collect();
    for key in ["running-ms", "loaded-ms", "served-p50-ms", "served-p99-ms", "requests"] {
        let values = reports.iter().filter_map(|report| report[key].as_f64());
        println!("platen {key}: {}", spread(values.collect()));
    }
    Ok(())
}

/// A column: its head, and the figure of a run.
type Column<'a, R> = (&'a str, fn(&R) -> f64);

/// Prints a table: a row per way, a column per figure.
fn print<R>(ways: &[Way], runs: &[Vec<R>], columns: &[Column<'_, R>]) {
    let row = |(way, runs): (&Way, &Vec<R>)| {
        let cells = columns.iter().map(|(_, of)| spread(runs.iter().map(of).collect()));
        std::iter::once(way.name().to_owned()).chain(cells).collect()
    };
    let rows: Vec<Vec<String>> = ways.iter().zip(runs).map(row).collect();
    let head: Vec<&str> = std::iter::once("way").chain(columns.iter().map(|c| c.0)).collect();
    println!("{}", render(&head, &rows));
}

/// Formats the median, and the range in brackets.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    match (values.first(), values.get(values.len() / 2), values.last()) {
        (Some(least), Some(median), Some(most)) => format!("{median:.2} ({least:.2}-{most:.2})"),
        _ => "none".into(),
    }
}
