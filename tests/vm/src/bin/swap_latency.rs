//! Latency of a swap-in: platen by ublk beside the kernel's zram and zswap, each in a guest of its
//! own with the same memory, pages and codec.
//!
//! ```text
//! swap_latency [--runs N] [--only TEXT] [--json FILE]
//! ```
//!
//! A program fills 64 MiB, the kernel swaps it out (`memory.reclaim` of its cgroup), and one or
//! four threads read each page once in random order. `vm.page-cluster` is 0, so a fault reads one
//! page. `--only` leaves out the kinds whose name has no such text. The kinds take turns; the table
//! shows medians of the runs' percentiles. zswap is in front of a disk of the guest and holds all
//! pages itself.
//!
//! Without KVM the guest runs under QEMU's TCG: its times only serve to compare the rows of a
//! table.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{bail, ensure, Context, Result};
use vm_tests::swap::{missing, number, Guest, Stage, LONG, SHORT};
use vm_tests::{cleanup, end, table};

const MEMORY_MIB: u64 = 512;
const SWAPPED_MIB: u64 = 64;
const PERCENTILES: [&str; 3] = ["p50_ns", "p99_ns", "p999_ns"];

/// The swap device of a guest.
#[derive(Clone, Copy)]
enum Swap {
    Zram,
    Zswap,
    Ublk,
}

/// A row of the table: swap device, codec and number of threads.
#[derive(Clone, Copy)]
struct Kind {
    swap: Swap,
    codec: &'static str,
    threads: u64,
}

impl Kind {
    fn name(self) -> String {
        let swap = match self.swap {
            Swap::Zram => "zram",
            Swap::Zswap => "zswap",
            Swap::Ublk => "platen, ublk",
        };
        let threads = if self.threads == 1 { "1 thread" } else { "4 threads" };
        format!("{swap}, {}, {threads}", self.codec)
    }
}

fn main() -> ExitCode {
    end("swap_latency", run_all())
}

fn run_all() -> Result<()> {
    cleanup::install()?;
    if let Some(why) = missing() {
        bail!("no guest can be started: {why}");
    }
    let (runs, only, json) = arguments()?;
    let mut kinds: Vec<Kind> = ["lz4", "zstd"]
        .into_iter()
        .flat_map(|codec| [1, 4].map(|threads| (codec, threads)))
        .flat_map(|(codec, threads)| {
            [Swap::Zram, Swap::Zswap, Swap::Ublk].map(|swap| Kind { swap, codec, threads })
        })
        .collect();
    kinds.retain(|kind| kind.name().contains(&only));
    ensure!(!kinds.is_empty(), "no kind has {only:?} in its name");
    let stage = Stage::new()?;
    let mut all: Vec<Vec<[u64; 3]>> = vec![Vec::new(); kinds.len()];
    for run in 0..runs {
        for (kind, figures) in kinds.iter().zip(&mut all) {
            eprintln!("run {} of {runs}: {}", run + 1, kind.name());
            figures.push(measure(&stage, *kind).with_context(|| kind.name())?);
        }
    }
    let mut rows = Vec::new();
    let mut report = Vec::new();
    for (kind, figures) in kinds.iter().zip(&all) {
        let medians = [0, 1, 2].map(|column| median(figures.iter().map(|run| run[column])));
        let mut row = vec![kind.name()];
        row.extend(medians.map(|ns| format!("{:.0}", ns as f64 / 1e3)));
        rows.push(row);
        report.push(serde_json::json!({ "name": kind.name(), "runs": figures }));
    }
    println!("A swap-in, us; medians of {runs} interleaved runs, guest of {MEMORY_MIB} MiB:");
    print!("{}", table::render(&["", "p50", "p99", "p99.9"], &rows));
    if let Some(path) = json {
        let columns = PERCENTILES.to_vec();
        let text = serde_json::json!({ "columns": columns, "rows": report }).to_string();
        std::fs::write(&path, text + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Runs, text in the name of a kind, file of the figures.
fn arguments() -> Result<(usize, String, Option<PathBuf>)> {
    let (mut runs, mut only, mut json) = (5, String::new(), None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().with_context(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--runs" => runs = value.parse().context("--runs")?,
            "--only" => only = value,
            "--json" => json = Some(PathBuf::from(value)),
            _ => bail!("usage: swap_latency [--runs N] [--only TEXT] [--json FILE]"),
        }
    }
    ensure!(runs > 0, "--runs 0: nothing to measure");
    Ok((runs, only, json))
}

/// Percentiles of one run, nanoseconds.
fn measure(stage: &Stage, kind: Kind) -> Result<[u64; 3]> {
    let mut guest = stage.boot_with_disk("latency", MEMORY_MIB, 2 * SWAPPED_MIB)?;
    begin(&mut guest, kind)?;
    let group = "/sys/fs/cgroup/latency";
    let threads = kind.threads;
    guest.background(
        "latency",
        &format!(
            "echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir -p {group}; sh -c 'echo $$ > {group}/cgroup.procs; \
             exec guest swap latency mib={SWAPPED_MIB} threads={threads} go=/tmp/go'"
        ),
    )?;
    guest.wait_for("latency", "filled", SHORT)?;
    guest.push_out("latency", SWAPPED_MIB)?;
    let swapped = guest.swapped_kib()? >> 10;
    ensure!(swapped > SWAPPED_MIB / 2, "only {swapped} MiB are swapped out");
    guest.vm.sh("touch /tmp/go", SHORT)?;
    let log = guest.finish("latency", LONG)?;
    let percentile = |name: &&str| number(&log, &format!("{name}=")).context(log.clone());
    let [p50, p99, p999] = PERCENTILES.each_ref().map(percentile);
    Ok([p50?, p99?, p999?])
}

/// Starts swapping.
fn begin(guest: &mut Guest, kind: Kind) -> Result<()> {
    let codec = kind.codec;
    match kind.swap {
        Swap::Ublk => guest.serve(
            &format!("--size {}M --codec {codec} --ublk --swap", 2 * SWAPPED_MIB),
            "page-cluster",
        ),
        Swap::Zram => guest
            .vm
            .sh(
                &format!(
                    "echo {codec} > /sys/block/zram0/comp_algorithm && \
                     echo {}M > /sys/block/zram0/disksize && \
                     mkswap /dev/zram0 && swapon -d /dev/zram0",
                    2 * SWAPPED_MIB
                ),
                SHORT,
            )
            .map(drop),
        Swap::Zswap => {
            let folder = "/sys/module/zswap/parameters";
            let said = guest.vm.sh(
                &format!(
                    "for m in lz4_compress lz4hc_compress lz4 zstd; do insmod /modules/$m.ko; done 2> /dev/null; \
                     echo {codec} > {folder}/compressor && echo 90 > {folder}/max_pool_percent && \
                     echo Y > {folder}/enabled && mkswap /dev/vda && swapon /dev/vda && \
                     cat {folder}/compressor {folder}/enabled"
                ),
                SHORT,
            )?;
            ensure!(said.contains(codec) && said.contains('Y'), "zswap is not on: {said}");
            Ok(())
        }
    }
}

fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values[values.len() / 2]
}
