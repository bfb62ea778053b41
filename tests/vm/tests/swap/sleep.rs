//! Freezing processes freezes the swap server too: sleep of the machine, and a frozen cgroup.

use anyhow::{ensure, Result};
use vm_tests::swap::{Guest, Stage, LONG, SHORT};

/// Puts the machine to sleep while it swaps, and freezes and thaws the cgroup. Without the
/// precaution the kernel freezes the server, swaps out to make room for its image, and waits for
/// ever.
pub(crate) fn sleep(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("sleep", 256)?;
    // `pm_test` ends a sleep once processes are frozen and memory for an image is allocated.
    guest.vm.sh("echo freezer > /sys/power/pm_test", SHORT)?;
    let ways = guest.vm.sh("cat /sys/power/disk", SHORT)?;
    ensure!(!ways.contains("[disabled]"), "this guest cannot hibernate by itself: {ways}");
    guest.serve("--size 512M --ublk --swap", "page-cluster")?;
    let checked = guest.check()?;
    ensure!(checked.contains("the host does not hibernate"), "{checked}");
    let eat = guest.available_mib()? + 20;
    guest
        .background("eat", &format!("guest swap eat mib={eat} after=/tmp/go until=/tmp/enough"))?;
    guest.wait_for("eat", "filled pages", LONG)?;

    refused(&mut guest)?;
    guest.kill_server()?;
    refused(&mut guest)?;
    // The kernel frees no memory to suspend. It cannot freeze a program that waits for a page, and
    // then gives up.
    let (status, said) = guest.vm.try_sh("echo mem > /sys/power/state", LONG)?;
    ensure!(status == 0 || said.contains("resource busy"), "{status}: {said}");
    println!("  suspended with status {status} {}", said.trim());
    // A thawed server serves again; its supervisor, frozen with it, must not count that as a hang.
    // The shell that thaws it has all it needs in memory.
    let generation = guest.stat("generation")?;
    let group = "/sys/fs/cgroup/platen-*/cgroup.freeze";
    guest.vm.sh(
        &format!("for file in {group}; do echo 1 > $file; sleep 15; echo 0 > $file; done"),
        LONG,
    )?;
    ensure!(guest.stat("generation")? == generation, "{}", guest.log("serve")?);
    guest.vm.sh("touch /tmp/go; touch /tmp/enough", SHORT)?;
    let log = guest.finish("eat", LONG)?;
    ensure!(log.contains("ok pages="), "{log}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");

    // A server without a supervisor prevents hibernation too.
    let pid = guest.stat("pid")?;
    guest.vm.sh(&format!("kill -9 $(cut -d' ' -f4 /proc/{pid}/stat)"), SHORT)?;
    guest.wait_for("serve", "status ", SHORT)?;
    refused(&mut guest)?;
    let off = "tail -n +2 /proc/swaps | while read area rest; do swapoff $area || exit 1; done";
    guest.vm.sh(&format!("{off} && kill -TERM {pid}"), LONG)?;
    let gone = "for i in $(seq 600); do grep -q disabled /sys/power/disk || exit 0; sleep 0.1; \
                done; exit 1";
    guest.vm.sh(gone, SHORT).map(drop)
}

fn refused(guest: &mut Guest) -> Result<()> {
    let ways = guest.vm.sh("cat /sys/power/disk", SHORT)?;
    ensure!(ways.trim() == "[disabled]", "{ways}");
    let (status, said) = guest.vm.try_sh("echo disk > /sys/power/state", LONG)?;
    ensure!(status == 1 && said.contains("not permitted"), "{status}: {said}");
    Ok(())
}
