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
