//! A program with more memory than the guest has, and faults meanwhile.

use anyhow::{ensure, Context, Result};
use std::time::{Duration, Instant};
use vm_tests::swap::{Guest, Stage, LONG, SHORT};

/// Private memory, in bytes, that a server may take beyond what it has prepared: pages that the
/// kernel copies when they are first written.
const SLACK: u64 = 128 << 10;
/// Slots that the kernel discards at once, at most.
const CLUSTER: u64 = 512;

pub(crate) fn by_ublk(stage: &Stage) -> Result<()> {
    let guest = stage.boot("swap-ublk", memory_mib())?;
    pressed(guest, "--size 512M --ublk --swap --policy /tmp/policy.toml", soak_seconds(60))
}

pub(crate) fn by_nbd(stage: &Stage) -> Result<()> {
    let guest = stage.boot("swap-nbd", memory_mib())?;
    pressed(
        guest,
        "--size 512M --nbd unix:/run/platen.nbd --swap --policy /tmp/policy.toml",
        soak_seconds(10),
    )
}

fn pressed(mut guest: Guest, arguments: &str, seconds: u64) -> Result<()> {
    // Pages are idle after a second or two, so that groups are made, left and freed all the time.
    // At a lower level than the default, because TCG is slow.
    let policy = "[policy]\\nperiod = 1\\nidle = 1\\nlevel = 3\\ncpu = 50\\ncpu_pressed = 50\\n";
    guest.vm.sh(&format!("printf '{policy}' > /tmp/policy.toml"), SHORT)?;
    // An error that takes a backtrace aborts a program without tables for unwinding.
    let wrong = "RUST_BACKTRACE=1 platen device serve --size 1 --ublk";
    let (status, said) = guest.vm.try_sh(wrong, SHORT)?;
    ensure!(status == 1 && said.contains("no whole number of pages"), "{status}: {said}");
    guest.serve(arguments, "page-cluster")?;
    if arguments.contains("--nbd") {
        reads_fit(&mut guest)?;
    }
    let first = guest.check()?;
    // The kernel's ublk driver is what it is.
    let advice = first.lines().find(|it| it.starts_with("advice ") && !it.contains("ublk-driver"));
    ensure!(advice.is_none(), "{first}");
    let eat = guest.available_mib()? + beyond_mib();
    guest.background(
        "eat",
        &format!("guest swap eat mib={eat} seconds={seconds} until=/tmp/enough"),
    )?;
    guest.wait_for("eat", "filled pages", LONG)?;
    guest.wait_for_swapped_out(10_000)?;
    // Idle pages are in groups, and groups are being made, when the server dies; and again after
    // its replacement.
    guest.wait_for_stat("groups_made", 1)?;
    let prepared = guest.stat("stand_by")?;
    let took = guest.kill_server()?;
    guest.wait_for_stat("groups_made", 1)?;
    // It has worked with the memory that it had prepared as a stand-by server.
    let server = guest.stat("server")?;
    ensure!(server <= prepared + SLACK, "private memory: {prepared} prepared, {server} now");
    // The stand-by server has taken the same precautions, and so has the next one.
    let second = guest.check()?;
    ensure!(second != first, "the same processes before and after: {second}");
    freed(&mut guest, LONG + Duration::from_secs(seconds))?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  {eat} MiB, a server replaced in {took} ms under pressure (TCG)");

    // swapoff, which brings everything back, and swapon. The kernel kills a swapoff that lacks
    // memory, so there is some.
    guest.wait_for_memory(24 + 16)?;
    guest.eat("again", "mib=24 after=/tmp/again until=/tmp/off")?;
    guest.push_out("again", 16)?;
    let swapped = guest.swapped_kib()?;
    ensure!(swapped > 8 << 10, "only {swapped} KiB are swapped out");
    // Pages that come back one by one leave their groups.
    guest.wait_for_stat("grouped_pages", 1024)?;
    guest.vm.sh("touch /tmp/again", SHORT)?;
    guest.vm.sh(
        "tail -n +2 /proc/swaps | while read area rest; do \
         swapoff $area && swapon -d $area || exit 1; done && touch /tmp/off",
        LONG,
    )?;
    guest.finish("again", LONG)?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    ensure!(guest.stat("damaged")? == 0, "the policy has found damage");
    replaced_without_a_process(&mut guest)?;
    if arguments.contains("--nbd") {
        none_attaches_it_again(&mut guest)?;
    }

    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG)?;
    ensure!(guest.vm.sh("cat /proc/swaps", SHORT)?.lines().count() == 1, "it is still swapped to");
    Ok(())
}

/// Checks the memory that a device takes beside its store: at most 8 MiB, or 3 % of a machine with
/// more than 256 MiB. A debug build's program takes more.
pub(crate) fn beside_the_store(guest: &mut Guest, memory_mib: u64) -> Result<()> {
    let (mut beside, mut parts) = (0, String::new());
    for part in ["supervisor", "server", "stand_by", "heap", "text", "buffers"] {
        let bytes = guest.stat(part)?;
        beside += bytes;
        parts += &format!(" {part} {}", bytes >> 10);
    }
    let most = if memory_mib > 256 { (memory_mib << 20) * 3 / 100 } else { 8 << 20 };
    println!("  {} KiB beside the store, at most {}:{parts}", beside >> 10, most >> 10);
    let debug = cfg!(debug_assertions) && std::env::var_os("PLATEN_BIN").is_none();
    ensure!(debug || beside <= most, "{} KiB beside the store:{parts}", beside >> 10);
    Ok(())
}

/// The kernel asks for no more at a time than a simple reply may report an error for, wherever the
/// unreadable page is.
fn reads_fit(guest: &mut Guest) -> Result<()> {
    let script = "area=$(tail -n 1 /proc/swaps | cut -d' ' -f1); disk=${area%p*}; \
                  cat /sys/block/${disk##*/}/queue/max_sectors_kb";
    let said = guest.vm.sh(script, SHORT)?;
    let kib: usize = said.trim().parse().with_context(|| format!("max_sectors_kb: {said}"))?;
    ensure!(kib <= 288, "the kernel reads up to {kib} KiB at a time");
    Ok(())
}

/// The helper of another device that has chosen the same disk leaves it alone, and says so by its
/// exit status. A helper that finds another device at its path attaches nothing.
fn none_attaches_it_again(guest: &mut Guest) -> Result<()> {
    let script = |listener: &str| {
        format!(
            "area=$(tail -n 1 /proc/swaps | cut -d' ' -f1); \
             platen device serve --name two --size 1M --no-supervisor --nbd unix:/run/two.nbd & \
             two=$!; until test -S /run/two.nbd; do sleep 0.1; done; \
             platen device swap-helper on --disk ${{area%p*}} --socket /run/two.nbd \
             --listener {listener}; status=$?; kill $two; wait $two; exit $status"
        )
    };
    // `NOT_BEGUN` of crate `swap`.
    let (status, said) = guest.vm.try_sh(&script("$two"), LONG)?;
    ensure!(status == 76 && said.contains("busy"), "{status}: {said}");
    let (status, said) = guest.vm.try_sh(&script("1"), LONG)?;
    ensure!(status == 1 && said.contains("and not 1"), "{status}: {said}");
    Ok(())
}

/// The stand-by server gives the kernel its disk back while no process can be started, as when
/// memory is exhausted.
fn replaced_without_a_process(guest: &mut Guest) -> Result<()> {
    loop {
        let timeouts = guest.timeouts()?;
        let (servers, said) = servers_without_a_process(guest)?;
        ensure!(servers > 0, "not replaced: {said}");
        if servers == 1 {
            return Ok(());
        }
        // Each connection that the kernel gives up on a busy host costs another server.
        ensure!(guest.timeouts()? > timeouts, "replaced {servers} times: {said}");
    }
}

/// How many servers follow one that is killed, and the output.
fn servers_without_a_process(guest: &mut Guest) -> Result<(u64, String)> {
    let (pid, generation) = (guest.stat("pid")?, guest.stat("generation")?);
    let script = format!(
        "disk=$(tail -n 1 /proc/swaps | cut -d' ' -f1); chmod a-x $(command -v platen); \
         kill -KILL {pid}; dd if=$disk of=/dev/null bs=4096 skip=5000 count=1 2>&1; \
         chmod a+x $(command -v platen)"
    );
    let said = guest.vm.sh(&script, LONG)?;
    ensure!(said.contains("1+0 records in"), "{said}");
    // A server that passed the kernel a connection in vain would end within a second or two.
    guest.vm.sh("sleep 4", SHORT)?;
    Ok((guest.stat("generation")? - generation, said))
}

/// The program is told to end and verifies all of its memory: its swapped-out pages are then free,
/// discarded, and no longer stored.
pub(crate) fn freed(guest: &mut Guest, limit: Duration) -> Result<()> {
    let (swapped, stored) = (guest.swapped_kib()? / 4, guest.stat("orig_data_size")? / 4096);
    let (by_kernel, counted) = (discarded(guest)?, guest.stat("notify_free")?);
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    guest.wait_for("eat", "status 0", limit)?;
    let log = guest.finish("eat", SHORT)?;
    ensure!(log.contains("ok pages="), "{log}");
    // The kernel discards a cluster of slots once all of them are free. The pages of other programs
    // decide how many clusters that are.
    let deadline = Instant::now() + SHORT;
    let gone = loop {
        let gone = discarded(guest)? - by_kernel;
        if gone >= 2 * CLUSTER {
            break gone;
        }
        ensure!(Instant::now() < deadline, "{gone} of {swapped} pages are discarded");
        std::thread::sleep(Duration::from_millis(200));
    };
    let free = guest.stat("notify_free")? - counted;
    ensure!(free >= gone, "the kernel has discarded {gone} pages, and the device freed {free}");
    let left = guest.stat("orig_data_size")? / 4096;
    ensure!(left + CLUSTER < stored, "{stored} pages were stored, {left} are, {gone} are gone");
    println!(
        "  {swapped} pages out, {stored} stored; {gone} discarded and {left} stored once their \
         owner had ended"
    );
    Ok(())
}

/// Pages that the kernel has discarded on the swap device since its boot.
fn discarded(guest: &mut Guest) -> Result<u64> {
    // The areas are the disk's partitions.
    let script = "area=$(tail -n 1 /proc/swaps | cut -d' ' -f1); disk=${area%p*}; \
                  set -- $(cat /sys/block/${disk##*/}/stat); echo ${14}";
    let said = guest.vm.sh(script, SHORT)?;
    let sectors: u64 = said.trim().parse().with_context(|| format!("discarded sectors: {said}"))?;
    Ok(sectors / 8)
}

/// Replaces the server twice within the memory that its successor had prepared, and has the program
/// verify its memory. Returns the durations in ms.
pub(crate) fn replaced_twice(guest: &mut Guest, limit: Duration) -> Result<Vec<u64>> {
    let mut took = Vec::new();
    for _ in 0..2 {
        // There is a stand-by server, which has its memory and has mapped the store.
        guest.check()?;
        let (prepared, heap) = (guest.stat("stand_by")?, guest.stat("heap")?);
        took.push(guest.kill_server()?);
        let (server, now) = (guest.stat("server")?, guest.stat("heap")?);
        ensure!(server <= prepared + SLACK, "private memory: {prepared} prepared, {server} now");
        ensure!(now <= heap, "heap: {heap} prepared, {now} now");
    }
    freed(guest, limit)?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    Ok(took)
}

/// With the kernel's default settings: [`pressed`] must not depend on the advised ones.
fn untuned(mut guest: Guest, way: &str) -> Result<()> {
    guest.serve(&format!("--size 512M {way} --swap"), "page-cluster")?;
    guest.check()?;
    let eat = guest.available_mib()? + 100;
    guest.background("eat", &format!("guest swap eat mib={eat} seconds=10 until=/tmp/enough"))?;
    guest.wait_for("eat", "filled pages", LONG)?;
    guest.wait_for_swapped_out(10_000)?;
    beside_the_store(&mut guest, 256)?;
    let took = guest.kill_server()?;
    guest.check()?;
    beside_the_store(&mut guest, 256)?;
    freed(&mut guest, LONG)?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  {eat} MiB, a server replaced in {took} ms under pressure (TCG)");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG)?;
    ensure!(guest.vm.sh("cat /proc/swaps", SHORT)?.lines().count() == 1, "it is still swapped to");
    Ok(())
}

pub(crate) fn untuned_by_ublk(stage: &Stage) -> Result<()> {
    untuned(stage.boot_untuned("untuned-ublk", 256)?, "--ublk")
}

pub(crate) fn untuned_by_nbd(stage: &Stage) -> Result<()> {
    untuned(stage.boot_untuned("untuned-nbd", 256)?, "--nbd unix:/run/platen.nbd")
}

/// A server with as many threads as on a large host, each with contexts of lz4: its stand-by server
/// has all that it needs before memory is exhausted, and so has the one after it.
pub(crate) fn many_threads(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot_with_cpus("threads", 384, 8)?;
    // A machine of this size has fewer by default.
    let threads = "--queues 8 --workers 7";
    guest.serve(&format!("--size 768M --codec lz4 --ublk --swap {threads}"), "page-cluster")?;
    guest.check()?;
    let eat = guest.available_mib()? + 60;
    guest.background("eat", &format!("guest swap eat mib={eat} seconds=10 until=/tmp/enough"))?;
    guest.wait_for("eat", "filled pages", LONG)?;
    guest.wait_for_swapped_out(10_000)?;
    let took = replaced_twice(&mut guest, LONG)?;
    println!("  {eat} MiB, servers of 15 threads replaced in {took:?} ms under pressure (TCG)");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG).map(drop)
}

pub(crate) fn stopped_by_ublk(stage: &Stage) -> Result<()> {
    stopped(stage.boot("stopped-ublk", 256)?, "--ublk")
}

pub(crate) fn stopped_by_nbd(stage: &Stage) -> Result<()> {
    stopped(stage.boot("stopped-nbd", 256)?, "--nbd unix:/run/platen.nbd")
}

/// A server that hangs, while memory is full and read: the supervisor detects it, and every page is
/// right.
fn stopped(mut guest: Guest, way: &str) -> Result<()> {
    guest.serve(&format!("--size 512M {way} --swap"), "page-cluster")?;
    let eat = guest.available_mib()? + 60;
    guest.background("eat", &format!("guest swap eat mib={eat} seconds=5 until=/tmp/enough"))?;
    guest.wait_for("eat", "filled pages", LONG)?;
    let took = [guest.stop_server()?, guest.stop_server()?];
    // Each was replaced because the supervisor has looked at it so often.
    let log = guest.log("serve")?;
    let looks = log.matches("the server hangs: it has been stopped (SIGSTOP) for 5 s: killed");
    ensure!(looks.count() == 2, "{log}");
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    let log = guest.finish("eat", LONG)?;
    ensure!(log.contains("ok pages="), "{log}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!(
        "  {eat} MiB, stopped servers replaced in {took:?} ms under pressure (TCG; goal 10 s)"
    );
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG).map(drop)
}

pub(crate) fn written_back_by_ublk(stage: &Stage) -> Result<()> {
    written_back(stage.boot_with_disk("back-ublk", memory_mib(), 160)?, "--ublk")
}

pub(crate) fn written_back_by_nbd(stage: &Stage) -> Result<()> {
    written_back(stage.boot_with_disk("back-nbd", 256, 160)?, "--nbd unix:/run/platen.nbd")
}

/// Ages of a second: pages that the program does not touch for two go to the disk.
fn written_back(mut guest: Guest, way: &str) -> Result<()> {
    let keys = "backing_dev = \"/dev/vda\"\\nperiod = 1\\ncpu = 50\\nlevel = 3\\nwriteback_pressed_only = false\\n\
                idle = 7\\nidle_pressed = 7\\nwriteback_limit = 4000\\nwriteback_huge_idle = 1\\nwriteback_idle = 2\\nwriteback_idle_pressed = 2\\n";
    guest.vm.sh(&format!("printf '[policy]\\n{keys}' > /tmp/policy.toml"), SHORT)?;
    let arguments = format!("--size 512M {way} --swap --policy /tmp/policy.toml");
    // Another user's disk: first in use, then not in use but not empty.
    guest.vm.sh("mkswap /dev/vda && swapon /dev/vda", SHORT)?;
    let refused = format!("platen device serve {arguments}");
    let (status, said) = guest.vm.try_sh(&refused, SHORT)?;
    ensure!(status == 1 && said.contains("mounted, swapped to"), "{status}: {said}");
    guest.vm.sh("swapoff /dev/vda", SHORT)?;
    let (status, said) = guest.vm.try_sh(&refused, SHORT)?;
    ensure!(status == 1 && said.contains("its block 0 has data"), "{status}: {said}");
    guest.vm.sh("dd if=/dev/zero of=/dev/vda bs=4096 count=1", SHORT)?;

    guest.serve(&arguments, "page-cluster")?;
    guest.check()?;
    let eat = guest.available_mib()? + beyond_mib().min(30);
    let eater = format!("guest swap eat mib={eat} after=/tmp/go until=/tmp/enough");
    guest.background("eat", &eater)?;
    guest.wait_for("eat", "filled pages", LONG)?;
    guest.wait_for_stat("bd_count", 2000)?;
    guest.vm.sh("touch /tmp/go", SHORT)?;
    // Pages are written back and being read when it dies.
    guest.wait_for_stat("bd_reads", 20)?;
    let took = guest.kill_server()?;
    guest.wait_for_stat("bd_reads", 100)?;
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    let log = guest.finish("eat", LONG)?;
    ensure!(log.contains("ok pages="), "{log}");
    let (reads, writes) = (guest.stat("bd_reads")?, guest.stat("bd_writes")?);
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  {eat} MiB, {writes} blocks written and {reads} read since a server was replaced in {took} ms (TCG)");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG)?;
    ensure!(guest.vm.sh("cat /proc/swaps", SHORT)?.lines().count() == 1, "it is still swapped to");
    Ok(())
}

/// Memory of a guest, in MiB.
fn memory_mib() -> u64 {
    let given = std::env::var("PLATEN_SWAP_MEMORY").ok().and_then(|mib| mib.parse().ok());
    given.unwrap_or(256)
}

/// How much more a program has than the guest's memory, in MiB.
fn beyond_mib() -> u64 {
    let given = std::env::var("PLATEN_SWAP_BEYOND").ok().and_then(|mib| mib.parse().ok());
    given.unwrap_or(100)
}

/// How long memory is churned: as requested, or the default.
fn soak_seconds(usual: u64) -> u64 {
    let given = std::env::var("PLATEN_SWAP_SOAK").ok().and_then(|seconds| seconds.parse().ok());
    given.unwrap_or(usual)
}
