//! Migrations with their disks, which QEMU copies by NBD: `virsh migrate --copy-storage-all`.

use anyhow::{ensure, Context, Result};
use libvirt_tests::{DiskGuest, Lab, Migration, Side};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of the disk in the scenarios, and of what is on it.
const SIZE: u64 = 256 << 20;
const FILLED: usize = 48 << 20;
/// Bytes of the disk after which its copy is in its middle.
const MIDDLE: u64 = 12 << 20;
/// MiB a second: slow enough for something to happen while the disk is copied.
const SLOW: [&str; 2] = ["--bandwidth", "8"];
/// The limit of what only a hang takes.
const PATIENCE: Duration = Duration::from_secs(400);

/// Half text, half bytes that do not compress.
fn content(len: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match bytes.len() / 65536 % 2 {
            0 => bytes.extend(format!("line {} of a file\n", state % 1000).bytes()),
            _ => bytes.extend(state.to_le_bytes()),
        }
    }
    bytes.truncate(len);
    bytes
}

/// The guest migrates with its disk there and back, and everything of it goes by platen.
pub(crate) fn there_and_back(lab: &mut Lab) -> Result<()> {
    let filled = FILLED / 2;
    // The libvirts that `make proof` has beside Debian's may make the copy without holes.
    let newer = std::env::var_os("PLATEN_LIBVIRT").is_some();
    let alone = if newer { allocated_alone(lab, filled)? } else { 0 };
    let most = (SIZE / 2).max(alone + SIZE / 8);
    let mut guest = DiskGuest::boot(lab, lab.at, SIZE, content(filled), false)?;
    let sockets = [lab.by_socket(1), lab.by_socket(2)].concat();
    let mut by_sockets: Vec<&str> = sockets.iter().map(String::as_str).collect();
    by_sockets[2] = "--disks-uri";
    for words in [&[][..], &["--p2p"], &by_sockets] {
        let before = counts(lab)?;
        let migration = guest.begin(lab, words)?;
        guest.arrive(lab, migration)?;
        // The guest writes all the time, so the bytes of NBD depend on how long the copy takes.
        let allocated = guest.allocated(lab)?;
        ensure!(
            allocated < most,
            "holes were copied: {allocated} bytes are allocated, by NBD alone {alone}"
        );
        for side in [Side::A, Side::B] {
            let (vm, disk) = ended(lab, side, before[side as usize])?;
            ensure!(vm["status"] == "completed" && disk["status"] == "completed", "{vm} {disk}");
            let figure = |name: &str| disk[name].as_u64().with_context(|| format!("{disk}"));
            let (plain, sent) = (figure("plain")?, figure("transferred")?);
            ensure!(plain >= filled as u64, "a part is missing: {disk}");
            println!("  {plain} bytes of NBD for {SIZE} of the disk; {sent} on the network");
        }
    }
    guest.end(lab)
}

/// Bytes that the copy takes when it goes past platen.
fn allocated_alone(lab: &mut Lab, filled: usize) -> Result<u64> {
    let mut guest = DiskGuest::boot(lab, lab.at, SIZE, content(filled), false)?;
    let uri = format!("tcp://{}", lab.host(guest.at.other()).address);
    let past = ["--migrateuri", &uri, "--listen-address", "0.0.0.0"];
    let migration = guest.begin(lab, &past)?;
    guest.arrive(lab, migration)?;
    let allocated = guest.allocated(lab)?;
    println!("  {allocated} bytes of {SIZE} are allocated by NBD alone");
    guest.end(lab)?;
    Ok(allocated)
}

/// With `--copy-storage-inc` only the overlay goes over; both hosts have its base.
pub(crate) fn incremental(lab: &mut Lab) -> Result<()> {
    let mut guest = DiskGuest::boot(lab, lab.at, SIZE, content(FILLED), true)?;
    for _ in 0..2 {
        let before = counts(lab)?;
        let migration = guest.begin(lab, &[])?;
        guest.arrive(lab, migration)?;
        let allocated = guest.allocated(lab)?;
        ensure!(allocated < FILLED as u64 / 2, "the base was copied: {allocated} bytes");
        for side in [Side::A, Side::B] {
            let (vm, disk) = ended(lab, side, before[side as usize])?;
            ensure!(vm["status"] == "completed" && disk["status"] == "completed", "{vm} {disk}");
        }
    }
    guest.end(lab)
}

/// The services are killed and the link is cut while the disk is copied, and it goes on.
pub(crate) fn interrupted(lab: &mut Lab) -> Result<()> {
    let mut guest = DiskGuest::boot(lab, lab.at, SIZE, content(FILLED), false)?;
    let migration = guest.begin(lab, &SLOW)?;
    wait_for_disk(lab, guest.at)?;
    for side in [Side::A, Side::B] {
        lab.kill_service(side)?;
        lab.start_service(side)?;
    }
    lab.host(Side::B).set_link(false)?;
    std::thread::sleep(Duration::from_secs(5));
    lab.host(Side::B).set_link(true)?;
    guest.arrive(lab, migration)?;
    guest.end(lab)
}

/// The end of a process that carries the disk ends the migration: the guest stays, and the next
/// migration works.
pub(crate) fn carrier_killed(lab: &mut Lab) -> Result<()> {
    let mut guest = DiskGuest::boot(lab, lab.at, SIZE, content(FILLED), false)?;
    for victim in [guest.at, guest.at.other()] {
        let migration = guest.begin(lab, &SLOW)?;
        let pid = wait_for_disk(lab, guest.at).and_then(|_| carrier(lab, victim))?;
        let killed = Command::new("kill").args(["-KILL", &pid.to_string()]).status()?;
        ensure!(killed.success(), "kill");
        let (well, said) = migration.ends()?;
        ensure!(!well, "the migration succeeded without its disk: {said}");
        println!("  libvirt says: {}", said.trim().lines().last().unwrap_or_default());
        guest.check(lab)?;
        nothing_runs(lab)?;
    }
    let migration = guest.begin(lab, &[])?;
    guest.arrive(lab, migration)?;
    guest.end(lab)
}

/// Neither service carries anything any more.
fn nothing_runs(lab: &Lab) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    for side in [Side::A, Side::B] {
        loop {
            let status = lab.service(side).status()?;
            if status["running"].as_array().is_some_and(Vec::is_empty) {
                break;
            }
            ensure!(Instant::now() < until, "it runs on: {status}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

/// The number of records at both.
fn counts(lab: &Lab) -> Result<[usize; 2]> {
    Ok([lab.service(Side::A).count()?, lab.service(Side::B).count()?])
}

/// The records of the migration and of its disk, which come behind so many others.
fn ended(lab: &Lab, side: Side, before: usize) -> Result<(serde_json::Value, serde_json::Value)> {
    lab.service(side).ended(before + 2)?;
    let status = lab.service(side).status()?;
    let new = status["history"].as_array().context("no history")?.iter().skip(before);
    let (mut vm, mut disk) = (None, None);
    for record in new {
        let place = if record["what"] == "disk" { &mut disk } else { &mut vm };
        ensure!(place.replace(record.clone()).is_none(), "one too many: {status}");
    }
    Ok((vm.context("no migration")?, disk.context("no disk")?))
}

/// Waits until the disk's copy is in its middle.
fn wait_for_disk(lab: &Lab, side: Side) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let status = lab.service(side).status()?;
        let running = status["running"].as_array().context("no list")?;
        let disk = running.iter().find(|record| record["what"] == "disk");
        if disk.and_then(|disk| disk["plain"].as_u64()) >= Some(MIDDLE) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "the disk is not copied: {status}\n{}", lab.logs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The process that carries the disk.
fn carrier(lab: &Lab, side: Side) -> Result<u64> {
    let status = lab.service(side).status()?;
    let running = status["running"].as_array().context("no list")?;
    let disk = running.iter().find(|record| record["what"] == "disk");
    disk.and_then(|disk| disk["pid"].as_u64()).with_context(|| format!("no disk: {status}"))
}

/// Bytes of the disk whose copy is timed.
const FIGURE_SIZE: u64 = 2 << 30;

/// Prints the time of a storage copy over 200 Mbit/s by NBD alone and by platen, in turns.
pub(crate) fn figure(lab: &mut Lab) -> Result<()> {
    let content = files(usize::try_from(FIGURE_SIZE / 2)?)?;
    let mut guest = DiskGuest::boot(lab, lab.at, FIGURE_SIZE, content, false)?;
    for side in [Side::A, Side::B] {
        lab.host(side).limit_link("200mbit")?;
    }
    let mut best = [Duration::MAX; 2];
    for round in 0..2 {
        for (way, name) in ["NBD alone", "platen"].into_iter().enumerate() {
            let there = lab.host(guest.at.other()).address;
            let uri = format!("tcp://{there}");
            let past = ["--migrateuri", &uri, "--listen-address", "0.0.0.0"];
            let begin = Instant::now();
            let migration = guest.begin(lab, if way == 0 { &past } else { &[] })?;
            let (well, said) = ends_late(migration)?;
            ensure!(well, "virsh migrate failed: {said}\n{}", lab.logs());
            let took = begin.elapsed();
            guest.at = guest.at.other();
            guest.check(lab)?;
            println!("  round {round}, {name}: {:.1} s", took.as_secs_f64());
            best[way] = best[way].min(took);
            if way == 1 {
                let status = lab.service(guest.at).status()?;
                let all = status["history"].as_array().context("no history")?;
                let disk = all.iter().rfind(|record| record["what"] == "disk");
                let disk = disk.context("the disk did not go by platen")?;
                println!("  {} bytes of NBD as {}", disk["plain"], disk["transferred"]);
            }
        }
    }
    println!(
        "  {} MiB of files on a disk of {} MiB over 200 Mbit/s: platen took {:.2} of the time of \
         NBD alone",
        FIGURE_SIZE >> 21,
        FIGURE_SIZE >> 20,
        best[1].as_secs_f64() / best[0].as_secs_f64()
    );
    guest.end(lab)
}

fn ends_late(migration: Migration) -> Result<(bool, String)> {
    migration.ends_within(Duration::from_secs(1200))
}

/// The files of this machine's system, one behind the other.
fn files(len: usize) -> Result<Vec<u8>> {
    let mut all = Vec::with_capacity(len);
    let mut folders = vec![std::path::PathBuf::from("/usr")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                all.extend(std::fs::read(entry.path()).unwrap_or_default());
                // As on a file system.
                all.resize(all.len().next_multiple_of(4096), 0);
            }
            if all.len() >= len {
                all.truncate(len);
                return Ok(all);
            }
        }
    }
    ensure!(all.len() >= len / 2, "only {} bytes of files", all.len());
    Ok(all)
}
