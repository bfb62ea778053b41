//! Several threads at once: each writes or reads its share of the pages, 4 KiB at a time, in order
//! or at random; the part that reproduces the QZRAM paper's figures 8 to 10.
//!
//! platen's device is in this process, and zram is behind the kernel's block layer; the CPU time of
//! zram includes the system calls. Each thread has one request in flight.

use super::front::{Lane, Own, OwnLane};
use super::measure::{median, percentiles, process_cpu, timed, Aligned, Random};
use super::zram::Zram;
use super::{DeviceBenchArgs, Kind, PAGE};
use crate::watch::threads_cpu;
use anyhow::{ensure, Context};
use device::Device;
use serde::Serialize;
use serde_json::{json, Value};
use std::sync::Barrier;
use std::time::Instant;
use store::Keeper;

/// The order of the pages, and what is done with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pattern {
    name: &'static str,
    write: bool,
    random: bool,
}

/// Writes come first, so that the reads find what they wrote.
const PATTERNS: [Pattern; 4] = [
    Pattern { name: "write in order", write: true, random: false },
    Pattern { name: "write at random", write: true, random: true },
    Pattern { name: "read in order", write: false, random: false },
    Pattern { name: "read at random", write: false, random: true },
];

/// One pattern with one number of threads.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Figures {
    /// Plain megabytes a second.
    mb_s: f64,
    /// Microseconds of CPU for a page.
    cpu: f64,
    /// CPUs busy, 1 for a whole one.
    cores: f64,
    /// Of them, the thread that makes memory ready for writes.
    keeper: f64,
    /// Microseconds of a request.
    p50: f64,
    p99: f64,
    mean: f64,
}

/// For each number of threads the figures of each pattern.
pub(super) type Run = Vec<[Figures; PATTERNS.len()]>;

/// The store under test, open.
pub(super) enum Target<'a> {
    Zram(&'a Zram),
    Own(&'a Device),
}

impl Target<'_> {
    fn lane(&self) -> anyhow::Result<Box<dyn Lane + '_>> {
        Ok(match self {
            Self::Zram(zram) => Box::new(*zram),
            Self::Own(own) => Box::new(OwnLane::new(own)?),
        })
    }
}

pub(super) fn measure(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<Value> {
    let mut all: Vec<(String, Vec<Run>)> =
        fronts.iter().map(|front| (front.to_string(), Vec::new())).collect();
    let count = (pages.len() / PAGE) as u64;
    for run in 0..args.runs {
        let seed = u64::from(run) + 1;
        for (front, (_, runs)) in fronts.iter().zip(&mut all) {
            let figures = match front {
                Kind::Zram(algorithm) => {
                    let zram = Zram::new(algorithm, pages.len() as u64)?;
                    one_run(args, &Target::Zram(&zram), pages, seed, false)
                }
                Kind::Own(settings) => {
                    let own = Own::new(*settings, count, 0)?;
                    one_run(args, &Target::Own(own.device()), pages, seed, false)
                }
            };
            runs.push(figures.with_context(|| format!("{front} with {name}"))?);
        }
    }
    Ok(rows(args, name, pages, &all))
}

/// Prints the medians of `all`, fronts with their runs, and returns them with every run.
pub(super) fn rows(
    args: &DeviceBenchArgs,
    name: &str,
    pages: &[u8],
    all: &[(String, Vec<Run>)],
) -> Value {
    println!(
        "\n{name}: {} pages by several threads, 4 KiB each, {} runs in turns",
        pages.len() / PAGE,
        args.runs
    );
    println!(
        "{:<18}{:<24}{:>5}{:>9}{:>13}{:>8}{:>9}{:>9}",
        "", "", "jobs", "MB/s", "us CPU/page", "cores", "p50 us", "p99 us"
    );
    let mut rows = Vec::new();
    for (nth, pattern) in PATTERNS.iter().enumerate() {
        for (front, runs) in all {
            for (at, jobs) in args.jobs.iter().enumerate() {
                let each: Vec<Figures> = runs.iter().map(|run| run[at][nth]).collect();
                let of = |field: fn(&Figures) -> f64| median(each.iter().map(field).collect());
                println!(
                    "{:<18}{front:<24}{jobs:>5}{:>9.0}{:>13.2}{:>8.2}{:>9.1}{:>9.1}",
                    pattern.name,
                    of(|f| f.mb_s),
                    of(|f| f.cpu),
                    of(|f| f.cores),
                    of(|f| f.p50),
                    of(|f| f.p99)
                );
                rows.push(json!({
                    "pattern": pattern.name, "front": front, "jobs": jobs, "runs": each,
                }));
            }
        }
    }
    json!({ "part": "jobs", "set": name, "pages": pages.len() / PAGE, "rows": rows })
}

/// All patterns with each number of threads. The CPU time of a simulated device's threads is left
/// out if there is one (`simulated`).
pub(super) fn one_run(
    args: &DeviceBenchArgs,
    target: &Target<'_>,
    pages: &[u8],
    seed: u64,
    simulated: bool,
) -> anyhow::Result<Run> {
    let count = (pages.len() / PAGE) as u64;
    let in_order: Vec<u64> = (0..count).collect();
    let mut random = Random(seed);
    // Once to allocate the memory.
    once(target, PATTERNS[0], pages, &in_order, (1, 1), simulated)?;
    let mut all = Vec::new();
    for &jobs in &args.jobs {
        let mut figures = [Figures::default(); PATTERNS.len()];
        for (pattern, figures) in PATTERNS.iter().zip(&mut figures) {
            let order = if pattern.random { random.order(count) } else { in_order.clone() };
            let times = if args.steady { jobs } else { 1 };
            let jobs = (jobs.into(), times.into());
            *figures = once(target, *pattern, pages, &order, jobs, simulated)?;
        }
        all.push(figures);
        compare(target, pages)?;
    }
    Ok(all)
}

/// Each thread takes a part of `order`: the number of threads, and how many times they take it.
fn once(
    target: &Target<'_>,
    pattern: Pattern,
    pages: &[u8],
    order: &[u64],
    (jobs, passes): (usize, usize),
    simulated: bool,
) -> anyhow::Result<Figures> {
    let part = order.len().div_ceil(jobs);
    let others = || if simulated { threads_cpu("qat-sim") } else { Ok(0.0) };
    let begin = Barrier::new(order.chunks(part).count() + 1);
    let before = (process_cpu(), others()?, threads_cpu(Keeper::THREAD)?);
    let mut start = Instant::now();
    let times: anyhow::Result<Vec<Vec<f32>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = order
            .chunks(part)
            .map(|numbers| scope.spawn(|| job(target, pattern, pages, (numbers, passes), &begin)))
            .collect();
        start = Instant::now();
        begin.wait();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("its panic ends the process"))
            .collect()
    });
    let seconds = start.elapsed().as_secs_f64();
    let cpu = process_cpu() - before.0 - (others()? - before.1);
    let keeper = threads_cpu(Keeper::THREAD)? - before.2;
    let mut times = times?.concat();
    let mean = times.iter().map(|time| f64::from(*time)).sum::<f64>() / times.len().max(1) as f64;
    let (p50, p99) = percentiles(&mut times);
    let count = (order.len() * passes) as f64;
    Ok(Figures {
        mb_s: count * PAGE as f64 / 1e6 / seconds,
        cpu: cpu / count,
        cores: cpu / 1e6 / seconds,
        keeper: keeper / 1e6 / seconds,
        p50,
        p99,
        mean,
    })
}

/// One thread's part; returns microseconds of each request.
fn job(
    target: &Target<'_>,
    pattern: Pattern,
    pages: &[u8],
    (numbers, passes): (&[u64], usize),
    begin: &Barrier,
) -> anyhow::Result<Vec<f32>> {
    let lane = target.lane();
    let mut out = Aligned::new(PAGE);
    let out = out.all();
    let mut times = Vec::with_capacity(numbers.len() * passes);
    // Also after an error: the others wait for this thread.
    begin.wait();
    let mut lane = lane?;
    for &number in std::iter::repeat_n(numbers, passes).flatten() {
        let at = usize::try_from(number)? * PAGE;
        if pattern.write {
            timed(&mut times, || lane.write(number, &pages[at..at + PAGE]))?;
        } else {
            timed(&mut times, || lane.read(number, out))?;
        }
    }
    Ok(times)
}

/// Reads every page back.
fn compare(target: &Target<'_>, pages: &[u8]) -> anyhow::Result<()> {
    let mut lane = target.lane()?;
    let mut out = Aligned::new(PAGE);
    let out = out.all();
    for (number, page) in (0..).zip(pages.chunks_exact(PAGE)) {
        lane.read(number, out)?;
        ensure!(out == page, "page {number} has another content");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use corpus::Corpus;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: DeviceBenchArgs,
    }

    #[test]
    fn each_pattern_is_measured_with_each_number_of_threads() {
        let args = Line::parse_from(["bench", "--jobs", "1,3"]).args;
        let text = Corpus::made("a test").text();
        let pages = &text.pages()[..100 * PAGE];
        let own = Own::new("zstd:1".parse().map(settings).unwrap(), 100, 0).unwrap();
        let run = one_run(&args, &Target::Own(own.device()), pages, 7, false).unwrap();
        assert_eq!(run.len(), 2);
        for figures in run.iter().flatten() {
            assert!(figures.mb_s > 0.0 && figures.p50 <= figures.p99, "{figures:?}");
        }
        let shown = rows(&args, "text", pages, &[("zstd 1".to_owned(), vec![run])]);
        assert_eq!(shown["rows"].as_array().unwrap().len(), 2 * PATTERNS.len());
    }

    fn settings(kind: Kind) -> codec::Settings {
        match kind {
            Kind::Own(settings) => settings,
            Kind::Zram(name) => panic!("{name} is no codec"),
        }
    }

    #[test]
    fn a_page_with_another_content_is_found() {
        let text = Corpus::made("a test").text();
        let pages = &text.pages()[..8 * PAGE];
        let own = Own::new(codec::Settings::default(), 8, 0).unwrap();
        let target = Target::Own(own.device());
        let order: Vec<u64> = (0..8).collect();
        once(&target, PATTERNS[0], pages, &order, (2, 3), false).unwrap();
        compare(&target, pages).unwrap();
        target.lane().unwrap().write(5, &[7; PAGE]).unwrap();
        assert!(compare(&target, pages).unwrap_err().to_string().contains("page 5"));
    }
}
