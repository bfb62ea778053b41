//! Large requests: 512 KiB, one submitter, one request in flight.

use super::measure::{median, percentiles, process_cpu, timed, Aligned};
use super::{DeviceBenchArgs, Kind, PAGE};
use anyhow::Context;
use serde_json::json;
use std::time::Instant;

const PAGES: usize = 128;

/// For writes, then for reads: MB/s, CPU microseconds a page, microseconds of a request (p50, p99).
type Run = [f64; 8];

pub(super) fn measure(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<serde_json::Value> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut runs: Vec<Vec<Run>> = vec![Vec::new(); fronts.len()];
    for _ in 0..args.runs {
        for (front, runs) in fronts.iter().zip(&mut runs) {
            // The submitter compresses too.
            runs.push(
                one_run(front, pages, cores - 1).with_context(|| format!("{front} with {name}"))?,
            );
        }
    }
    println!(
        "\n{name}: requests of 512 KiB, one submitter, {cores} cores, {} runs in turns",
        args.runs
    );
    println!(
        "{:<14}{:>12}{:>8}{:>8}{:>8}{:>12}{:>8}{:>8}{:>8}",
        "", "write MB/s", "us CPU", "p50", "p99", "read MB/s", "us CPU", "p50", "p99"
    );
    let mut rows = Vec::new();
    for (front, runs) in fronts.iter().zip(&runs) {
        let of = |field: usize| median(runs.iter().map(|run| run[field]).collect());
        println!(
            "{:<14}{:>12.0}{:>8.2}{:>8.0}{:>8.0}{:>12.0}{:>8.2}{:>8.0}{:>8.0}",
            front.to_string(),
            of(0),
            of(1),
            of(2),
            of(3),
            of(4),
            of(5),
            of(6),
            of(7)
        );
        rows.push(json!({
            "front": front.to_string(), "write_mb_s": of(0), "write_cpu": of(1),
            "write_p50": of(2), "write_p99": of(3), "read_mb_s": of(4), "read_cpu": of(5),
            "read_p50": of(6), "read_p99": of(7), "runs": runs,
        }));
    }
    Ok(json!({ "part": "large", "set": name, "cores": cores, "fronts": rows }))
}

fn one_run(front: &Kind, pages: &[u8], workers: usize) -> anyhow::Result<Run> {
    let mut kept = front.open((pages.len() / PAGE) as u64, workers)?;
    let requests = || pages.chunks_exact(PAGES * PAGE).zip((0..).step_by(PAGES));
    let number = (requests().count() * PAGES).max(1) as f64;
    let mut times = Vec::with_capacity(requests().count());
    let figures = |start: Instant, cpu: f64, times: &mut Vec<f32>| {
        let rate = number * PAGE as f64 / 1e6 / start.elapsed().as_secs_f64();
        let cpu = (process_cpu() - cpu) / number;
        let (p50, p99) = percentiles(times);
        times.clear();
        [rate, cpu, p50, p99]
    };
    // Once to allocate the memory.
    for (bytes, page) in requests() {
        kept.write(page, bytes)?;
    }
    let (start, cpu) = (Instant::now(), process_cpu());
    for (bytes, page) in requests() {
        timed(&mut times, || kept.write(page, bytes))?;
    }
    let write = figures(start, cpu, &mut times);
    let mut out = Aligned::new(PAGES * PAGE);
    let out = out.all();
    let (start, cpu) = (Instant::now(), process_cpu());
    for (_, page) in requests() {
        timed(&mut times, || kept.read(page, out))?;
    }
    let read = figures(start, cpu, &mut times);
    for (bytes, page) in requests() {
        kept.read(page, out)?;
        anyhow::ensure!(out == bytes, "request at page {page} has another content");
    }
    let mut all = Run::default();
    all[..4].copy_from_slice(&write);
    all[4..].copy_from_slice(&read);
    Ok(all)
}
