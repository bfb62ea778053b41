//! `platen-bench offload`: what it costs to hand pages to a QAT device, and what asynchronous
//! offload brings.
//!
//! Each measurement is a separate process, since a process has one device; they take turns, and
//! medians are shown. Without `--device` the device is simulated with `engine stored`, which
//! returns stored blocks: the figures show the software's cost and the effect of a latency, never a
//! device's throughput or ratio. They exclude the CPU time of the simulated device's threads.

use crate::program::{again, QatLibraries};
use anyhow::{bail, ensure, Context};
use clap::{Args, ValueEnum};
use corpus::Corpus;
use qat::measure::{compare, measure, Plan, PAGE};
use qat::{Direction, Engine, EngineOptions, Libraries, Qat, StartOptions};
use qatzip::{QatZip, Session};
use serde_json::{json, Value};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The longest duration of one measurement.
const AT_MOST: Duration = Duration::from_secs(4);

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
    /// QATzip, one page per call, the same device.
    Qatzip,
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
    if kind == Kind::Qatzip {
        let library = QatZip::load(&args.libraries.qatzip())?;
        return qatzip(&library, &pages, count.min(20_000));
    }
    let libraries = Libraries::load(&args.libraries.location())?;
    let qat = Qat::start(&libraries, &StartOptions::default())?;
    let in_flight = usize::from(args.in_flight);
    let options = EngineOptions {
        max_plain: PAGE,
        depth: in_flight,
        direction: Direction::Compress,
        share: false,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Some(&qat), options);
    ensure!(engine.on_device(), "no instance of the device is free");
    let plan = Plan { pages: count, in_flight, busy: false, at_most: AT_MOST };
    Ok(match kind {
        Kind::Compare => serde_json::to_value(compare(&mut engine, &pages, &plan))?,
        _ => serde_json::to_value(measure(&mut engine, &pages, &plan))?,
    })
}

/// QATzip with one page per call, as its interface requires: CPU time of its own thread, alone and
/// with the calling thread's.
fn qatzip(library: &std::sync::Arc<QatZip>, pages: &[u8], count: usize) -> anyhow::Result<Value> {
    let mut session = Session::new(library, 1)?;
    let mut out = vec![0; 2 * PAGE];
    let (pages, _) = pages.as_chunks::<PAGE>();
    session.compress(&pages[0], &mut out)?;
    let (own, asking) = (thread_cpu("qatzip")?, thread_cpu("platen-bench")?);
    let start = Instant::now();
    let mut done = 0;
    while done < count && start.elapsed() < AT_MOST {
        session.compress(&pages[done % pages.len()], &mut out)?;
        done += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    let per_page = |ns: u64| ns as f64 / 1e3 / done.max(1) as f64;
    let own = thread_cpu("qatzip")? - own;
    let asking = thread_cpu("platen-bench")? - asking;
    Ok(json!({
        "pages": done,
        "pages_per_second": done as f64 / seconds.max(1e-9),
        "cpu_us_per_page": per_page(own),
        "cpu_us_per_page_with_caller": per_page(own + asking),
    }))
}

/// CPU time of this process's threads of that name, nanoseconds (`/proc/PID/task/TID/schedstat`,
/// first number).
fn thread_cpu(name: &str) -> anyhow::Result<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        if std::fs::read_to_string(path.join("comm"))?.trim() != name {
            continue;
        }
        let text = std::fs::read_to_string(path.join("schedstat"))?;
        let first = text.split_whitespace().next().context("an empty schedstat")?;
        sum += first.parse::<u64>().context("schedstat without a number")?;
    }
    Ok(sum)
}

/// All measurements in turn, each in a separate process.
fn all(args: &OffloadArgs) -> anyhow::Result<()> {
    let mut runs = [Kind::Driver, Kind::Qatzip, Kind::Compare].map(|kind| (kind, Vec::new()));
    let mut skipped = None;
    for _ in 0..args.runs {
        for (kind, figures) in &mut runs {
            if *kind == Kind::Qatzip && skipped.is_some() {
                continue;
            }
            match child(args, *kind) {
                Ok(figure) => figures.push(figure),
                // QATzip is not part of platen, and not always installed.
                Err(error) if *kind == Kind::Qatzip => skipped = Some(format!("{error:#}")),
                Err(error) => return Err(error),
            }
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
    if let Some(why) = skipped {
        println!("QATzip: skipped: {why}");
        report["qatzip-skipped"] = json!(why);
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
    if let Some(library) = &args.libraries.qatzip_library {
        command.arg("--qatzip-library").arg(library);
    }
    let output = command.stderr(Stdio::piped()).output().context("cannot run the measurement")?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        bail!("{}", words.lines().last().unwrap_or("no word from the measurement"));
    }
    // QATzip may print lines of its own first.
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
        Kind::Qatzip => {
            row("QATzip, synchronous", &[of("/cpu_us_per_page"), of("/pages_per_second")]);
            row("  with the thread that asks for it", &[of("/cpu_us_per_page_with_caller")]);
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
