//! A memory eater beyond the guest's memory, and what may happen meanwhile.

use anyhow::{ensure, Result};
use std::time::Duration;
use vm_tests::swap::{Guest, Stage, LONG, SHORT};

pub(crate) fn by_ublk(stage: &Stage) -> Result<()> {
    let guest = stage.boot("swap-ublk", 256)?;
    pressed(guest, "--size 512M --ublk --swap", true)
}

pub(crate) fn by_nbd(stage: &Stage) -> Result<()> {
    let guest = stage.boot("swap-nbd", 256)?;
    pressed(guest, "--size 512M --nbd unix:/run/platen.nbd --swap", false)
}

fn pressed(mut guest: Guest, arguments: &str, soak: bool) -> Result<()> {
    guest.serve(arguments, "page-cluster")?;
    let check = guest.vm.sh("platen device check", SHORT)?;
    ensure!(!check.contains("NOT MET"), "{check}");
    let disk = guest.swap_disk()?;
    // All of the memory, and 100 MiB more than there is.
    let seconds = if soak { soak_seconds() } else { 10 };
    let eat = guest.available_mib()? + 100;
    guest.background("eat", &format!("guest swap eat mib={eat} seconds={seconds}"))?;
    guest.wait_for("eat", "filled pages", LONG)?;
    let out = guest.vmstat("pswpout")?;
    ensure!(out > 10_000, "only {out} pages were swapped out");
    let took = guest.kill_server()?;
    guest.wait_for("eat", "status 0", LONG + Duration::from_secs(seconds))?;
    let log = guest.finish("eat", SHORT)?;
    ensure!(log.contains("ok pages="), "{log}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  {eat} MiB, a server replaced in {took} ms under pressure (TCG)");

    // Off, which brings everything back, and on again. The kernel kills a swapoff that lacks memory: there is some.
    guest.wait_for_memory(32 + 16)?;
    guest.eat("again", "mib=32 seconds=12")?;
    guest.push_out("again", 24)?;
    let swapped = guest.swapped_kib()?;
    ensure!(swapped > 12 << 10, "only {swapped} KiB are swapped out");
    guest.vm.sh(&format!("swapoff {disk} && swapon -d {disk}"), LONG)?;
    guest.finish("again", LONG)?;

    // What is freed is discarded: nothing stays stored for long but the header and the last of it.
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG)?;
    ensure!(guest.vm.sh("cat /proc/swaps", SHORT)?.lines().count() == 1, "it is still swapped to");
    Ok(())
}

/// How long memory is churned.
fn soak_seconds() -> u64 {
    let given = std::env::var("PLATEN_SWAP_SOAK").ok().and_then(|seconds| seconds.parse().ok());
    given.unwrap_or(20)
}
