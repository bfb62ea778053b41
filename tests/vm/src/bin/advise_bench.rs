//! Predicted against measured: `platen advise` on a VM, and then the migration itself.
//!
//! Each point is a link, a guest, a method and a dirty rate. The prediction is made first, with the
//! guest already writing, and written down; then the VM moves. A point of which the prediction says
//! that it does not converge is moved, too, until `--limit`. `--json` writes every point.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use clap::Parser;
use serde_json::{json, Value};
use vm_tests::platen::{self, Platen};
use vm_tests::table::{megabytes, render, to_f64};
use vm_tests::{cleanup, Compression, DidNotEnd, Lab, Method, Outcome, Patience, Rate, Vm, VmSpec};

/// Predicts migrations by `platen advise`, does them, and compares.
#[derive(Debug, Parser)]
struct Options {
    /// The number of points, from the first on; the first 16 have every link, guest and method.
    #[arg(long, default_value_t = 16)]
    points: usize,
    /// The points to leave out before the first.
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// Print the points and end.
    #[arg(long)]
    list: bool,
    /// Data in the guest, MiB (at most 300).
    #[arg(long, default_value_t = 240, value_parser = clap::value_parser!(u64).range(1..=300))]
    data: u64,
    /// Seconds to wait for a migration. One that has not ended by then does not converge, unless
    /// its predicted time is near the limit or beyond.
    #[arg(long, default_value_t = 120)]
    limit: u64,
    /// How far off a total time may be, per cent, to count as right.
    #[arg(long, default_value_t = 15.0)]
    within: f64,
    /// Write every point to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// A load: updates a second, per cent of whole pages, MiB.
type Load = (u64, u64, u64);

const IDLE: Load = (1, 0, 1);
const LIGHT: Load = (500, 30, 32);
const BUSY: Load = (3000, 50, 64);
const HEAVY: Load = (12_000, 100, 96);

/// Mbit/s, load, incompressible pages, method.
const POINTS: [(u32, Load, bool, &str); 24] = [
    (100, IDLE, false, "platen"),
    (1000, IDLE, false, "platen"),
    (200, LIGHT, false, "platen"),
    (500, IDLE, false, "QEMU, no compression"),
    (200, BUSY, false, "platen"),
    (500, IDLE, false, "QEMU, multifd zstd"),
    (200, IDLE, false, "platen, lz4"),
    (100, HEAVY, false, "QEMU, no compression"),
    (500, LIGHT, false, "platen, zstd"),
    (2500, IDLE, false, "platen"),
    (200, LIGHT, false, "QEMU, multifd zlib"),
    (2500, IDLE, false, "QEMU, no compression"),
    (1000, BUSY, false, "QEMU, multifd zstd"),
    (500, IDLE, true, "platen"),
    (500, LIGHT, true, "QEMU, no compression"),
    (100, HEAVY, true, "platen"),
    (1000, LIGHT, false, "platen"),
    (200, IDLE, false, "QEMU, multifd zstd"),
    (1000, BUSY, false, "platen"),
    (500, BUSY, false, "platen, lz4"),
    (1000, LIGHT, false, "QEMU, no compression"),
    (100, LIGHT, false, "platen"),
    (1000, IDLE, true, "platen, lz4"),
    (200, IDLE, true, "QEMU, multifd zstd"),
];

fn method(name: &str) -> Result<Method> {
    let platen = |codec: &str| Method::platen(&["--codec", codec, "--channels", "0"]);
    Ok(match name {
        "QEMU, no compression" => Method::Qemu,
        "QEMU, multifd zstd" => Method::QemuMultifd(2, Compression::Zstd),
        "QEMU, multifd zlib" => Method::QemuMultifd(2, Compression::Zlib),
        "platen" => Method::platen(&[]),
        "platen, zstd" => platen("zstd"),
        "platen, lz4" => platen("lz4"),
        _ => bail!("no method '{name}'"),
    })
}

fn main() -> ExitCode {
    vm_tests::end("advise_bench", bench(&Options::parse()))
}

/// A point, predicted and measured.
struct Point {
    link: u32,
    load: Load,
    random: bool,
    method: &'static str,
    predicted: Value,
    /// `None`: it did not end.
    measured: Option<Outcome>,
    /// The report of the advice.
    report: Value,
}

fn bench(options: &Options) -> Result<()> {
    let wanted = POINTS.iter().skip(options.skip).take(options.points);
    if options.list {
        for (link, (rate, whole, mib), random, method) in wanted {
            let pages = if *random { "random" } else { "guest" };
            println!("{link:>5} Mbit/s  {pages:<6}  {rate} updates/s, {whole} % whole, {mib} MiB  {method}");
        }
        return Ok(());
    }
    cleanup::install()?;
    println!("binary under test: {}", platen::binary()?.display());
    let lab = Lab::new()?;
    println!("{} MiB of data, {}", options.data, lab.net.describe());
    let mut points = Vec::new();
    // The VM with pages of a corpus, and the one with random pages.
    let mut vms = [None, None];
    for (link, load, random, name) in wanted.copied() {
        let kind = usize::from(random);
        let vm = match vms[kind].take() {
            Some(vm) => vm,
            None => boot(&lab, random, options.data)?,
        };
        let (point, vm) = one(&lab, vm, (link, load, random, name), options.limit)?;
        println!("{}", point.line());
        vms[kind] = vm;
        points.push(point);
        // A later point may fail.
        write(options, &lab, &points)?;
    }
    report(&points, options);
    Ok(())
}

fn boot(lab: &Lab, random: bool, data: u64) -> Result<Vm> {
    let spec = VmSpec { memory_kib: (640 << 10) + 8, corpus_mib: 64, random, ..VmSpec::small() };
    lab.boot(&spec, data)
}

fn one(
    lab: &Lab,
    mut vm: Vm,
    (link, load, random, name): (u32, Load, bool, &'static str),
    limit: u64,
) -> Result<(Point, Option<Vm>)> {
    let method = method(name)?;
    Method::platen(&[]).prepare(&mut vm)?;
    lab.net.shape(Rate::Mbit(link))?;
    vm.guest.dirty(load.0, load.1, load.2)?;
    let report = advise(lab, &vm, link).context("advice")?;
    let all = report["advice"][0]["alternatives"].as_array().context("no alternatives")?;
    let predicted = all.iter().find(|one| one["method"] == name);
    let predicted = predicted.with_context(|| format!("no '{name}' in {report}"))?.clone();
    let patience = Patience::ByItself(Duration::from_secs(limit));
    let (measured, vm) = match method.run(lab, vm, patience) {
        Ok((mut vm, outcome)) => {
            vm.guest.stop()?;
            vm.guest.verify()?;
            (Some(outcome), Some(vm))
        }
        Err(error) if error.is::<DidNotEnd>() => (None, None),
        Err(error) => return Err(error),
    };
    Ok((Point { link, load, random, method: name, predicted, measured, report }, vm))
}

fn advise(lab: &Lab, vm: &Vm, link: u32) -> Result<Value> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let link = format!("link={link}m");
    let words =
        ["advise", "--qmp", &qmp, "--same-host", "--sample", "--sample-memory", "--what-if", &link];
    let mut advise = Platen::start(lab, "advise", vm.side(), &words)?;
    advise.succeed(Duration::from_secs(300))?;
    advise.report()
}

impl Point {
    fn number(&self, key: &str) -> Option<f64> {
        self.predicted[key].as_f64()
    }

    fn verdict(&self) -> &str {
        self.predicted["verdict"].as_str().unwrap_or("?")
    }

    /// Whether the verdict is wrong: "uncertain" never is, and "converges" is not where the
    /// predicted time is within `within` per cent of `limit` seconds or beyond.
    fn is_wrong(&self, limit: u64, within: f64) -> bool {
        let can_tell = |ms: f64| ms < to_f64(limit) * 1e3 * (1.0 - within / 100.0);
        match (self.verdict(), &self.measured) {
            ("never", Some(_)) => true,
            ("converges", None) => self.number("total-time").is_none_or(can_tell),
            _ => false,
        }
    }

    /// Predicted over measured total time.
    fn factor(&self) -> Option<f64> {
        let measured = to_f64(self.measured.as_ref()?.total_ms);
        Some(self.number("total-time")? / measured)
    }

    fn cells(&self) -> Vec<String> {
        let ms = |ms: Option<f64>| ms.map_or("-".into(), |ms| format!("{:.2} s", ms / 1e3));
        let short = |ms: Option<f64>| ms.map_or("-".into(), |ms| format!("{ms:.0} ms"));
        let bytes =
            |bytes: Option<f64>| bytes.map_or("-".into(), |bytes| format!("{:.1} MB", bytes / 1e6));
        let seconds = |cpu: Option<f64>| cpu.map_or("-".into(), |cpu| format!("{cpu:.2} s"));
        let (rate, whole, mib) = self.load;
        let seen = self.measured.as_ref();
        let cpu = self.number("cpu-source").zip(self.number("cpu-destination"));
        vec![
            self.method.into(),
            format!("{} Mbit/s", self.link),
            if self.random { "random" } else { "guest" }.into(),
            format!("{rate}/s {whole} % {mib} MiB"),
            self.verdict().into(),
            ms(self.number("total-time")),
            ms(seen.map(|one| to_f64(one.total_ms))),
            self.factor().map_or("-".into(), |factor| format!("{factor:.2}")),
            short(self.number("downtime")),
            short(seen.map(|one| to_f64(one.downtime_ms))),
            bytes(self.number("transferred")),
            seen.map_or("-".into(), |one| megabytes(one.wire)),
            seconds(cpu.map(|(a, b)| a + b)),
            seconds(seen.map(|one| one.cost.total())),
        ]
    }

    fn line(&self) -> String {
        self.cells().join(" | ")
    }

    fn json(&self) -> Value {
        let (rate, whole, mib) = self.load;
        let measured = self.measured.as_ref().map(|one| {
            json!({
                "total-time": one.total_ms,
                "downtime": one.downtime_ms,
                "transferred": one.wire,
                "cpu-source": one.cost.source_qemu + one.cost.source_relay,
                "cpu-destination": one.cost.destination_qemu + one.cost.destination_relay,
            })
        });
        json!({
            "method": self.method,
            "link": self.link,
            "pages": if self.random { "random" } else { "guest" },
            "load": {"rate": rate, "whole": whole, "mib": mib},
            "predicted": self.predicted,
            "measured": measured,
            "advice": self.report["advice"][0],
            "codecs": self.report["codecs"],
        })
    }
}

fn write(options: &Options, lab: &Lab, points: &[Point]) -> Result<()> {
    let Some(path) = &options.json else { return Ok(()) };
    let all: Vec<Value> = points.iter().map(Point::json).collect();
    let text = json!({"data": options.data, "limit": options.limit, "net": lab.net.describe(), "points": all});
    std::fs::write(path, format!("{text:#}\n"))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn report(points: &[Point], options: &Options) {
    let Options { within, limit, .. } = *options;
    let head = [
        "method",
        "link",
        "pages",
        "load",
        "verdict",
        "total: predicted",
        "measured",
        "factor",
        "downtime: predicted",
        "measured",
        "network: predicted",
        "measured",
        "CPU: predicted",
        "measured",
    ];
    let rows: Vec<Vec<String>> = points.iter().map(Point::cells).collect();
    println!("\n{}", render(&head, &rows));
    let off: Vec<f64> = points
        .iter()
        .filter_map(Point::factor)
        .map(|factor| (factor - 1.0).abs() * 100.0)
        .collect();
    let right = off.iter().filter(|off| **off <= within).count();
    let wrong = points.iter().filter(|point| point.is_wrong(limit, within)).count();
    let most = off.iter().copied().fold(0.0, f64::max);
    println!("total time within {within} %: {right} of {}; farthest off: {most:.0} %", off.len());
    println!("verdicts that are wrong: {wrong} of {}", points.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_point_has_a_method() -> Result<()> {
        for (.., name) in POINTS {
            method(name)?;
        }
        assert!(method("other").is_err());
        Ok(())
    }
}
