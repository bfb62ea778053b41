//! `make bench`: compares the cost of migrations by QEMU's own methods and by platen, in one
//! interleaved run.
//!
//! One VM goes back and forth over a shaped link. Every round migrates it once by every method, in
//! rotating order, so that a change in the machine's load affects all methods alike. The guest
//! recomputes every byte after every migration. The output has medians with their ranges, and
//! ratios of medians; `--json` writes every single run.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use clap::Parser;
use serde_json::{json, Value};
use vm_tests::table::{megabytes, render, seconds, to_f64};
use vm_tests::{
    cleanup, platen, Compression, DidNotEnd, Lab, Method, Outcome, Patience, Qemu, Rate, Vm,
    VmSpec, MACHINE_10, MACHINE_11,
};

/// Moves one VM by several methods, round after round, and prints medians.
#[derive(Debug, Parser)]
struct Options {
    /// Methods, by the names that --list prints, `qemu-multifdN-COMPRESSION` for N channels, or
    /// `platen:FLAG=VALUE,FLAG=VALUE` for any flags of `platen migrate`.
    #[arg(long, value_delimiter = ' ', num_args = 1..)]
    methods: Vec<String>,
    /// Print the methods and end.
    #[arg(long)]
    list: bool,
    /// Moves per method.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The link's speed each way in Mbit/s; 0 is unlimited.
    #[arg(long, default_value_t = 1000)]
    link: u32,
    /// Data in the guest, in MiB (at most 800).
    #[arg(long, default_value_t = 700, value_parser = clap::value_parser!(u64).range(1..=800))]
    data: u64,
    /// Have the guest dirty memory while it moves: updates a second, percent of whole pages, range
    /// in MiB.
    #[arg(long, value_name = "RATE,PERCENT,MIB", value_delimiter = ',')]
    dirty: Vec<u64>,
    /// Seconds after which a move that has not ended is given up, and counted as such. Nothing
    /// helps it to an end.
    #[arg(long, default_value_t = 300)]
    limit: u64,
    /// The QEMU at both ends: the system's, or the 10 or 11 that `scripts/fetch-qemu` has unpacked.
    #[arg(long, value_parser = ["system", "10", "11"], default_value = "system")]
    qemu: String,
    /// Have both QEMUs touch all of their memory before. Otherwise the destination's first touch is
    /// part of what is measured, and where this machine is a VM itself that costs 0.7 or 2.3 CPU
    /// seconds, as its host has it.
    #[arg(long)]
    prealloc: bool,
    /// Write every run to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
}

/// The methods of a plain run, by name.
fn catalogue() -> Vec<(&'static str, Method)> {
    vec![
        ("qemu", Method::Qemu),
        ("qemu-multifd2-zstd", Method::QemuMultifd(2, Compression::Zstd)),
        ("qemu-multifd2-zstd-tls", Method::QemuMultifdTls(2, Compression::Zstd)),
        ("qemu-multifd8-zstd", Method::QemuMultifd(8, Compression::Zstd)),
        ("qemu-multifd2-zlib", Method::QemuMultifd(2, Compression::Zlib)),
        ("qemu-compress", Method::QemuCompress),
        ("qemu-xbzrle", Method::QemuXbzrle),
        ("platen-zstd-single", Method::platen(&["--codec", "zstd", "--channels", "0"])),
        (
            "platen-zstd-single-insecure",
            Method::platen(&["--codec", "zstd", "--channels", "0", "--insecure"]),
        ),
        ("platen-default-insecure", Method::platen(&["--insecure"])),
        ("platen-multifd2-insecure", Method::platen(&["--channels", "2", "--insecure"])),
        ("platen-multifd8-insecure", Method::platen(&["--channels", "8", "--insecure"])),
        ("platen-multifd2", Method::platen(&["--channels", "2"])),
        ("platen-multifd2-no-deltas", Method::platen(&["--channels", "2", "--delta-cache", "0"])),
        ("platen-zstd-multifd2", Method::platen(&["--codec", "zstd", "--channels", "2"])),
        ("platen-lz4-single", Method::platen(&["--codec", "lz4", "--channels", "0"])),
        ("platen-zlib-single", Method::platen(&["--codec", "zlib", "--channels", "0"])),
        ("platen-none-single", Method::platen(&["--codec", "none", "--channels", "0"])),
        ("platen-qatzip-software", Method::platen(&["--codec", "qatzip", "--channels", "0"])),
        ("platen-qpl-software", Method::platen(&["--codec", "qpl", "--channels", "0"])),
        ("platen-qatzip-simulated", Method::PlatenSimulatedQat("")),
        ("platen-qatzip-simulated-silent", Method::PlatenSimulatedQat("at 2000 silence")),
        ("platen-default", Method::platen(&[])),
        ("qemu-multifd2", Method::QemuMultifd(2, Compression::None)),
    ]
}

/// The default methods: the comparison that the project is committed to.
const PLAIN: [&str; 9] = [
    "qemu",
    "qemu-multifd2-zstd",
    "qemu-multifd2-zlib",
    "qemu-compress",
    "platen-default",
    "platen-zstd-single",
    "platen-zstd-single-insecure",
    "platen-zstd-multifd2",
    "platen-lz4-single",
];

/// The baselines, where they were measured.
const BASELINES: [&str; 5] = [
    "qemu-multifd2-zstd",
    "qemu-multifd2-zstd-tls",
    "qemu-multifd8-zstd",
    "qemu-compress",
    "platen-zstd-single-insecure",
];

fn main() -> ExitCode {
    vm_tests::end("migration_bench", bench(&Options::parse()))
}

struct Measured {
    name: String,
    method: Method,
    runs: Vec<Outcome>,
    /// Runs that exceeded `--limit`.
    not_ended: u32,
    failures: Vec<String>,
}

impl Measured {
    /// "did not end in 120 s (2 of 3 runs)"; `None` if all ended.
    fn unended(&self, limit: Duration) -> Option<String> {
        let all = self.runs.len() + self.failures.len() + self.not_ended as usize;
        let several = format!("{} ({} of {all} runs)", DidNotEnd(limit), self.not_ended);
        (self.not_ended > 0).then_some(several)
    }

    /// Prints and records a run; returns the VM if it arrived.
    fn record(&mut self, round: u32, moved: Result<(Vm, Outcome)>) -> Option<Vm> {
        match moved {
            Ok((there, outcome)) => {
                println!(
                    "round {round} {:27} {:>8} {:>7} ms {:>9} {:>6.2} CPU s",
                    self.name,
                    seconds(outcome.total_ms),
                    outcome.downtime_ms,
                    megabytes(outcome.wire),
                    outcome.cost.total()
                );
                self.runs.push(outcome);
                Some(there)
            }
            Err(error) if error.is::<DidNotEnd>() => {
                println!("round {round} {:27} {error}", self.name);
                self.not_ended += 1;
                None
            }
            Err(error) => {
                println!("round {round} {:27} FAILED: {error:#}", self.name);
                self.failures.push(format!("{error:#}"));
                None
            }
        }
    }

    /// Whether its figures represent all of its runs: the median of only those that ended would be
    /// too good.
    fn counts(&self) -> bool {
        !self.runs.is_empty() && self.not_ended == 0
    }
}

fn bench(options: &Options) -> Result<()> {
    if options.list {
        let mut list = String::new();
        for (name, method) in catalogue() {
            writeln!(list, "{name:27} {method:?}")?;
        }
        // A reader that has seen enough, such as head(1), is no error.
        let _ = std::io::stdout().write_all(list.as_bytes());
        return Ok(());
    }
    let mut measured = parse_methods(&options.methods)?;
    let load = match options.dirty[..] {
        [] => None,
        [rate, whole, mib] => Some((rate, whole, mib)),
        _ => bail!("--dirty takes three numbers: RATE,PERCENT,MIB"),
    };
    cleanup::install()?;
    if measured
        .iter()
        .any(|m| matches!(m.method, Method::Platen(_) | Method::PlatenSimulatedQat(_)))
    {
        platen::binary()?;
    }

    let mut spec = VmSpec::large();
    match options.qemu.as_str() {
        "10" => (spec.qemu, spec.machine) = (Qemu::Ten, MACHINE_10),
        "11" => (spec.qemu, spec.machine) = (Qemu::Eleven, MACHINE_11),
        _ => {}
    }
    let number = &options.qemu;
    let fetch = || format!("there is no QEMU {number}: scripts/fetch-qemu {number} fetches it");
    ensure!(spec.qemu.is_there(), fetch());
    spec.prealloc = options.prealloc;
    let lab = Lab::new()?;
    lab.net.shape(match options.link {
        0 => Rate::Unlimited,
        mbit => Rate::Mbit(mbit),
    })?;
    println!(
        "QEMU {}{}, {} MiB of data, {}, link {}, {} rounds, {}",
        options.qemu,
        if options.prealloc { " with its memory touched before" } else { "" },
        options.data,
        load.map_or("idle".into(), |(r, w, m)| format!("{r} updates/s ({w} % whole) in {m} MiB")),
        if options.link == 0 { "unlimited".into() } else { format!("{} Mbit/s", options.link) },
        options.rounds,
        lab.net.describe()
    );
    let limit = Duration::from_secs(options.limit);
    let mut vm = None;
    for round in 0..options.rounds {
        let count = measured.len();
        for turn in 0..count {
            let which = &mut measured[(turn + round as usize) % count];
            let here = match vm.take() {
                Some(vm) => vm,
                None => lab.boot(&spec, options.data)?,
            };
            let moved = one_move(&lab, here, &which.method, load, limit);
            vm = which.record(round + 1, moved);
        }
    }
    report(&measured, limit);
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&to_json(options, &lab, &measured))?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let failures: usize = measured.iter().map(|m| m.failures.len()).sum();
    ensure!(failures == 0, "{failures} moves failed");
    Ok(())
}

/// Migrates the VM once and has the guest verify its memory.
fn one_move(
    lab: &Lab,
    mut vm: Vm,
    method: &Method,
    load: Option<(u64, u64, u64)>,
    limit: Duration,
) -> Result<(Vm, Outcome)> {
    // Resets the settings of the previous method.
    Method::platen(&[]).prepare(&mut vm)?;
    if let Some((rate, whole, mib)) = load {
        vm.guest.dirty(rate, whole, mib)?;
    }
    let (mut vm, outcome) = method.run(lab, vm, Patience::ByItself(limit))?;
    if load.is_some() {
        vm.guest.stop()?;
    }
    vm.guest.verify()?;
    Ok((vm, outcome))
}

fn parse_methods(names: &[String]) -> Result<Vec<Measured>> {
    let plain: Vec<String> = PLAIN.iter().map(|name| String::from(*name)).collect();
    let names = if names.is_empty() { &plain } else { names };
    names
        .iter()
        .map(|name| {
            let known = catalogue().into_iter().find(|(known, _)| known == name);
            let known = known.map(|(_, method)| method).or_else(|| multifd(name));
            let method = match (known, name.strip_prefix("platen:")) {
                (Some(method), _) => method,
                (None, Some(flags)) => {
                    Method::Platen(flags.split(',').map(|flag| format!("--{flag}")).collect())
                }
                (None, None) => bail!("no method {name:?}; --list prints those there are"),
            };
            let (name, runs, failures) = (name.clone(), Vec::new(), Vec::new());
            Ok(Measured { name, method, runs, not_ended: 0, failures })
        })
        .collect()
}

/// `qemu-multifdN-COMPRESSION`: QEMU alone with N channels, 1 to 64.
fn multifd(name: &str) -> Option<Method> {
    let (channels, compression) = name.strip_prefix("qemu-multifd")?.split_once('-')?;
    let channels = channels.parse().ok().filter(|channels| (1..=64).contains(channels))?;
    let compression = match compression {
        "none" => Compression::None,
        "zlib" => Compression::Zlib,
        "zstd" => Compression::Zstd,
        _ => return None,
    };
    Some(Method::QemuMultifd(channels, compression))
}

/// The columns: heading, value of a run, format.
type Column = (&'static str, fn(&Outcome) -> f64, fn(f64) -> String);

fn columns() -> [Column; 4] {
    [
        ("total", |o| to_f64(o.total_ms) / 1e3, |v| format!("{v:.2} s")),
        ("downtime", |o| to_f64(o.downtime_ms), |v| format!("{v:.0} ms")),
        ("on the wire", |o| to_f64(o.wire) / 1e6, |v| format!("{v:.1} MB")),
        ("CPU", |o| o.cost.total(), |v| format!("{v:.2} s")),
    ]
}

fn report(measured: &[Measured], limit: Duration) {
    let mut head = vec!["method"];
    for (name, ..) in columns() {
        head.extend([name, "(range)"]);
    }
    let mut rows = Vec::new();
    for m in measured.iter().filter(|m| m.counts()) {
        let mut row = vec![m.name.clone()];
        for (_, pick, write) in columns() {
            let sorted = sorted(&m.runs, pick);
            row.push(write(median(&sorted)));
            row.push(format!("{} - {}", write(sorted[0]), write(sorted[sorted.len() - 1])));
        }
        rows.push(row);
    }
    println!("\nMedians of {} runs:\n", measured.iter().map(|m| m.runs.len()).max().unwrap_or(0));
    println!("{}", render(&head, &rows));
    for m in measured {
        if let Some(unended) = m.unended(limit) {
            println!("{} {unended}\n", m.name);
        }
    }

    for baseline in BASELINES {
        let Some(base) = measured.iter().find(|m| m.name == baseline && m.counts()) else {
            continue;
        };
        let mut rows = Vec::new();
        for m in measured.iter().filter(|m| m.counts() && m.name != baseline) {
            let mut row = vec![m.name.clone()];
            for (nth, (_, pick, _)) in columns().into_iter().enumerate() {
                let (ours, theirs) =
                    (median(&sorted(&m.runs, pick)), median(&sorted(&base.runs, pick)));
                row.push(match nth {
                    1 => format!("{:+.0} ms", ours - theirs),
                    _ => format!("{:.2}", ours / theirs),
                });
            }
            rows.push(row);
        }
        println!("Against {baseline} (ratio of medians; downtime as a difference):\n");
        println!("{}", render(&["method", "total", "downtime", "on the wire", "CPU"], &rows));
    }

    let head = ["CPU seconds (median)", "source QEMU", "dest QEMU", "source relay", "dest relay"];
    let parts: [fn(&Outcome) -> f64; 4] = [
        |o| o.cost.source_qemu,
        |o| o.cost.destination_qemu,
        |o| o.cost.source_relay,
        |o| o.cost.destination_relay,
    ];
    let rows: Vec<Vec<String>> = measured
        .iter()
        .filter(|m| m.counts())
        .map(|m| {
            let cells = parts.iter().map(|pick| format!("{:.2}", median(&sorted(&m.runs, *pick))));
            std::iter::once(m.name.clone()).chain(cells).collect()
        })
        .collect();
    println!("{}", render(&head, &rows));
    hidden(measured);
    for m in measured.iter().filter(|m| matches!(m.method, Method::PlatenSimulatedQat(_))) {
        simulated(m, measured);
    }
}

/// The part of the downtime in the relays and the link.
fn hidden(measured: &[Measured]) {
    let of = |o: &Outcome| o.report.as_ref().and_then(|r| r["hidden-downtime"].as_f64());
    let mut rows = Vec::new();
    for m in measured {
        let mut all: Vec<f64> = m.runs.iter().filter_map(of).collect();
        all.sort_by(f64::total_cmp);
        if let [least, .., most] = all[..] {
            rows.push(vec![
                m.name.clone(),
                format!("{:.1} ms", median(&all)),
                format!("{least:.1} ms - {most:.1} ms"),
            ]);
        }
    }
    if !rows.is_empty() {
        println!("{}", render(&["hidden downtime, at most", "median", "(range)"], &rows));
    }
}

/// CPU time of the sender's host with a device, against a codec in software.
fn simulated(m: &Measured, measured: &[Measured]) {
    if m.runs.is_empty() {
        return;
    }
    let relay = |m: &Measured| median(&sorted(&m.runs, |o| o.cost.source_relay));
    print!(
        "{}: SIMULATED device; source relay {:.2} CPU s without its threads ({:.2} s more)",
        m.name,
        relay(m),
        median(&sorted(&m.runs, |o| o.simulated))
    );
    let zstd = measured.iter().find(|m| m.name == "platen-zstd-single" && m.counts());
    if let Some(zstd) = zstd {
        print!(", {:.2} of platen-zstd-single's", relay(m) / relay(zstd));
    }
    let engines = |run: &Outcome, name: &str| -> Vec<f64> {
        let engines = run.report.as_ref().and_then(|report| report["accelerators"].as_array());
        engines.into_iter().flatten().filter_map(|engine| engine[name].as_f64()).collect()
    };
    let most = |name: &str| {
        let all = m.runs.iter().flat_map(|run| engines(run, name));
        all.fold(0.0, f64::max)
    };
    println!(
        "; of one codec thread in one run at most: {} suspicions, a piece waited {:.0} ms",
        most("suspicions"),
        most("longest_wait_us") / 1e3
    );
}

fn sorted(runs: &[Outcome], pick: fn(&Outcome) -> f64) -> Vec<f64> {
    let mut values: Vec<f64> = runs.iter().map(pick).collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The median of sorted values, at least one.
fn median(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[half],
        _ => (sorted[half - 1] + sorted[half]) / 2.0,
    }
}

fn to_json(options: &Options, lab: &Lab, measured: &[Measured]) -> Value {
    let run = |o: &Outcome| {
        json!({
            "total-time": o.total_ms,
            "downtime": o.downtime_ms,
            "wire": o.wire,
            "simulated-device-cpu-seconds": o.simulated,
            "cpu-seconds": {
                "total": o.cost.total(),
                "source-qemu": o.cost.source_qemu,
                "destination-qemu": o.cost.destination_qemu,
                "source-relay": o.cost.source_relay,
                "destination-relay": o.cost.destination_relay,
            },
            "query-migrate": o.stats,
            "platen": o.report,
        })
    };
    json!({
        "machine": {
            "cpu": first_line_after("/proc/cpuinfo", "model name"),
            "cores": std::thread::available_parallelism().map_or(0, |n| n.get()),
            "kernel": said("uname", &["-r"]),
            "qemu": options.qemu,
            "qemu-system-x86_64": said("qemu-system-x86_64", &["--version"]),
            "commit": said("git", &["describe", "--always", "--dirty"]),
        },
        "network": lab.net.describe(),
        "link-mbit": options.link,
        "data-mib": options.data,
        "dirty": options.dirty,
        "prealloc": options.prealloc,
        "limit-seconds": options.limit,
        "methods": measured
            .iter()
            .map(|m| json!({
                "name": m.name,
                "runs": m.runs.iter().map(run).collect::<Vec<_>>(),
                "did-not-end": m.not_ended,
                "failures": m.failures,
            }))
            .collect::<Vec<_>>(),
    })
}

/// The first line of a command's output; empty if it cannot be run.
fn said(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().map(|o| o.stdout).unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
}

/// The value of the first `name : value` line of a file.
fn first_line_after(path: &str, name: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.split_once(':')).map_or(String::new(), |(_, v)| v.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_and_compression_are_in_a_method_s_name() {
        assert_eq!(multifd("qemu-multifd8-zlib"), Some(Method::QemuMultifd(8, Compression::Zlib)));
        for name in ["qemu-multifd0-none", "qemu-multifd65-zstd", "qemu-multifd-zstd", "qemu", ""] {
            assert_eq!(multifd(name), None, "{name}");
        }
    }
}
