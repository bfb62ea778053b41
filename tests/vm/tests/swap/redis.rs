//! redis-server with more values than there is memory, on platen and on the kernel's zram.

use anyhow::{ensure, Result};
use vm_tests::swap::{Stage, SwapOn, LONG};

/// Bytes of a value; a key takes about a hundred more.
const VALUE: u64 = 4000;

pub(crate) fn beyond_memory(stage: &Stage) -> Result<()> {
    let ours = measure(stage, "platen", SwapOn::Platen)?;
    let zrams = measure(stage, "zram", SwapOn::Zram)?;
    println!(
        "  major faults per CPU second: platen {ours:.0}, zram with zstd {zrams:.0}: {:.2} (TCG; goal 0.6)",
        ours / zrams
    );
    Ok(())
}

/// Fills redis beyond memory, gets every value back, and gives major faults per second of CPU while it does.
fn measure(stage: &Stage, name: &str, on: SwapOn) -> Result<f64> {
    let mut guest = stage.boot(&format!("redis-{name}"), 256)?;
    guest.swap_on(on)?;
    let keys = (guest.available_mib()? + 60) * (1 << 20) / (VALUE + 120);
    guest.redis()?;
    let filled = guest.vm.sh(
        &format!("guest swap redis-fill /tmp/redis.sock keys={keys} size={VALUE} | tail -1"),
        LONG,
    )?;
    ensure!(filled.contains(&format!("ok keys={keys}")), "redis was not filled: {filled}");
    let (faults, cpu) = (guest.vmstat("pgmajfault")?, guest.cpu()?);
    let checked = guest
        .vm
        .sh(&format!("guest swap redis-check /tmp/redis.sock keys={keys} size={VALUE}"), LONG)?;
    ensure!(checked.contains(&format!("ok keys={keys}")), "{checked}");
    let (faults, cpu) = (guest.vmstat("pgmajfault")? - faults, guest.cpu()? - cpu);
    ensure!(faults > 1000, "only {faults} major faults: it fitted");
    println!(
        "  {name}: {keys} values of {VALUE} bytes, {faults} major faults in {cpu:.1} CPU seconds"
    );
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    Ok(faults as f64 / cpu)
}
