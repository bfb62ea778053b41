//! The ublk disk as a disk.

use anyhow::{ensure, Result};
use vm_tests::swap::{number, Guest, Stage, LONG, SHORT};

pub(crate) fn by_ublk(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("disk", 256)?;
    guest.serve("--size 64M --ublk --reserve 8M", "device platen0")?;
    let queue = |name: &str| format!("cat /sys/block/ublkb0/queue/{name}");
    for (name, value) in
        // The last: how soon a death is noticed that leaves the driver without a pending command.
        [
            ("logical_block_size", "4096"),
            ("rotational", "0"),
            ("write_cache", "write through"),
            ("io_timeout", "2000"),
        ]
    {
        let found = guest.vm.sh(&queue(name), SHORT)?;
        ensure!(found == value, "{name} is {found}, not {value}");
    }
    // Writes, reads and discards of all lengths from several threads, all compared.
    guest.background("io", "guest swap disk /dev/ublkb0 mib=48 seconds=600 threads=4")?;
    let mut took = Vec::new();
    for _ in 0..3 {
        guest.wait_for_stat("pages_written", 1000)?;
        took.push(guest.kill_server()?);
    }
    guest.wait_for_stat("pages_written", 1000)?;
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    let said = guest.finish("io", LONG)?;
    ensure!(said.contains("ok pages="), "{said}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  servers killed under load were replaced in {took:?} ms (TCG)");
    // The server's end removes the disk.
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", SHORT)?;
    guest.vm.sh("! ls /dev/ublkb0", SHORT).map(drop)
}

/// A guest with a ublk disk whose backing device is another platen's disk; stopping that server
/// makes the device stop answering. Returns that server's process id. The disk has 4 MiB of
/// incompressible data, those of `/tmp/noise`.
fn behind_another(stage: &Stage, name: &str) -> Result<(Guest, String)> {
    let mut guest = stage.boot(name, 256)?;
    guest.background(
        "back",
        "platen device serve --name back --run-dir /run/back --size 32M --ublk --reserve 8M --no-supervisor",
    )?;
    guest.wait_for("back", "device back", SHORT)?;
    let pid = guest.vm.sh("pidof platen", SHORT)?;
    let section = "[policy]\\nbacking_dev = \"/dev/ublkb0\"\\nperiod = 3600\\ncpu = 100\\n";
    guest.vm.sh(&format!("printf '{section}' > /tmp/policy.toml"), SHORT)?;
    let arguments = "--size 32M --ublk --reserve 8M --policy /tmp/policy.toml";
    guest.serve(arguments, "device platen0")?;
    guest.wait_for_stat("passes", 0)?;
    guest.vm.sh(
        "head -c 4194304 /dev/urandom > /tmp/noise && cat /tmp/noise > /dev/ublkb1 && sync",
        SHORT,
    )?;
    guest.vm.sh("echo 3 > /proc/sys/vm/drop_caches", SHORT)?;
    Ok((guest, pid))
}

/// Has pages written back, as soon as the policy answers and the device is known; returns the
/// output.
fn write_back(guest: &mut Guest, what: &str) -> Result<String> {
    // The policy starts a moment after the device, and a new server first reads the disk's header.
    let asked = format!("until platen device writeback platen0 {what}; do sleep 0.1; done");
    let said = guest.vm.sh(&asked, SHORT)?;
    Ok(said.lines().last().unwrap_or_default().to_owned())
}

pub(crate) fn hung_backing(stage: &Stage) -> Result<()> {
    let (mut guest, pid) = behind_another(stage, "hung")?;
    let said = write_back(&mut guest, "huge")?;
    ensure!(said.starts_with("1024 pages written back"), "{said}");

    guest.vm.sh(&format!("kill -STOP {pid}"), SHORT)?;
    guest.background("read", "cmp -n 4194304 /dev/ublkb1 /tmp/noise")?;
    guest.wait_for_stat("bd_reads", 1)?;
    // It waits for a disk, and so does its successor; neither is waited for.
    let took = guest.kill_server()?;
    guest.wait_for_stat("bd_reads", 1)?;
    let again = guest.kill_server()?;
    ensure!(!guest.log("read")?.contains("status"), "it was read from a disk that is stopped");
    guest.vm.sh(&format!("kill -CONT {pid}"), SHORT)?;
    guest.finish("read", SHORT)?;
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  servers that wait for a disk were replaced in {took} and {again} ms (TCG)");
    Ok(())
}

/// The same during a write, which the disk completes after all when its server is long gone.
pub(crate) fn hung_in_a_write(stage: &Stage) -> Result<()> {
    let (mut guest, pid) = behind_another(stage, "hung-write")?;
    // The policy runs, and finds no page that has been idle for so long.
    write_back(&mut guest, "idle")?;
    guest.vm.sh(&format!("kill -STOP {pid}"), SHORT)?;
    guest.background("hung", "platen device writeback platen0 huge")?;
    let on_the_way = "for i in $(seq 600); do set -- $(cat /sys/block/ublkb0/inflight); \
                      [ $2 -gt 0 ] && break; sleep 0.1; done; echo writes=$2";
    let said = guest.vm.sh(on_the_way, SHORT)?;
    ensure!(number(&said, "writes=").is_some_and(|writes| writes > 0), "{said}");
    let took = guest.kill_server()?;
    let doubtful = guest.stat("bd_doubtful")?;
    ensure!(doubtful > 0 && guest.stat("bd_count")? == 0, "{doubtful} doubtful blocks");
    // All of it is in memory, and is read and written while the disk does not answer.
    guest.vm.sh("cmp -n 4194304 /dev/ublkb1 /tmp/noise", SHORT)?;
    guest.vm.sh(
        "head -c 1048576 /dev/urandom > /tmp/other && for to in /dev/ublkb1 /tmp/noise; \
         do dd if=/tmp/other of=$to bs=4096 conv=notrunc,fsync; done",
        SHORT,
    )?;
    let again = guest.kill_server()?;
    guest.vm.sh(&format!("kill -CONT {pid}"), SHORT)?;
    // The first server's pending write arrives; the third server writes to other blocks.
    let said = write_back(&mut guest, "huge")?;
    ensure!(said.starts_with("1024 pages written back"), "{said}");
    guest.vm.sh("echo 3 > /proc/sys/vm/drop_caches", SHORT)?;
    guest.vm.sh("cmp -n 4194304 /dev/ublkb1 /tmp/noise", SHORT)?;
    ensure!(guest.stat("bd_reads")? > 0, "nothing was read from the disk");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    ensure!(guest.stat("bd_doubtful")? == doubtful, "blocks are used that may yet be written");
    println!(
        "  servers that write to a disk were replaced in {took} and {again} ms (TCG), {doubtful} blocks kept out of use"
    );
    Ok(())
}
