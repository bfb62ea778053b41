//! Replaces a live server while the guest uses its disk: by another program, and with other
//! settings.

use anyhow::{ensure, Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use vm_tests::swap::{number, Guest, Stage, LONG, SHORT};

/// The first commit that can hand a device over.
const FIRST: &str = "839de6a2a713657fca28b204fee16433b5a7a2b8";

/// A copy of the program: the same version in another file.
const ANOTHER: &str = "/tmp/another";

pub(crate) fn by_ublk(stage: &Stage) -> Result<()> {
    let guest = stage.boot("renew-ublk", 320)?;
    under_pressure(guest, "platen", "--ublk")
}

pub(crate) fn by_nbd(stage: &Stage) -> Result<()> {
    let guest = stage.boot("renew-nbd", 320)?;
    under_pressure(guest, "platen", "--nbd unix:/run/platen.nbd")
}

/// Hands over from the first commit that can to this one, and by NBD not back.
pub(crate) fn from_an_earlier_commit(_: &Stage) -> Result<()> {
    let stage = Stage::with(&[(&earlier()?, "earlier")])?;
    under_pressure(stage.boot("renew-earlier", 320)?, "earlier", "--ublk")?;
    // In the same scenario: two would build the program at once.
    is_refused(stage.boot("renew-back", 320)?, "earlier")
}

/// An earlier program, whose server does not understand what it inherits, gets no device, and the
/// present server continues. (One that understands it and does not give the kernel's NBD client the
/// disk's name: `platen/device/renewal/names`.)
fn is_refused(mut guest: Guest, next: &str) -> Result<()> {
    guest.serve("--size 512M --nbd unix:/run/platen.nbd --swap", "page-cluster")?;
    guest.check()?;
    // There is memory for another server: a lack of it is another reason.
    guest.eat("eat", "mib=64 after=/tmp/go until=/tmp/enough")?;
    guest.push_out("eat", 32)?;
    let swapped = guest.swapped_kib()?;
    ensure!(swapped > 8 << 10, "only {swapped} KiB are swapped out");
    let before = (guest.stat("pid")?, guest.stat("generation")?);
    let (status, said) = guest.vm.try_sh(&format!("{next} device upgrade platen0"), LONG)?;
    let after = (guest.stat("pid")?, guest.stat("generation")?);
    ensure!(status != 0 && after == before, "status {status}, {before:?}, {after:?}: {said}");
    ensure!(said.contains("refused") && !said.contains("MemAvailable"), "{said}");
    println!("  refused: {}", said.trim());
    guest.check()?;
    guest.vm.sh("touch /tmp/go /tmp/enough", SHORT)?;
    let log = guest.finish("eat", LONG)?;
    ensure!(log.contains("ok pages="), "{log}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG)?;
    ensure!(guest.vm.sh("cat /proc/swaps", SHORT)?.lines().count() == 1, "it is still swapped to");
    Ok(())
}

/// Builds the program of an earlier commit, once.
fn earlier() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = root.join("target/previous");
    let built = folder.join(format!("platen-{FIRST}"));
    if built.exists() {
        return Ok(built);
    }
    let source = folder.join(FIRST);
    std::fs::create_dir_all(&source)?;
    let archive = folder.join("archive.tar");
    let run = |command: &mut Command| -> Result<()> {
        let status = command.status().with_context(|| format!("{command:?}"))?;
        ensure!(status.success(), "{command:?} ended with {status}");
        Ok(())
    };
    run(Command::new("git").current_dir(&root).args(["archive", "-o"]).arg(&archive).arg(FIRST))?;
    run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&source))?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target = folder.join("target");
    let mut build = Command::new(cargo);
    build.current_dir(&source).args(["build", "--locked", "-p", "platen", "--target-dir"]);
    build.arg(&target);
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    if profile == "release" {
        build.arg("--release");
    }
    run(&mut build)?;
    std::fs::copy(target.join(profile).join("platen"), &built)?;
    Ok(built)
}

/// `first` serves; `/bin/platen` or a copy of it takes over.
fn under_pressure(mut guest: Guest, first: &str, way: &str) -> Result<()> {
    let next = if first == "platen" { ANOTHER } else { "/bin/platen" };
    if next == ANOTHER {
        guest.vm.sh(&format!("cp /bin/platen {ANOTHER}"), SHORT)?;
    }
    guest.background("serve", &format!("{first} device serve --size 512M {way} --swap"))?;
    guest.wait_for("serve", "page-cluster", SHORT)?;
    guest.check()?;
    let eat = guest.available_mib()? + 60;
    guest.background("eat", &format!("guest swap eat mib={eat} seconds=20 until=/tmp/enough"))?;
    guest.wait_for("eat", "filled pages", LONG)?;
    let supervisor = guest
        .vm
        .sh("cat /proc/$(pidof platen earlier | tr ' ' '\\n' | sort -n | head -1)/stat", SHORT)?;
    let supervisor = supervisor.split(' ').next().unwrap_or_default().to_owned();
    let program =
        |guest: &mut Guest| guest.vm.sh(&format!("readlink /proc/{supervisor}/exe"), SHORT);
    let before = (program(&mut guest)?, guest.stat("generation")?);
    let took = timed(&mut guest, &format!("{next} device upgrade platen0"))?;
    ensure!(guest.stat("generation")? == before.1 + 1, "{}", guest.log("serve")?);
    let now = program(&mut guest)?;
    ensure!(now == next && before.0 != now, "the supervisor was {} and is {now}", before.0);
    // The new processes have all precautions, and a new stand-by server runs.
    let checked = guest.check()?;
    let set =
        timed(&mut guest, &format!("{next} device set platen0 --codec lz4 --mem-limit 300M"))?;
    ensure!(guest.stat("mem_limit")? == 300 << 20, "the limit is another");
    ensure!(guest.check()? != checked, "the same processes before and after");
    if way != "--ublk" {
        let larger = format!("{next} device set platen0 --size 1G");
        let (status, said) = guest.vm.try_sh(&larger, SHORT)?;
        ensure!(status == 1 && said.contains("of an NBD disk while its size"), "{said}");
    }
    let replaced = guest.kill_server()?;
    ensure!(guest.stat("mem_limit")? == 300 << 20, "the limit is another after a death");
    guest.vm.sh("platen device stat --json | grep -q '\"codec\": \"lz4\"'", SHORT)?;
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    let log = guest.finish("eat", LONG)?;
    ensure!(log.contains("ok pages="), "{log}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    println!(
        "  {eat} MiB; upgraded in {took} ms, set in {set} ms, a server replaced in {replaced} ms \
         under pressure (TCG)"
    );
    guest.vm.sh(&format!("kill -TERM {supervisor}"), SHORT)?;
    guest.finish("serve", LONG)?;
    ensure!(guest.vm.sh("cat /proc/swaps", SHORT)?.lines().count() == 1, "it is still swapped to");
    Ok(())
}

/// A ublk disk that is swapped to grows with Linux 6.16 or later, under pressure, and keeps its
/// size when its server is killed. An older kernel's disk stays as it is.
pub(crate) fn grows(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("grows", 320)?;
    guest.serve("--size 96M --ublk --swap", "page-cluster")?;
    guest.check()?;
    // Little memory and little swap are free: a second server of the program needs no more.
    let eat = guest.available_mib()? + 60;
    guest.background("eat", &format!("guest swap eat mib={eat} until=/tmp/enough"))?;
    guest.wait_for("eat", "filled pages", LONG)?;
    let before = (guest.stat("generation")?, guest.stat("disksize")?);
    let (status, said) = guest.vm.try_sh("platen device set platen0 --size 512M", LONG)?;
    let kernel = guest.vm.sh("uname -r", SHORT)?;
    let after = (guest.stat("generation")?, guest.stat("disksize")?);
    if older_than(&kernel, (6, 16)) {
        ensure!(status == 1 && said.contains("Linux 6.16 or later"), "{status}: {said}");
        ensure!(after == before, "{after:?} after a refusal, {before:?} before");
    } else {
        ensure!(status == 0, "{said}: {}", guest.log("serve")?);
        ensure!(after == (before.0 + 1, 512 << 20), "{after:?} after {before:?}");
        // The areas' headers take a page each.
        let size = guest.vm.sh("awk 'NR > 1 {sum += $3} END {print sum}' /proc/swaps", SHORT)?;
        ensure!(size.trim().parse::<u64>()? > 511 << 10, "swap of {size} KiB");
        guest.background("more", "guest swap eat mib=100 seed=3 until=/tmp/enough")?;
        guest.wait_for("more", "filled pages", LONG)?;
        let used = guest.swapped_kib()?;
        ensure!(used > 96 << 10, "only {used} KiB are swapped out");
        let took = guest.kill_server()?;
        ensure!(guest.stat("disksize")? == 512 << 20, "another size after a death");
        println!("  {used} KiB swapped to a disk that had 98304, a server replaced in {took} ms");
    }
    guest.check()?;
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    for name in ["eat", "more"].into_iter().take(1 + usize::from(after != before)) {
        let log = guest.finish(name, LONG)?;
        ensure!(log.contains("ok pages="), "{log}");
    }
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    guest.vm.sh("kill -TERM $(pidof platen)", SHORT)?;
    guest.finish("serve", LONG)?;
    ensure!(guest.vm.sh("cat /proc/swaps", SHORT)?.lines().count() == 1, "it is still swapped to");
    Ok(())
}

/// Whether a kernel's release is older than this version.
fn older_than(release: &str, version: (u32, u32)) -> bool {
    let mut numbers = release.split(['.', '-', '+']).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < version
}

/// Runs a command; returns its duration in milliseconds of the guest's clock.
fn timed(guest: &mut Guest, command: &str) -> Result<u64> {
    let script = format!(
        "now() {{ cut -d' ' -f1 /proc/uptime | tr -d .; }}; begin=$(now); {command} || exit 1; \
         echo took=$((($(now) - begin) * 10))"
    );
    let said = guest.vm.sh(&script, LONG)?;
    number(&said, "took=").with_context(|| said.clone())
}

/// Kills the supervisor at each step of a hand-over: a server continues without it, and exits on
/// SIGTERM.
pub(crate) fn supervisor_killed(stage: &Stage) -> Result<()> {
    let mut guest = stage.boot("renew-killed", 320)?;
    guest.vm.sh(&format!("cp /bin/platen {ANOTHER}"), SHORT)?;
    // A release build has no steps to be killed at, so a timer kills it.
    let debug =
        ["successor started", "stands by", "adopting", "before go", "told to go", "server killed"];
    let release = ["0.005", "0.02", "0.05", "0.1", "0.2", "0.4"];
    for at in if cfg!(debug_assertions) { debug } else { release } {
        let supervisor = killed_at(&mut guest, at).with_context(|| format!("killed at {at:?}"))?;
        println!("  killed at {at:?}: process {supervisor} serves alone");
    }
    Ok(())
}

fn killed_at(guest: &mut Guest, at: &str) -> Result<u64> {
    guest.vm.sh("rm -f /tmp/enough /tmp/killed", SHORT)?;
    let serve = "platen device serve --size 64M --ublk --reserve 8M";
    let step = format!("PLATEN_KILL_AT='{at}:/tmp/killed'");
    guest.background("serve", &format!("env {step} {serve}"))?;
    guest.wait_for("serve", "device platen0", SHORT)?;
    guest.background("io", "guest swap disk /dev/ublkb0 mib=32 seconds=600 threads=2")?;
    guest.wait_for_stat("pages_written", 200)?;
    // Its process stays the same when it becomes the other program.
    let supervisor =
        "ps -o pid,ppid,args | awk '$3 == \"platen\" && /device serve/ && !/inherited/ {print \"pid=\" $1}'";
    let said = guest.vm.sh(supervisor, SHORT)?;
    let supervisor = number(&said, "pid=").with_context(|| format!("no supervisor: {said}"))?;
    let later = match cfg!(debug_assertions) {
        true => String::new(),
        false => format!("(sleep {at}; touch /tmp/killed; kill -9 {supervisor}) & "),
    };
    // The upgrade may have finished by then, or have no answer.
    guest.vm.try_sh(&format!("{later}{ANOTHER} device upgrade platen0; wait"), LONG)?;
    guest.vm.sh("test -e /tmp/killed", SHORT).context("nothing was killed")?;
    guest.wait_for("serve", "status ", SHORT)?;
    let written = guest.stat("pages_written")?;
    guest.wait_for_stat("pages_written", written + 200)?;
    // One server remains; stand-by servers have exited.
    let alone =
        "for i in $(seq 600); do [ $(ps -o args | grep -c '[d]evice serve') = 1 ] && exit 0; \
                 sleep 0.1; done; ps -o pid,ppid,args; exit 1";
    guest.vm.sh(alone, SHORT)?;
    guest.vm.sh("touch /tmp/enough", SHORT)?;
    let said = guest.finish("io", LONG)?;
    ensure!(said.contains("ok pages="), "{said}");
    ensure!(guest.stat("failed_reads")? == 0, "reads have failed");
    let pid = guest.stat("pid")?;
    guest.vm.sh(&format!("kill -TERM {pid}"), SHORT)?;
    // Its lock on the name ends with the process, after the disk and the sockets.
    let gone = "for i in $(seq 600); do ls /dev/ublkb0 /run/platen/* 2> /dev/null || \
                ps -o args | grep -q '[d]evice serve' || exit 0; sleep 0.1; done; exit 1";
    guest.vm.sh(gone, SHORT).context("the server does not end")?;
    Ok(pid)
}
