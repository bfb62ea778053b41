//! Servers that take over while memory is exhausted: a store of several GiB, and many in a row.

use std::time::Duration;

use anyhow::{ensure, Result};
use vm_tests::swap::{Guest, Stage, LONG, SHORT};

use crate::swapping::{beside_the_store, freed, replaced_twice};

/// The guest's memory, in MiB.
fn memory() -> u64 {
    let given = std::env::var("PLATEN_SWAP_LARGE").ok().and_then(|mib| mib.parse().ok());
    given.unwrap_or(4096)
}

/// How long the program may take to fill its memory, and to compare a part of it.
const LIMIT: Duration = Duration::from_secs(7200);

pub(crate) fn large(stage: &Stage) -> Result<()> {
    replaced(stage.boot_with_cpus("large", memory(), 2)?, "zstd")
}

pub(crate) fn large_with_many_threads(stage: &Stage) -> Result<()> {
    replaced(stage.boot_with_cpus("large-lz4", memory(), 8)?, "lz4")
}

fn replaced(mut guest: Guest, codec: &str) -> Result<()> {
    let size = memory() * 5 / 2;
    guest.serve(&format!("--size {size}M --codec {codec} --ublk --swap"), "page-cluster")?;
    guest.check()?;
    beside_the_store(&mut guest, memory())?;
    // Each page compresses to half, so twice as much is stored as the program has beyond memory.
    let eat = guest.available_mib()? + memory() * 5 / 8;
    let eater = format!("mib={eat} half=1 seconds=10 until=/tmp/enough check=16");
    guest.background("eat", &format!("guest swap eat {eater}"))?;
    guest.wait_for("eat", "filled pages", LIMIT)?;
    let (plain, stored) =
        (guest.stat("orig_data_size")? >> 20, guest.stat("mem_used_total")? >> 20);
    ensure!(plain > memory() && stored > memory() / 2, "{plain} MiB are stored in {stored}");
    let took = replaced_twice(&mut guest, LIMIT)?;
    println!("  {plain} MiB stored in {stored}, servers replaced in {took:?} ms (TCG)");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG).map(drop)
}

/// The driver of Linux 6.7 to 6.14 lets a new server begin while its work for the dead one is not
/// over. A kernel that interrupts that work shows whether the new server waits for it.
pub(crate) fn in_a_row(stage: &Stage) -> Result<()> {
    /// The pause before each server grows, to 3 s before the eighth, and a pause hides the race.
    const SERVERS: usize = 8;
    let mut guest = stage.boot_preempted("in-a-row", 256)?;
    guest.serve("--size 512M --ublk --swap", "page-cluster")?;
    let eat = guest.available_mib()? + 100;
    guest.background("eat", &format!("guest swap eat mib={eat} seconds=10 until=/tmp/enough"))?;
    guest.wait_for("eat", "filled pages", LONG)?;
    guest.wait_for_swapped_out(10_000)?;
    let mut took = Vec::new();
    for _ in 0..SERVERS {
        took.push(guest.kill_server()?);
    }
    freed(&mut guest, LONG)?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  {eat} MiB, servers replaced in {took:?} ms under pressure (TCG)");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG).map(drop)
}
