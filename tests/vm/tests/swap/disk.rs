//! The ublk disk as a disk.

use anyhow::{ensure, Result};
use vm_tests::swap::{Stage, LONG, SHORT};

pub(crate) fn by_ublk(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("disk", 256)?;
    guest.serve("--size 64M --ublk --reserve 8M", "device platen0")?;
    let queue = |name: &str| format!("cat /sys/block/ublkb0/queue/{name}");
    for (name, value) in
        // The last: how soon a death is seen that leaves the driver without a command.
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
    // Writes, reads and discards of all lengths from several threads, all of it compared.
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
    // The end takes the disk away.
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", SHORT)?;
    guest.vm.sh("! ls /dev/ublkb0", SHORT).map(drop)
}

/// A disk of another platen's stands for one that does not answer: that one is stopped.
pub(crate) fn hung_backing(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("hung", 256)?;
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
    // The policy begins a moment after the device.
    let asked =
        "for i in $(seq 300); do platen device writeback platen0 huge && break; sleep 0.1; done";
    let said = guest.vm.sh(asked, SHORT)?;
    let said = said.lines().last().unwrap_or_default();
    ensure!(said.starts_with("1024 pages written back"), "{said}");

    guest.vm.sh(&format!("kill -STOP {pid}"), SHORT)?;
    guest.background("read", "cmp -n 4194304 /dev/ublkb1 /tmp/noise")?;
    guest.wait_for_stat("bd_reads", 1)?;
    // It waits for a disk, and so does who comes after it; neither is waited for.
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
