//! `make demo-memory`: a redis-server with more values than its guest has memory, three times:
//! without swap, with the kernel's zram, with platen. Prints how many values each stored and at
//! what cost, and in one sentence what platen gained or lost against zram. The exit status is 1 if
//! zram stored what platen did not.
//!
//! ```text
//! demo_memory [--of-memory PERCENT] [--qat] [--json FILE]
//! ```
//!
//! `--qat` adds platen with a simulated QAT device, whose deflate runs on the guest's own CPUs.
//! `--json` writes the figures, with the values that were stored and read at each second.
//!
//! Times and CPU are those of a guest under QEMU's TCG on this machine: good for comparing the
//! three, and for nothing else.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::{json, Value};
use vm_tests::swap::{missing, number, Guest, Stage, SwapOn, SHORT};
use vm_tests::{cleanup, end, platen, table};

const MEMORY_MIB: u64 = 256;
const VALUE: u64 = 4000;

/// CPU time of the guest that filling redis, or reading it, may take, seconds: not wall time, which
/// depends on the load of the host.
const LIMIT: f64 = 1500.0;

/// A guest that makes no progress for so long hangs.
const STILL: Duration = Duration::from_secs(300);

/// The swap of a run.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    On(SwapOn),
    /// platen by ublk, with qatzip on a simulated QAT device.
    Qat,
}

/// The command line.
struct Options {
    /// Values in per cent of the guest's memory.
    of_memory: u64,
    qat: bool,
    json: Option<PathBuf>,
}

fn arguments() -> Result<Options> {
    let mut options = Options { of_memory: 150, qat: false, json: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value"));
        match word.as_str() {
            "--of-memory" => options.of_memory = value()?.parse().context("--of-memory")?,
            "--qat" => options.qat = true,
            "--json" => options.json = Some(PathBuf::from(value()?)),
            _ => bail!("usage: demo_memory [--of-memory PERCENT] [--qat] [--json FILE]"),
        }
    }
    let range = 1..=400;
    ensure!(
        range.contains(&options.of_memory),
        "--of-memory {}: expected {} to {} per cent",
        options.of_memory,
        range.start(),
        range.end()
    );
    Ok(options)
}

/// The guests' initramfs; with the simulated device's libraries if they are asked for.
fn stage(qat: bool) -> Result<Stage> {
    if !qat {
        return Stage::new();
    }
    let binary = platen::device_binary()?;
    let libraries =
        [("libqat_sim_libqat.so", "libqat.so.4"), ("libqat_sim_libusdm.so", "libusdm.so.0")];
    let libraries = libraries.map(|(built, name)| (binary.with_file_name(built), name));
    for (path, _) in &libraries {
        ensure!(path.exists(), "{} is missing: make build", path.display());
    }
    Stage::with_libraries(&libraries.each_ref().map(|(path, name)| (path.as_path(), *name)))
}

fn main() -> ExitCode {
    end("demo_memory", run_all())
}

fn run_all() -> Result<()> {
    cleanup::install()?;
    let options = arguments()?;
    if let Some(why) = missing() {
        bail!("no guest can be started: {why}");
    }
    let stage = stage(options.qat)?;
    println!("redis-server, values of {VALUE} bytes, in a guest of {MEMORY_MIB} MiB (TCG):");
    let mut ways = vec![
        ("no swap", Way::On(SwapOn::Nothing)),
        ("zram, zstd", Way::On(SwapOn::Zram)),
        ("platen, zstd", Way::On(SwapOn::Platen)),
    ];
    if options.qat {
        ways.push(("platen, SIMULATED QAT", Way::Qat));
    }
    let mut runs = Vec::new();
    for (name, way) in ways {
        println!("  {name} ...");
        let done = run(&stage, name, way, options.of_memory);
        runs.push(match (done, way) {
            // The others' figures are worth as much without it.
            (Err(error), Way::Qat) => Run::failed(name, &error),
            (done, _) => done?,
        });
    }
    if let Some(path) = &options.json {
        let figures = json!({
            "memory_mib": MEMORY_MIB,
            "value_bytes": VALUE,
            "of_memory_percent": options.of_memory,
            "runs": runs.iter().map(|run| &run.figures).collect::<Vec<_>>(),
        });
        std::fs::write(path, figures.to_string() + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let rows: Vec<_> = runs.iter().map(|run| run.row.clone()).collect();
    let head =
        ["swap", "values", "MiB", "got back", "fill s", "get s", "CPU s", "major faults", "ended"];
    print!("{}", table::render(&head, &rows));
    let [without, zram, platen, ..] = runs.as_slice() else { unreachable!("three at least") };
    for footprint in runs.iter().filter_map(|run| run.footprint.as_ref()) {
        println!("platen's memory beside its store, MiB: {footprint}");
    }
    let said = verdict(without, zram, platen);
    println!("{said}");
    ensure!(platen.kept() >= zram.kept(), "platen stored less than zram");
    Ok(())
}

/// The result of one run.
struct Run {
    /// Values stored, and whether each was there at the end.
    stored: u64,
    whole: bool,
    row: Vec<String>,
    figures: Value,
    /// Of platen.
    footprint: Option<String>,
}

impl Run {
    /// A run on the simulated device that came to no end.
    fn failed(name: &str, error: &anyhow::Error) -> Self {
        let ended = format!("FAILED: {error:#}");
        println!("  {name} {ended}");
        let mut row = vec![String::from("-"); 9];
        (row[0], row[8]) = (name.to_owned(), "FAILED".to_owned());
        let figures = json!({ "name": name, "simulated": true, "ended": ended });
        Self { stored: 0, whole: false, row, figures, footprint: None }
    }

    /// Values that could be read back: all, or none from a server that was killed.
    fn kept(&self) -> (bool, u64) {
        (self.whole, self.stored)
    }
}

/// The gain or loss of platen.
fn verdict(without: &Run, zram: &Run, platen: &Run) -> String {
    let share = |run: &Run, of: &Run| 100 * run.stored / of.stored.max(1);
    let gain = format!("{} % of what fitted without swap", share(platen, without));
    match (zram.whole, platen.whole) {
        (true, true) | (false, true) => {
            format!("platen stored all {} values: {gain}.", platen.stored)
        }
        (true, false) if platen.stored >= zram.stored => format!(
            "platen LOST: it stored all {} values, and not all of them could be read back.",
            platen.stored
        ),
        (true, false) => format!(
            "platen LOST: redis was killed at {} values, {} % of the {} that zram stored.",
            platen.stored,
            share(platen, zram),
            zram.stored
        ),
        (false, false) => format!(
            "Both were full: platen at {} values ({gain}), zram at {}.",
            platen.stored, zram.stored
        ),
    }
}

fn run(stage: &Stage, name: &str, way: Way, of_memory: u64) -> Result<Run> {
    let mut guest = stage.boot("demo", MEMORY_MIB)?;
    match way {
        Way::On(on) => guest.swap_on(on)?,
        Way::Qat => qat(&mut guest)?,
    }
    guest.redis()?;
    let keys = MEMORY_MIB * of_memory / 100 * (1 << 20) / VALUE;
    let cpu = guest.cpu()?;
    let begin = Instant::now();
    let (filled, stored_by) = client(&mut guest, "redis-fill", keys)?;
    let fill = begin.elapsed();
    let stored = number(&filled, "keys=").unwrap_or(0);
    let alive = filled.contains("ok keys=");
    let begin = Instant::now();
    let (checked, read_by) =
        if alive { client(&mut guest, "redis-check", keys)? } else { Default::default() };
    let get = begin.elapsed();
    if checked.contains("WRONG") {
        bail!("{name}: {checked}");
    }
    let back = checked.contains("ok keys=");
    let ended = match (alive, back) {
        (true, true) => "all there, every byte compared".to_owned(),
        (true, false) if !checked.contains("ended") => {
            format!("not all read in {LIMIT} CPU s")
        }
        (true, false) => format!("lost: {}", checked.lines().last().unwrap_or_default()),
        (false, _) if filled.contains("late: ") => format!("not done in {LIMIT} CPU s"),
        (false, _) => "killed for want of memory".to_owned(),
    };
    let cpu = guest.cpu()? - cpu;
    let faults = guest.vmstat("pgmajfault")?;
    let row = vec![
        name.to_owned(),
        stored.to_string(),
        ((stored * VALUE) >> 20).to_string(),
        if back { "all" } else { "-" }.to_owned(),
        format!("{:.0}", fill.as_secs_f64()),
        if alive { format!("{:.0}", get.as_secs_f64()) } else { "-".to_owned() },
        format!("{cpu:.0}"),
        faults.to_string(),
        ended.clone(),
    ];
    // The client's own times: those of this process have the pauses between two looks in them.
    let ms = |said: &str| number(said, "ms=");
    let footprint = (way == Way::On(SwapOn::Platen)).then(|| footprint(&mut guest)).transpose()?;
    let figures = json!({
        "name": name,
        "simulated": way == Way::Qat,
        "values": stored,
        "read_back": back,
        "fill_ms": ms(&filled),
        "get_ms": ms(&checked),
        "cpu_seconds": cpu,
        "major_faults": faults,
        "ended": ended,
        "locked_mib": footprint.as_ref().map(|(mib, _)| mib),
        "stored_by_ms": stored_by,
        "read_by_ms": read_by,
    });
    let footprint = footprint.map(|(_, parts)| parts);
    Ok(Run { stored, whole: back, row, figures, footprint })
}

/// Starts swapping to platen on a simulated QAT device.
fn qat(guest: &mut Guest) -> Result<()> {
    guest.background(
        "serve",
        "PLATEN_QAT_SIM='engine deflate; latency 30' platen device serve --size 512M \
         --codec qatzip --accelerator qat --qat-libraries /lib --ublk --swap",
    )?;
    guest.wait_for("serve", "page-cluster", SHORT)
}

/// `footprint` of `platen device stat`: MiB in all, and the parts in words.
fn footprint(guest: &mut Guest) -> Result<(f64, String)> {
    let mut parts = Vec::new();
    for (part, name) in [
        ("text", "program and libraries"),
        ("heap", "heap"),
        ("server", "server"),
        ("stand_by", "stand-by server"),
        ("supervisor", "supervisor"),
        ("buffers", "buffers"),
    ] {
        parts.push((name, guest.stat(part)? as f64 / f64::from(1 << 20)));
    }
    let sum: f64 = parts.iter().map(|(_, mib)| mib).sum();
    let parts: Vec<_> = parts.iter().map(|(name, mib)| format!("{name} {mib:.1}")).collect();
    Ok((sum, format!("{} = {sum:.1}", parts.join(", "))))
}

/// The last line of the client's output, and for each second the values done and the milliseconds.
fn client(guest: &mut Guest, role: &str, keys: u64) -> Result<(String, Vec<[u64; 2]>)> {
    let command = format!("guest swap {role} /tmp/redis.sock keys={keys} size={VALUE}");
    guest.background("client", &command)?;
    let begun = guest.cpu()?;
    let mut last = (String::new(), Instant::now());
    loop {
        let log = guest.log("client")?;
        let beats = log.lines().filter(|line| line.starts_with("beat "));
        let beats = beats.filter_map(|line| Some([number(line, "=")?, number(line, "ms=")?]));
        if log.contains("status ") {
            let last = log.lines().rev().nth(1).unwrap_or_default();
            return Ok((last.to_owned(), beats.collect()));
        }
        if guest.cpu()? - begun > LIMIT {
            let last = log.lines().last().unwrap_or_default();
            return Ok((last.replace("beat stored", "late: keys"), beats.collect()));
        }
        // Not its length: of a long log the guest returns the end.
        if log != last.0 {
            last = (log, Instant::now());
        }
        ensure!(last.1.elapsed() < STILL, "{role}: no progress in {STILL:?}: {}", last.0);
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_names_the_loser() {
        let run = |stored, whole| Run {
            stored,
            whole,
            row: Vec::new(),
            figures: Value::Null,
            footprint: None,
        };
        let said = |zram, platen| verdict(&run(50, false), &zram, &platen);
        assert!(said(run(100, true), run(100, true)).starts_with("platen stored all 100 values"));
        let lost = said(run(100, true), run(90, false));
        assert!(lost.contains("LOST: redis was killed at 90 values, 90 % of the 100"), "{lost}");
        assert!(run(90, false).kept() < run(100, true).kept());
        let lost = said(run(100, true), run(100, false));
        assert!(lost.contains("LOST: it stored all 100 values, and not all"), "{lost}");
        let both = said(run(100, false), run(110, false));
        assert!(both.contains("platen at 110 values (220 %") && both.contains("zram at 100"));
    }
}
