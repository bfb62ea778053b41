//! Measures the speed of a guest while a restore loads its RAM in the background.
//!
//! ```text
//! cargo run --release -p vm-tests --bin guest_speed [-- --rounds 5 --qemu 10 --data 3000]
//! ```
//!
//! The guest writes to random pages as fast as it can, and is saved while it does. After each
//! restore its writes are counted twice: until everything is loaded, and for some seconds after
//! that. The ratio of the two rates is the speed that the restore leaves to the guest. The first
//! count begins with the guest's first answer, its time with RUN: writes before that answer are not
//! counted, so the ratio is rather too low. In the end the guest recomputes every byte of its
//! memory.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use clap::Parser;
use vm_tests::bench::large_vm;
use vm_tests::platen::Platen;
use vm_tests::table::render;
use vm_tests::{cleanup, Lab, Vm};

/// Restores one VM that writes, and prints the speed of its guest.
#[derive(Debug, Parser)]
struct Options {
    /// Times that each way is measured.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The QEMU: the system's, or the 10 that scripts/fetch-qemu has unpacked.
    #[arg(long, value_parser = ["system", "10"], default_value = "10")]
    qemu: String,
    /// Data in the guest, in MiB (at most 3000).
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u64).range(1..=3000))]
    data: u64,
    /// The guest writes to so many MiB of its data.
    #[arg(long, default_value_t = 64)]
    range: u64,
    /// Writes a second that the guest tries; more than it can do keeps its CPU busy.
    #[arg(long, default_value_t = 200_000)]
    rate: u64,
    /// Measure the restore also with this `--push-rate`. Repeatable.
    #[arg(long, value_name = "SIZE")]
    push_rate: Vec<String>,
}

const LIMIT: Duration = Duration::from_secs(600);
/// Pause between the end of the restore and the second count, and the time of that count.
const CALM: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];
/// Of a hundred writes, the number that rewrite a whole page.
const WHOLE: u64 = 25;

fn main() -> ExitCode {
    vm_tests::end("guest_speed", bench(&Options::parse()))
}

/// One restore.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Writes a second until everything was loaded.
    loading: f64,
    /// Writes a second after that.
    calm: f64,
    /// Seconds from RUN until everything was loaded.
    seconds: f64,
    requests: f64,
}

fn bench(options: &Options) -> Result<()> {
    cleanup::install()?;
    let lab = Lab::new()?;
    let spec = large_vm(&options.qemu, options.data, 300.max(options.data / 2))?;
    let mut vm = lab.boot(&spec, options.data)?;
    vm.guest.dirty(options.rate, WHOLE, options.range)?;
    vm.guest.wait_work("small", 0)?;
    let image = lab.scratch("saved").display().to_string();
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let words = ["save", "--qmp", &qmp, &image, "--then", "pause"];
    Platen::start(&lab, "save", vm.side(), &words)?.succeed(LIMIT)?;
    let mut ways: Vec<(String, Vec<&str>)> = vec![("no limit".into(), Vec::new())];
    for rate in &options.push_rate {
        ways.push((format!("--push-rate {rate}"), vec!["--push-rate", rate]));
    }
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); ways.len()];
    for round in 0..options.rounds as usize {
        for nth in 0..ways.len() {
            let nth = (nth + round) % ways.len();
            let destination = lab.incoming_for(&vm)?;
            drop(std::mem::replace(&mut vm, destination));
            runs[nth].push(restore(&lab, &mut vm, &image, &ways[nth].1)?);
            vm.guest.stop()?;
            vm.guest.verify().with_context(|| ways[nth].0.clone())?;
        }
    }
    let columns: [(&str, Figure); 5] = [
        ("writes/s, loading", |run| run.loading),
        ("writes/s, loaded", |run| run.calm),
        ("ratio", |run| run.loading / run.calm),
        ("loads, s", |run| run.seconds),
        ("requests", |run| run.requests),
    ];
    let rows: Vec<Vec<String>> = ways
        .iter()
        .zip(&runs)
        .map(|((name, _), runs)| {
            let cells = columns.iter().map(|(_, of)| spread(runs.iter().map(of).collect()));
            std::iter::once(name.clone()).chain(cells).collect()
        })
        .collect();
    let head: Vec<&str> = std::iter::once("background").chain(columns.map(|c| c.0)).collect();
    println!("{}", render(&head, &rows));
    Ok(())
}

/// A figure of a restore.
type Figure = fn(&Run) -> f64;

fn restore(lab: &Lab, vm: &mut Vm, image: &str, flags: &[&str]) -> Result<Run> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let words = [&["restore", "--qmp", &qmp, image], flags].concat();
    let begin = Instant::now();
    let mut restore = Platen::start(lab, "restore", vm.side(), &words)?;
    while vm.monitor.run_state()? != "running" {
        ensure!(begin.elapsed() < LIMIT, "{} does not run", vm.name());
        std::thread::sleep(Duration::from_millis(1));
    }
    let run = Instant::now();
    let first = vm.guest.work("small")?;
    restore.succeed(LIMIT)?;
    let (loading, seconds) = (vm.guest.work("small")? - first, run.elapsed().as_secs_f64());
    std::thread::sleep(CALM[0]);
    let (calm, since) = (vm.guest.work("small")?, Instant::now());
    std::thread::sleep(CALM[1]);
    let calm = (vm.guest.work("small")? - calm) as f64 / since.elapsed().as_secs_f64();
    let requests = restore.report()?["requests"].as_f64().context("no requests in the report")?;
    // All writes, of which those that were counted are a share.
    let all = 100.0 / (100 - WHOLE) as f64;
    Ok(Run { loading: loading as f64 / seconds * all, calm: calm * all, seconds, requests })
}

/// Formats the median, and the range in brackets.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    match (values.first(), values.get(values.len() / 2), values.last()) {
        (Some(least), Some(median), Some(most)) => format!("{median:.2} ({least:.2}-{most:.2})"),
        _ => "none".into(),
    }
}
