//! Large requests: 512 KiB, one submitter, one on the way at a time.

use super::{median, process_cpu, Aligned, DeviceBenchArgs, Kind, PAGE};
use anyhow::Context;
use serde_json::json;
use std::time::Instant;

const PAGES: usize = 128;

/// MB/s and CPU microseconds a page of writes and reads.
pub(super) fn measure(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<serde_json::Value> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut runs: Vec<Vec<[f64; 4]>> = vec![Vec::new(); fronts.len()];
    for _ in 0..args.runs {
        for (front, runs) in fronts.iter().zip(&mut runs) {
            // The submitter works as well.
            runs.push(
                one_run(front, pages, cores - 1).with_context(|| format!("{front} with {name}"))?,
            );
        }
    }
    println!(
        "\n{name}: requests of 512 KiB, one submitter, {cores} cores, {} runs in turns",
        args.runs
    );
    println!("{:<14}{:>12}{:>10}{:>12}{:>10}", "", "write MB/s", "us CPU", "read MB/s", "us CPU");
    let mut rows = Vec::new();
    for (front, runs) in fronts.iter().zip(&runs) {
        let of = |field: usize| median(runs.iter().map(|run| run[field]).collect());
        println!(
            "{:<14}{:>12.0}{:>10.2}{:>12.0}{:>10.2}",
            front.to_string(),
            of(0),
            of(1),
            of(2),
            of(3)
        );
        rows.push(json!({
            "front": front.to_string(), "write_mb_s": of(0), "write_cpu": of(1),
            "read_mb_s": of(2), "read_cpu": of(3), "runs": runs,
        }));
    }
    Ok(json!({ "part": "large", "set": name, "cores": cores, "fronts": rows }))
}

fn one_run(front: &Kind, pages: &[u8], workers: usize) -> anyhow::Result<[f64; 4]> {
    let mut kept = front.open((pages.len() / PAGE) as u64, workers)?;
    let requests = || pages.chunks_exact(PAGES * PAGE).zip((0..).step_by(PAGES));
    let number = (requests().count() * PAGES).max(1) as f64;
    let rates = |seconds: f64, cpu: f64| [number * PAGE as f64 / 1e6 / seconds, cpu / number];
    // Once for the memory.
    for (bytes, page) in requests() {
        kept.write(page, bytes)?;
    }
    let (start, cpu) = (Instant::now(), process_cpu());
    for (bytes, page) in requests() {
        kept.write(page, bytes)?;
    }
    let [write, write_cpu] = rates(start.elapsed().as_secs_f64(), process_cpu() - cpu);
    let mut out = Aligned::new(PAGES * PAGE);
    let out = out.all();
    let (start, cpu) = (Instant::now(), process_cpu());
    for (_, page) in requests() {
        kept.read(page, out)?;
    }
    let [read, read_cpu] = rates(start.elapsed().as_secs_f64(), process_cpu() - cpu);
    for (bytes, page) in requests() {
        kept.read(page, out)?;
        anyhow::ensure!(out == bytes, "request at page {page} has another content");
    }
    Ok([write, write_cpu, read, read_cpu])
}
