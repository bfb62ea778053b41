//! `make demo-memory`: a redis-server with more values than its guest has memory, three times:
//! without swap, with the kernel's zram, with platen. Prints how many values each stored and at
//! what cost, and in one sentence what platen gained or lost against zram. The exit status is 1 if
//! zram stored what platen did not.
//!
//! Times and CPU are those of a guest under QEMU's TCG on this machine: good for comparing the
//! three, and for nothing else.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Result};
use vm_tests::swap::{missing, number, Guest, Stage, SwapOn};
use vm_tests::{cleanup, table};

const MEMORY_MIB: u64 = 256;
const VALUE: u64 = 4000;

fn main() -> Result<()> {
    cleanup::install()?;
    if let Some(why) = missing() {
        bail!("no guest can be started: {why}");
    }
    let stage = Stage::new()?;
    println!("redis-server, values of {VALUE} bytes, in a guest of {MEMORY_MIB} MiB (TCG):");
    let mut runs = Vec::new();
    for (name, on) in [
        ("no swap", SwapOn::Nothing),
        ("zram, zstd", SwapOn::Zram),
        ("platen, zstd", SwapOn::Platen),
    ] {
        println!("  {name} ...");
        runs.push(run(&stage, name, on)?);
    }
    let rows: Vec<_> = runs.iter().map(|run| run.row.clone()).collect();
    let head =
        ["swap", "values", "MiB", "got back", "fill s", "get s", "CPU s", "major faults", "ended"];
    print!("{}", table::render(&head, &rows));
    let [without, zram, platen] = runs.as_slice() else { unreachable!("there were three") };
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
    /// Of platen.
    footprint: Option<String>,
}

impl Run {
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

fn run(stage: &Stage, name: &str, on: SwapOn) -> Result<Run> {
    let mut guest = stage.boot("demo", MEMORY_MIB)?;
    guest.swap_on(on)?;
    guest.redis()?;
    // One and a half times the memory.
    let keys = (MEMORY_MIB + MEMORY_MIB / 2) * (1 << 20) / VALUE;
    let cpu = guest.cpu()?;
    let begin = Instant::now();
    let limit = Duration::from_secs(500);
    let filled = client(&mut guest, "redis-fill", keys, limit)?;
    let fill = begin.elapsed();
    let stored = number(&filled, "keys=").unwrap_or(0);
    let alive = filled.contains("ok keys=");
    let begin = Instant::now();
    let checked =
        if alive { client(&mut guest, "redis-check", keys, limit)? } else { String::new() };
    let get = begin.elapsed();
    if checked.contains("WRONG") {
        bail!("{name}: {checked}");
    }
    let back = checked.contains("ok keys=");
    let ended = match (alive, back) {
        (true, true) => "all there, every byte compared".to_owned(),
        (true, false) if !checked.contains("ended") => {
            format!("not all read after {} s", limit.as_secs())
        }
        (true, false) => format!("lost: {}", checked.lines().last().unwrap_or_default()),
        (false, _) if filled.contains("late: ") => format!("not done after {} s", limit.as_secs()),
        (false, _) => "killed for want of memory".to_owned(),
    };
    let row = vec![
        name.to_owned(),
        stored.to_string(),
        ((stored * VALUE) >> 20).to_string(),
        if back { "all" } else { "-" }.to_owned(),
        format!("{:.0}", fill.as_secs_f64()),
        if alive { format!("{:.0}", get.as_secs_f64()) } else { "-".to_owned() },
        format!("{:.0}", guest.cpu()? - cpu),
        guest.vmstat("pgmajfault")?.to_string(),
        ended,
    ];
    let footprint = (on == SwapOn::Platen).then(|| footprint(&mut guest)).transpose()?;
    Ok(Run { stored, whole: back, row, footprint })
}

/// `footprint` of `platen device stat`.
fn footprint(guest: &mut Guest) -> Result<String> {
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
    Ok(format!("{} = {sum:.1}", parts.join(", ")))
}

/// The last line of the client's output.
fn client(guest: &mut Guest, role: &str, keys: u64, limit: Duration) -> Result<String> {
    let command = format!("guest swap {role} /tmp/redis.sock keys={keys} size={VALUE}");
    guest.background("client", &command)?;
    let deadline = Instant::now() + limit;
    loop {
        let log = guest.log("client")?;
        if log.contains("status ") {
            let last = log.lines().rev().nth(1).unwrap_or_default();
            return Ok(last.to_owned());
        }
        if Instant::now() > deadline {
            return Ok(log.lines().last().unwrap_or_default().replace("beat stored", "late: keys"));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}
