//! The paper's figures 8 to 10: four patterns, 1 to 16 jobs.

use serde_json::Value;

use crate::data::{each, number, numbers, text, Data};
use crate::figure::{lines, Axes, Kind, Line};
use crate::section::{Section, Table};
use crate::spread::Spread;

const PATTERNS: [&str; 4] =
    ["read in order", "write in order", "read at random", "write at random"];

/// One pattern by one front with one number of jobs.
struct Job {
    pattern: String,
    front: String,
    kind: Kind,
    jobs: f64,
    runs: Vec<Value>,
}

impl Job {
    fn of(&self, field: &str) -> Option<Spread> {
        Spread::of(numbers(&self.runs, &format!("/{field}")))
    }
}

pub(super) fn add(section: &mut Section, data: &Data) {
    section.heading("Figures 8 to 10: four patterns, 1 to 16 jobs");
    section.text(
        "The paper states: reads in order 1588 MiB/s by zram at 60.1 % CPU, 105 by direct offload \
         at 16.8 %, 611 by QZRAM at 21.6 %; writes in order about the same by both, at 36.7 % \
         less CPU; with 1 job 670 MiB/s by both, with 16 jobs up to 49.2 % less CPU; a read 54 µs \
         later than zram's.",
    );
    let mut jobs = Vec::new();
    let mut why_not = Vec::new();
    for (step, on_device) in [("jobs", false), ("requests", true)] {
        match data.samples(step) {
            Ok(samples) => jobs.extend(read(samples, on_device)),
            Err(why) => why_not.push(why),
        }
    }
    if jobs.is_empty() {
        section.missing(format!("No patterns and jobs: {}.", why_not.join("; ")));
        return;
    }
    if !jobs.iter().any(|job| job.kind == Kind::Simulated) {
        section.missing("The jobs were not measured on the simulated device.");
    }
    section.table(patterns(&jobs));
    let axes = |y| Axes { x: "jobs", y, doubling: true };
    let mut figures = Vec::new();
    for pattern in ["write in order", "read at random"] {
        let line = |field| by_jobs(&jobs, pattern, field);
        figures.push(lines(&format!("Throughput: {pattern}"), axes("MB/s"), &line("mb_s")));
        figures.push(lines(&format!("CPU of a page: {pattern}"), axes("µs"), &line("cpu")));
        figures.push(lines(&format!("Mean latency: {pattern}"), axes("µs"), &line("mean")));
    }
    section.figures(figures);
    section.text(
        "With more jobs than CPUs a job also waits for a CPU, within a request or between two of \
         them. The simulated device shares these CPUs, too.",
    );
}

/// The jobs of a file: those of its part jobs, or those within the scenes of the simulated device.
fn read(samples: &Value, on_device: bool) -> Vec<Job> {
    let results = each(samples, "/results").iter();
    let parts: Vec<&Value> = match on_device {
        false => results.collect(),
        true => results
            .flat_map(|part| each(part, "/scenes"))
            .flat_map(|scene| each(scene, "/jobs"))
            .collect(),
    };
    let parts = parts.into_iter().filter(|part| text(part, "/part") == "jobs");
    parts.flat_map(|part| each(part, "/rows")).filter_map(job).collect()
}

fn job(row: &Value) -> Option<Job> {
    let front = text(row, "/front");
    let kind = match (front.starts_with("zram"), front.contains("SIMULATED")) {
        (true, _) => Kind::Other,
        (_, true) => Kind::Simulated,
        _ => Kind::Platen,
    };
    let front = match kind {
        Kind::Platen => format!("platen {front}"),
        _ => front,
    };
    let jobs = number(row, "/jobs").filter(|jobs| *jobs >= 1.0)?;
    let runs = each(row, "/runs").to_vec();
    Some(Job { pattern: text(row, "/pattern"), front, kind, jobs, runs })
}

/// Figure 8: one job.
fn patterns(jobs: &[Job]) -> Table {
    let head =
        ["pattern, one job", "device", "MB/s", "CPU µs a page", "CPUs busy", "p50 µs", "p99 µs"];
    let mut table = Table::new("Here: figure 8", &head);
    for pattern in PATTERNS {
        for job in jobs.iter().filter(|job| job.pattern == pattern && job.jobs == 1.0) {
            let mut cells = vec![pattern.to_owned(), job.front.clone()];
            let fields = [("mb_s", 0), ("cpu", 2), ("cores", 2), ("p50", 1), ("p99", 1)];
            cells.extend(fields.map(|(field, digits)| super::moves::cell(job.of(field), digits)));
            table.row(Some(job.kind), cells);
        }
    }
    table
}

fn by_jobs(jobs: &[Job], pattern: &str, field: &str) -> Vec<Line> {
    let mut all: Vec<Line> = Vec::new();
    for job in jobs.iter().filter(|job| job.pattern == pattern) {
        let Some(spread) = job.of(field) else { continue };
        match all.iter_mut().find(|line| line.label == job.front) {
            Some(line) => line.points.push((job.jobs, spread)),
            None => all.push(Line {
                label: job.front.clone(),
                simulated: job.kind == Kind::Simulated,
                points: vec![(job.jobs, spread)],
            }),
        }
    }
    all
}
