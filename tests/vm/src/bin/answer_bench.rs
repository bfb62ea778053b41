//! Measures the time until a guest that is restored at once answers, with and without the hot set
//! of its image.
//!
//! ```text
//! cargo run --release -p vm-tests --bin answer_bench [-- --rounds 5 --qemu 10 --data 300 --cold --over 1000]
//! ```
//!
//! One VM is saved. A first restore makes the hot set. Then restores with `--no-hot-set` and with
//! the hot set alternate. Times begin with the start of `platen restore`, and exclude the start of
//! QEMU. `answers` ends when the guest has answered on its serial port. The guest then recomputes
//! every byte of its memory.

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use clap::Parser;
use rustix::fs::{fadvise, Advice};
use serde_json::Value;
use vm_tests::bench::large_vm;
use vm_tests::platen::{restore_from, serve_images, Platen};
use vm_tests::table::render;
use vm_tests::{cleanup, Lab, Rate};

/// Restores one VM with and without the hot set of its image, and prints medians.
#[derive(Debug, Parser)]
struct Options {
    /// Times that each way is measured.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The QEMU: the system's, or the 10 that scripts/fetch-qemu has unpacked.
    #[arg(long, value_parser = ["system", "10"], default_value = "10")]
    qemu: String,
    /// Data in the guest, in MiB (at most 3000).
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=3000))]
    data: u64,
    /// Take the image out of the page cache before each restore.
    #[arg(long)]
    cold: bool,
    /// Restore from a server of images at the other end of a link of so many Mbit/s.
    #[arg(long, value_name = "MBIT")]
    over: Option<u32>,
}

const LIMIT: Duration = Duration::from_secs(600);

/// The ways, and their flags.
const WAYS: [(&str, &[&str]); 2] = [("unknown", &["--no-hot-set"]), ("known", &[])];

fn main() -> ExitCode {
    vm_tests::end("answer_bench", bench(&Options::parse()))
}

fn bench(options: &Options) -> Result<()> {
    cleanup::install()?;
    let lab = Lab::new()?;
    if let Some(mbit) = options.over {
        lab.net.shape(Rate::Mbit(mbit))?;
    }
    let spec = large_vm(&options.qemu, options.data, 300.max(options.data / 2))?;
    let mut vm = lab.boot(&spec, options.data)?;
    let image = lab.scratch("saved");
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let words = ["save", "--qmp", &qmp, &image.display().to_string(), "--then", "pause"];
    Platen::start(&lab, "save", vm.side(), &words)?.succeed(LIMIT)?;
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); WAYS.len()];
    for round in 0..=options.rounds as usize {
        for nth in 0..WAYS.len() {
            let nth = (nth + round) % WAYS.len();
            // The first restore makes the hot set.
            let is_first = round == 0;
            if is_first && WAYS[nth].1 != WAYS[1].1 {
                continue;
            }
            let destination = lab.incoming_for(&vm)?;
            drop(std::mem::replace(&mut vm, destination));
            if options.cold {
                fadvise(File::open(&image)?, 0, None, Advice::DontNeed)?;
            }
            let run = restore(&lab, &mut vm, &image, WAYS[nth].1, is_local(options, round))?;
            vm.guest.verify().with_context(|| WAYS[nth].0.to_owned())?;
            if !is_first {
                runs[nth].push(run);
            }
        }
    }
    let columns: [(&str, Figure); 8] = [
        ("runs, ms", |run| run.runs),
        ("answers, ms", |run| run.answers),
        ("connect to RUN, ms", |run| run.report["running-ms"].as_f64().unwrap_or(0.0)),
        ("loaded, ms", |run| run.report["loaded-ms"].as_f64().unwrap_or(0.0)),
        ("hot pages", |run| run.report["hot"].as_f64().unwrap_or(0.0)),
        ("requests", |run| run.report["requests"].as_f64().unwrap_or(0.0)),
        ("p50, ms", |run| run.report["served-p50-ms"].as_f64().unwrap_or(0.0)),
        ("p99, ms", |run| run.report["served-p99-ms"].as_f64().unwrap_or(0.0)),
    ];
    let rows: Vec<Vec<String>> = WAYS
        .iter()
        .zip(&runs)
        .map(|((name, _), runs)| {
            let cells = columns.iter().map(|(_, of)| spread(runs.iter().map(of).collect()));
            std::iter::once((*name).to_owned()).chain(cells).collect()
        })
        .collect();
    let head: Vec<&str> = std::iter::once("hot set").chain(columns.map(|(name, _)| name)).collect();
    println!("{}", render(&head, &rows));
    Ok(())
}

/// A figure of a restore.
type Figure = fn(&Run) -> f64;

/// One restore.
#[derive(Clone, Debug)]
struct Run {
    runs: f64,
    answers: f64,
    report: Value,
}

/// Whether a restore reads the image of its own host. The first one does, to make the hot set.
fn is_local(options: &Options, round: usize) -> bool {
    options.over.is_none() || round == 0
}

fn restore(
    lab: &Lab,
    vm: &mut vm_tests::Vm,
    image: &Path,
    flags: &[&str],
    is_local: bool,
) -> Result<Run> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let path = image.display().to_string();
    let words = [&["restore", "--qmp", &qmp, &path], flags].concat();
    let folder = image.parent().context("the image lies in no folder")?;
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    let served = match is_local {
        true => None,
        false => Some(serve_images(lab, vm.side().other(), folder, None)?),
    };
    let begin = Instant::now();
    let mut restore = match &served {
        None => Platen::start(lab, "restore", vm.side(), &words)?,
        Some(served) => restore_from(lab, vm, served, &name, flags)?,
    };
    while vm.monitor.run_state()? != "running" {
        ensure!(begin.elapsed() < LIMIT, "{} does not run", vm.name());
        std::thread::sleep(Duration::from_millis(1));
    }
    let runs = begin.elapsed().as_secs_f64() * 1e3;
    vm.guest.ping()?;
    let answers = begin.elapsed().as_secs_f64() * 1e3;
    restore.succeed(LIMIT)?;
    let report = restore.report()?;
    Ok(Run { runs, answers, report })
}

/// Formats the median, and the range in brackets.
fn spread(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    match (values.first(), values.get(values.len() / 2), values.last()) {
        (Some(least), Some(median), Some(most)) => format!("{median:.1} ({least:.1}-{most:.1})"),
        _ => "none".into(),
    }
}
