//! `make demo-memory`: one redis-server with more values than its guest has memory, three times:
//! without swap, with the kernel's zram, with platen. Prints how far each got and what it cost.
//!
//! Times and CPU are a guest's under QEMU's TCG, on this machine: good for comparing the three, not
//! for more.

use std::time::{Duration, Instant};

use anyhow::{bail, Result};
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
    let mut rows = Vec::new();
    for (name, on) in [
        ("no swap", SwapOn::Nothing),
        ("zram, zstd", SwapOn::Zram),
        ("platen, zstd", SwapOn::Platen),
    ] {
        println!("  {name} ...");
        rows.push(run(&stage, name, on)?);
    }
    let head =
        ["swap", "values", "MiB", "got back", "fill s", "get s", "CPU s", "major faults", "ended"];
    print!("{}", table::render(&head, &rows));
    Ok(())
}

fn run(stage: &Stage, name: &str, on: SwapOn) -> Result<Vec<String>> {
    let mut guest = stage.boot("demo", MEMORY_MIB)?;
    guest.swap_on(on)?;
    guest.redis()?;
    // Half as much again as there is memory.
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
        (true, false) => format!("lost: {}", checked.lines().last().unwrap_or_default()),
        (false, _) if filled.contains("late: ") => format!("not done after {} s", limit.as_secs()),
        (false, _) => "killed for want of memory".to_owned(),
    };
    Ok(vec![
        name.to_owned(),
        stored.to_string(),
        ((stored * VALUE) >> 20).to_string(),
        if back { "all" } else { "-" }.to_owned(),
        format!("{:.0}", fill.as_secs_f64()),
        if alive { format!("{:.0}", get.as_secs_f64()) } else { "-".to_owned() },
        format!("{:.0}", guest.cpu()? - cpu),
        guest.vmstat("pgmajfault")?.to_string(),
        ended,
    ])
}

/// The last line of what the client says.
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
