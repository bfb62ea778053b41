//! redis-server with more values than there is memory, on platen and on the kernel's zram.

use anyhow::{ensure, Result};
use std::time::{Duration, Instant};
use vm_tests::swap::{Guest, Stage, SwapOn, LONG, SHORT};

/// Bytes of a value; a key takes about a hundred more.
const VALUE: u64 = 4000;

/// platen stores at least as many values as zram, in a guest of the same size.
pub(crate) fn beyond_memory(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("redis-zram", 256)?;
    guest.swap_on(SwapOn::Zram)?;
    let keys = (guest.available_mib()? + 60) * (1 << 20) / (VALUE + 120);
    let zrams = measure(&mut guest, "zram", keys)?;
    drop(guest);
    let mut guest = stage.boot("redis-platen", 256)?;
    // No training while the two are compared.
    guest.vm.sh("printf '[policy]\\ndictionary = \"off\"\\n' > /tmp/policy.toml", SHORT)?;
    let serve = "--size 512M --codec zstd --ublk --swap --policy /tmp/policy.toml";
    guest.serve(serve, "page-cluster")?;
    let ours = measure(&mut guest, "platen", keys)?;
    println!(
        "  major faults per CPU second: platen {ours:.0}, zram with zstd {zrams:.0}: {:.2} (TCG; goal 0.6)",
        ours / zrams
    );
    Ok(())
}

/// Pages that the kernel frees while values are read do not stay stored: the kernel uses the free
/// slots of one area before it goes on to the next.
pub(crate) fn read_again(stage: &Stage) -> Result<()> {
    const SIZE_MIB: u64 = 512;
    let mut guest = stage.boot("redis-read", 256)?;
    guest.vm.sh("printf '[policy]\\ndictionary = \"off\"\\n' > /tmp/policy.toml", SHORT)?;
    let serve = "--size 512M --codec zstd --ublk --swap --policy /tmp/policy.toml";
    guest.serve(serve, "page-cluster")?;
    let areas = guest.vm.sh("tail -n +2 /proc/swaps", SHORT)?.lines().count() as u64;
    // Of a disk that may grow: 16 at most, some of them kept for the growth.
    ensure!((8..=16).contains(&areas), "{areas} swap areas");
    guest.redis()?;
    let keys = (guest.available_mib()? + 110) * (1 << 20) / (VALUE + 120);
    for what in ["fill", "check"] {
        let command = format!("guest swap redis-{what} /tmp/redis.sock keys={keys} size={VALUE}");
        let said = guest.vm.sh(&format!("{command} | tail -1"), LONG)?;
        ensure!(said.contains(&format!("ok keys={keys}")), "redis-{what}: {said}");
    }
    let (stored, swapped) = (guest.stat("orig_data_size")? >> 20, guest.swapped_kib()? >> 10);
    ensure!(swapped > 100, "only {swapped} MiB are swapped out");
    // One area, and what is discarded a little later.
    ensure!(
        stored < swapped + SIZE_MIB / areas + 16,
        "{stored} MiB are stored of which {swapped} are swapped out"
    );
    println!("  {keys} values read: {stored} MiB stored, {swapped} MiB swapped out");

    // More is swapped out than memory has room for: the end is put off, and no area stays off.
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.wait_for("serve", "cannot take all back", LONG)?;
    let left = guest.vm.sh("tail -n +2 /proc/swaps", SHORT)?.lines().count() as u64;
    ensure!(left == areas, "{left} of {areas} swap areas after a failed swapoff");
    let command = format!("guest swap redis-check /tmp/redis.sock keys={keys} size={VALUE}");
    let said = guest.vm.sh(&format!("{command} | tail -1"), LONG)?;
    ensure!(said.contains(&format!("ok keys={keys}")), "after a failed swapoff: {said}");
    Ok(())
}

/// Redis beyond memory in a guest of its own: otherwise most samples would be pages that other
/// programs had swapped out before.
pub(crate) fn with_a_dictionary(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("redis-dictionary", 256)?;
    // Memory is short until the test ends that.
    let policy = "[policy]\\ndictionary = \"auto\"\\ndictionary_pages = 2048\\ndictionary_period = 5\\n[policy.pressure]\\nfile = \"/tmp/pressure\"\\n";
    guest.vm.sh(&format!("printf '{policy}' > /tmp/policy.toml"), SHORT)?;
    guest.vm.sh("echo 'some avg10=99.00' > /tmp/pressure", SHORT)?;
    let serve = "--size 512M --codec zstd --ublk --swap --policy /tmp/policy.toml";
    guest.serve(serve, "page-cluster")?;
    let keys = (guest.available_mib()? + 40) * (1 << 20) / (VALUE + 120);
    guest.redis()?;
    dictionary(&mut guest, keys)
}

/// Trains a dictionary from the memory that redis has swapped out, by a trainer that needs memory
/// in a guest without any, and kills the server meanwhile; then everything is written with the
/// dictionary and read back.
fn dictionary(guest: &mut Guest, keys: u64) -> Result<()> {
    let all = |guest: &mut Guest, what: &str, keys: u64| {
        let command = format!(
            "guest swap redis-{what} /tmp/redis.sock keys={keys} size={VALUE} named=1 | tail -1"
        );
        let said = guest.vm.sh(&command, LONG)?;
        ensure!(said.contains(&format!("ok keys={keys}")), "redis-{what}: {said}");
        Ok(())
    };
    all(guest, "fill", keys)?;
    ensure!(guest.stat("dictionary_rounds")? == 0, "it has trained though memory was short");
    // Stops the first trainer, once it is the OOM killer's first choice.
    guest.background(
        "trainer",
        "sh -c 'while :; do for p in $(pidof platen); do \
         grep -q train /proc/$p/cmdline && grep -q 1000 /proc/$p/oom_score_adj && kill -STOP $p && \
         echo stopped=$p && exit; done; done 2> /dev/null'",
    )?;
    guest.vm.sh("echo 'some avg10=0.00' > /tmp/pressure", SHORT)?;
    guest.wait_for("trainer", "stopped=", SHORT)?;
    let log = guest.log("trainer")?;
    let pid = vm_tests::swap::number(&log, "stopped=").unwrap_or_default();
    let state = guest.vm.sh(&format!("grep State /proc/{pid}/status"), SHORT)?;
    ensure!(state.contains("T (stopped)"), "the trainer was too fast: {state}");
    let took = guest.kill_server()?;
    // It ends with its server; the next server has a trainer of its own.
    guest.vm.sh(&format!("while [ -e /proc/{pid} ]; do sleep 0.1; done"), SHORT)?;
    // The server decides whether a dictionary pays, also by CPU time, which is scarce on a host
    // without KVM.
    let installed = judged(guest)?;
    let gain = guest.stat("dictionary_gain")?;
    all(guest, "fill", keys / 2)?;
    let with = guest.stat("dictionary_pages")?;
    ensure!(!installed || with > 1000, "only {with} pages are swapped out with the dictionary");
    let again = guest.kill_server()?;
    all(guest, "check", keys)?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    ensure!(guest.stat("lost_pages")? == 0, "pages were lost");
    #[expect(clippy::cast_precision_loss, reason = "a percentage")]
    let gain = gain as f64 / 100.0;
    let dictionary = if installed {
        format!("a dictionary that saves {gain:.1} %: {with} pages with it")
    } else {
        "the dictionary did not pay here, and is not used".to_owned()
    };
    println!(
        "  {dictionary}; servers replaced in {took} ms while one was trained, {again} ms later (TCG)"
    );
    Ok(())
}

/// Waits until the server has judged a dictionary; returns whether it uses it.
fn judged(guest: &mut Guest) -> Result<bool> {
    let deadline = Instant::now() + SHORT;
    loop {
        if guest.stat("dictionary_installed")? > 0 {
            return Ok(true);
        }
        if guest.stat("dictionary_no_gain")? > 0 {
            return Ok(false);
        }
        ensure!(Instant::now() < deadline, "no dictionary was judged in {SHORT:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Fills redis with `keys` values, more than fit memory, and reads every value back; returns major
/// faults per second of CPU meanwhile.
fn measure(guest: &mut Guest, name: &str, keys: u64) -> Result<f64> {
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
