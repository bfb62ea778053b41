//! `platen-bench offload`: the cost of passing pages to a QAT device, and the gain of asynchronous
//! offload.
//!
//! Each measurement is a separate process, since a process has one device; they take turns, and
//! medians are shown. Without `--device` the device is simulated with `engine stored`, which
//! returns stored blocks: the figures show the software's cost and the effect of a latency, never a
//! device's throughput or ratio. They exclude the CPU time of the simulated device's threads.

mod measure;

use crate::program::{again, QatLibraries};
use anyhow::{bail, ensure, Context};
use clap::{Args, ValueEnum};
use corpus::Corpus;
use measure::{compare, measure, Plan, PAGE};
use qat::{Direction, Engine, EngineOptions, Libraries, Qat, StartOptions};
use serde_json::{json, Value};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

/// The longest duration of one measurement.
const AT_MOST: Duration = Duration::from_secs(4);
/// The device's time for a page. On a busy machine software would do pages after the default.
const DEADLINE: Duration = Duration::from_secs(10);

/// Arguments of `platen-bench offload`.
#[derive(Args, Debug)]
pub(super) struct OffloadArgs {
    /// On this host's device instead of the simulated one
    #[arg(long)]
    device: bool,
    #[command(flatten)]
    libraries: QatLibraries,
    /// Pages for each measurement
    #[arg(long, default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pages: u32,
    /// Pages in flight, asynchronously
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(2..=256))]
    in_flight: u16,
    /// The simulated device's latency in the comparison of direct and asynchronous offload,
    /// microseconds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    latency: u32,
    /// Runs of each kind; medians are reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Write the figures to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// One measurement in this process, its figures on standard output
    #[arg(long, hide = true)]
    only: Option<Kind>,
}

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// The driver, many pages in flight, a device without latency.
    Driver,
    /// Direct and asynchronous offload, a device with latency.
    Compare,
}

pub(super) fn run(args: &OffloadArgs) -> anyhow::Result<()> {
    match args.only {
        Some(kind) => {
            let figures = one(args, kind)?;
            println!("{figures}");
            Ok(())
        }
        None => all(args),
    }
}

/// One measurement on the device that this process finds.
fn one(args: &OffloadArgs, kind: Kind) -> anyhow::Result<Value> {
    let corpus = Corpus::load();
    let pages = corpus.mixed_unique();
    let count = args.pages as usize;
    let libraries = Libraries::load(&args.libraries.location())?;
    let qat = Qat::start(&libraries, &StartOptions::default())?;
    let in_flight = usize::from(args.in_flight);
    let options = EngineOptions {
        max_plain: PAGE,
        depth: in_flight,
        direction: Direction::Compress,
        share: false,
        deadline: DEADLINE,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Some(&qat), options);
    ensure!(engine.on_device(), "no instance of the device is free");
    let plan = Plan { pages: count, in_flight, busy: false, at_most: AT_MOST };
    Ok(match kind {
        Kind::Compare => serde_json::to_value(compare(&mut engine, &pages, &plan)?)?,
        _ => serde_json::to_value(measure(&mut engine, &pages, &plan).by_device_alone()?)?,
    })
}

/// All measurements in turn, each in a process of its own.
fn all(args: &OffloadArgs) -> anyhow::Result<()> {
    let mut runs = [Kind::Driver, Kind::Compare].map(|kind| (kind, Vec::new()));
    for _ in 0..args.runs {
        for (kind, figures) in &mut runs {
            figures.push(child(args, *kind)?);
        }
    }
    let device = if args.device { "this host's device" } else { "SIMULATED device" };
    println!("{device}; pages of {PAGE} bytes; medians of {} interleaved runs", args.runs);
    let mut report = json!({ "device": device, "simulated": !args.device, "runs": args.runs });
    for (kind, figures) in &runs {
        show(args, *kind, figures);
        let name = kind.to_possible_value().map(|value| value.get_name().to_owned());
        report[name.unwrap_or_default()] = json!(figures);
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("cannot write the figures to {}", path.display()))?;
    }
    Ok(())
}

fn child(args: &OffloadArgs, kind: Kind) -> anyhow::Result<Value> {
    let name = kind.to_possible_value().context("a kind without a name")?;
    let latency = if kind == Kind::Compare { args.latency } else { 0 };
    let script = format!("engine stored; latency {latency}");
    let mut command = again((!args.device).then_some(&script))?;
    command.args(["offload", "--only", name.get_name()]);
    command.args(["--pages", &args.pages.to_string()]);
    command.args(["--in-flight", &args.in_flight.to_string()]);
    if let Some(folder) = args.libraries.qat_libraries.as_ref().filter(|_| args.device) {
        command.arg("--qat-libraries").arg(folder);
    }
    let output = command.stderr(Stdio::piped()).output().context("cannot run the measurement")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("{}", words.lines().last().unwrap_or("the measurement printed no error"));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).context("the measurement's figures cannot be read")
}

fn show(args: &OffloadArgs, kind: Kind, figures: &[Value]) {
    if figures.is_empty() {
        return;
    }
    let of = |path: &str| median(figures.iter().filter_map(|one| one.pointer(path)?.as_f64()));
    let depth = args.in_flight;
    match kind {
        Kind::Driver => {
            println!("\nWhat a page costs the host, on a device that takes no time");
            println!("{:<44}{:>12}{:>14}", "", "CPU us/page", "pages/s");
            row(
                &format!("driver, {depth} in flight"),
                &[of("/cpu_us_per_page"), of("/pages_per_second")],
            );
        }
        Kind::Compare => {
            println!("\nDirect and asynchronous offload, device latency {} us", args.latency);
            println!(
                "{:<44}{:>12}{:>14}{:>10}{:>10}",
                "", "CPU us/page", "pages/s", "p50 us", "p99 us"
            );
            for (name, at) in [
                ("direct: submit, sleep until it is done", "/direct"),
                ("direct: submit, poll until it is done", "/direct_busy"),
                (&*format!("asynchronous, {depth} in flight"), "/asynchronous"),
            ] {
                let columns = ["cpu_us_per_page", "pages_per_second", "p50_us", "p99_us"]
                    .map(|column| of(&format!("{at}/{column}")));
                row(name, &columns);
            }
            println!(
                "asynchronous over direct: {:.1} times (sleeping), {:.1} times (polling)",
                of("/gain"),
                of("/gain_busy")
            );
        }
    }
}

fn row(name: &str, columns: &[f64]) {
    print!("{name:<44}");
    for (at, column) in columns.iter().enumerate() {
        match at {
            0 => print!("{column:>12.2}"),
            1 => print!("{column:>14.0}"),
            _ => print!("{column:>10.0}"),
        }
    }
    println!();
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
