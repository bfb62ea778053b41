//! The ublk disk as a disk.

use anyhow::{ensure, Result};
use std::time::Duration;
use vm_tests::swap::{Stage, SHORT};

pub(crate) fn by_ublk(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("disk", 256)?;
    guest.serve("--size 64M --ublk --reserve 8M", "device platen0")?;
    let queue = |name: &str| format!("cat /sys/block/ublkb0/queue/{name}");
    for (name, value) in
        [("logical_block_size", "4096"), ("rotational", "0"), ("write_cache", "write through")]
    {
        let found = guest.vm.sh(&queue(name), SHORT)?;
        ensure!(found == value, "{name} is {found}, not {value}");
    }
    // Writes, reads and discards of all lengths from several threads, all of it compared.
    guest.background("io", "guest swap disk /dev/ublkb0 mib=48 seconds=8 threads=4")?;
    std::thread::sleep(Duration::from_secs(3));
    let first = guest.kill_server()?;
    std::thread::sleep(Duration::from_secs(1));
    let second = guest.kill_server()?;
    let said = guest.finish("io", Duration::from_secs(120))?;
    ensure!(said.contains("ok pages="), "{said}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!("  servers killed under load were replaced in {first} and {second} ms (TCG)");
    // The end takes the disk away.
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", SHORT)?;
    guest.vm.sh("! ls /dev/ublkb0", SHORT).map(drop)
}
