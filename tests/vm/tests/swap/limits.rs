//! Limits that are reached: writes fail, and all memory stays right.

use anyhow::{bail, ensure, Result};
use std::time::Duration;
use vm_tests::swap::{Stage, LONG, SHORT};

/// Memory suffices, but the store's limit is below what the kernel is told to swap out: writes
/// fail, the kernel retains those pages, and all of memory is right. (If memory does not suffice
/// either, a kernel with nominally free swap retries for long before it kills: with zram's limit as
/// with this one.)
pub(crate) fn memory_limit(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("mem-limit", 256)?;
    guest.serve("--size 256M --mem-limit 4M --reserve 1M --ublk --swap", "page-cluster")?;
    guest.eat("calm", "mib=16 seed=5 until=/tmp/enough touch=0")?;
    guest.eat("eat", "mib=48 after=/tmp/go until=/tmp/enough")?;
    // Three times the store's limit, compressed.
    guest.push_out("eat", 40)?;
    let failed = guest.stat("failed_writes")?;
    ensure!(failed > 0, "the limit was not reached: {}", guest.swapped_kib()?);
    guest.vm.sh("touch /tmp/go; sleep 2; touch /tmp/enough", SHORT)?;
    guest.finish("eat", LONG)?;
    guest.finish("calm", LONG)?;
    ensure!(guest.stat("mem_used_total")? <= 4 << 20, "more memory than the limit");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG).map(drop)
}

/// The disk is smaller than what is to be swapped out.
pub(crate) fn device_full(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("full", 256)?;
    guest.serve("--size 24M --ublk --swap", "page-cluster")?;
    let eat = guest.available_mib()? + 60;
    guest.background("calm", "guest swap eat mib=24 seed=5 until=/tmp/enough touch=0")?;
    guest.wait_for("calm", "filled pages", LONG)?;
    guest.background("eat", &format!("guest swap eat mib={eat} seconds=5"))?;
    wait_for_end(&mut guest, "eat")?;
    let log = guest.log("eat")?;
    ensure!(!log.contains("WRONG") && !log.contains("status 0"), "it cannot have fitted: {log}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    guest.finish("calm", LONG)?;
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG).map(drop)
}

/// With the default memory limit, and pages that do not compress. Pages that fit into memory stay
/// there and are whole. With more than that the kernel ends the program, in time and no other, as
/// it does with zram; the server serves on.
pub(crate) fn incompressible(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("incompressible", 256)?;
    guest.serve("--size 512M --ublk --swap", "page-cluster")?;
    guest.eat("calm", "mib=24 seed=5 until=/tmp/enough touch=0")?;
    let (fits, generation) = (guest.available_mib()? - 8, guest.stat("generation")?);
    guest.background("fits", &format!("guest swap eat mib={fits} seed=9 random=1 seconds=5"))?;
    let log = guest.finish("fits", LONG)?;
    ensure!(log.contains("ok pages=") && guest.vmstat("oom_kill")? == 0, "{log}");

    let beyond = guest.available_mib()? + 60;
    guest.background("beyond", &format!("guest swap eat mib={beyond} seed=9 random=1"))?;
    wait_for_end(&mut guest, "beyond")?;
    let log = guest.log("beyond")?;
    ensure!(!log.contains("WRONG") && !log.contains("status 0"), "it cannot have fitted: {log}");
    if guest.vmstat("oom_kill")? != 1 {
        let ended = guest.vm.try_sh("dmesg | grep -i 'killed process\\|oom_reaper'", SHORT)?.1;
        bail!("not only that program was ended: {ended}");
    }
    ensure!(guest.stat("generation")? == generation, "{}", guest.log("serve")?);
    let (refused, used) = (guest.stat("failed_writes")?, guest.stat("mem_used_max")?);
    ensure!(refused > 0, "no page was refused");
    ensure!(used <= guest.stat("mem_limit")?, "the store had {used} bytes");
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    guest.finish("calm", LONG)?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  {beyond} MiB: {refused} pages refused, {} MiB of store at most", used >> 20);
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG).map(drop)
}

/// Waits for an end, successful or not.
fn wait_for_end(guest: &mut vm_tests::swap::Guest, name: &str) -> Result<()> {
    let deadline = std::time::Instant::now() + LONG;
    while !guest.log(name)?.contains("status ") {
        ensure!(std::time::Instant::now() < deadline, "{name} does not end: {}", guest.log(name)?);
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}
