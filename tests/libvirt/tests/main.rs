//! `platen host` under two real libvirt daemons, one scenario after the other with one guest.
//!
//! ```text
//! cargo test -p libvirt-tests --test libvirt -- [FILTER...] [--quick] [--list]
//! ```
//!
//! A scenario runs if its name contains one of the filters; with `--quick`, if it is in the choice
//! of `make test`. Needs what `scripts/fetch-libvirt` unpacks, root, and the binary of the same
//! profile. `PLATEN_KEEP=1` leaves the logs. `PLATEN_LIBVIRT=target/libvirt-trixie`, from this
//! machine's folder, is for the libvirt 11.3 that `scripts/fetch-libvirt trixie` unpacks, and
//! `target/libvirt-forky` for the newest.

mod disks;
mod kubevirt;
mod virsh;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use libvirt_tests::{Lab, Migration, Side};
use vm_tests::{cleanup, platen};

/// A test: a claim, and the code that checks it. Each begins and ends with a guest that runs.
struct Scenario {
    name: &'static str,
    quick: bool,
    run: fn(&mut Lab) -> Result<()>,
}

const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "libvirt_migrates_there_and_back_without_a_flag",
        quick: true,
        run: there_and_back,
    },
    Scenario { name: "libvirt_migrates_with_parallel_connections", quick: true, run: parallel },
    Scenario { name: "libvirt_migrates_by_unix_sockets", quick: true, run: by_sockets },
    Scenario {
        name: "libvirt_migrates_by_unix_sockets_with_every_flag",
        quick: false,
        run: by_sockets_with_flags,
    },
    Scenario {
        name: "a_unix_socket_without_its_service_is_a_failure_at_once",
        quick: false,
        run: socket_without_service,
    },
    Scenario {
        name: "libvirt_saves_and_restores_by_platen_as_its_compressor",
        quick: true,
        run: save_and_restore,
    },
    Scenario { name: "platen_evacuates_a_domain", quick: true, run: evacuated },
    Scenario {
        name: "a_saved_vm_runs_under_libvirt_before_its_ram_is_loaded",
        quick: true,
        run: virsh::at_once,
    },
    Scenario {
        name: "a_saved_vm_under_libvirt_survives_the_death_of_players_platen_and_libvirtd",
        quick: false,
        run: virsh::deaths,
    },
    Scenario {
        name: "a_saved_vm_under_libvirt_is_loaded_first_where_it_has_to_be",
        quick: false,
        run: virsh::loaded_first,
    },
    Scenario {
        name: "a_damaged_or_foreign_image_starts_nothing_under_libvirt",
        quick: true,
        run: virsh::damaged,
    },
    Scenario { name: "libvirt_aborts_and_the_guest_stays", quick: true, run: abort },
    Scenario {
        name: "services_killed_and_the_link_cut_in_mid_migration",
        quick: true,
        run: services_killed,
    },
    Scenario {
        name: "a_service_that_does_not_run_is_a_failure_at_once",
        quick: true,
        run: no_service,
    },
    Scenario { name: "libvirt_migrates_ten_times_there_and_back", quick: false, run: ten_times },
    Scenario { name: "libvirt_migrates_by_postcopy", quick: false, run: postcopy },
    Scenario {
        name: "libvirt_migrates_persistently_and_with_a_bandwidth",
        quick: false,
        run: persistent,
    },
    Scenario {
        name: "a_killed_destination_qemu_leaves_the_guest_at_its_source",
        quick: false,
        run: destination_killed,
    },
    Scenario { name: "a_link_that_is_down_for_ten_seconds", quick: false, run: link_down },
    Scenario {
        name: "libvirt_migrates_a_guest_with_its_disk",
        quick: true,
        run: disks::there_and_back,
    },
    Scenario {
        name: "libvirt_migrates_a_guest_with_the_overlay_of_its_disk",
        quick: false,
        run: disks::incremental,
    },
    Scenario {
        name: "a_disk_is_copied_through_killed_services_and_a_cut_link",
        quick: false,
        run: disks::interrupted,
    },
    Scenario {
        name: "a_disk_whose_carrier_is_killed_leaves_the_guest_at_its_source",
        quick: false,
        run: disks::carrier_killed,
    },
    Scenario {
        name: "libvirt_migrates_by_the_proxies_of_kubevirt",
        quick: true,
        run: kubevirt::migrates,
    },
];

/// Measurements, which run only where they are named.
const FIGURES: &[Scenario] =
    &[Scenario { name: "figure_storage_copy", quick: false, run: disks::figure }];

fn main() -> ExitCode {
    let (flags, filters): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with('-'));
    let quick = flags.iter().any(|flag| flag == "--quick");
    let wanted = |scenario: &&Scenario| {
        (filters.is_empty() || filters.iter().any(|filter| scenario.name.contains(filter.as_str())))
            && (!quick || scenario.quick)
    };
    let named = |figure: &&Scenario| filters.iter().any(|filter| figure.name == filter);
    let figures = FIGURES.iter().filter(named);
    let chosen: Vec<&Scenario> = SCENARIOS.iter().filter(wanted).chain(figures).collect();
    if flags.iter().any(|flag| flag == "--list") {
        chosen.iter().for_each(|scenario| println!("{}: test", scenario.name));
        return ExitCode::SUCCESS;
    }
    if let Some(why) = Lab::missing() {
        eprintln!("libvirt: {} scenarios cannot run: {why}", chosen.len());
        return ExitCode::FAILURE;
    }
    match run(&chosen) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            println!("{failed} of {} scenarios failed", chosen.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("libvirt: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chosen: &[&Scenario]) -> Result<usize> {
    cleanup::install()?;
    println!("binary under test: {}", platen::binary()?.display());
    let begin = Instant::now();
    let mut lab = Lab::new()?;
    println!("two hosts and a guest after {:.1} s", begin.elapsed().as_secs_f64());
    let mut failed = 0;
    for scenario in chosen {
        let begin = Instant::now();
        let result = (scenario.run)(&mut lab);
        let took = begin.elapsed().as_secs_f64();
        match result {
            Ok(()) => println!("test {} ... ok ({took:.1} s)", scenario.name),
            Err(error) => {
                failed += 1;
                println!(
                    "test {} ... FAILED ({took:.1} s)\n  {error:#}\n{}",
                    scenario.name,
                    lab.logs()
                );
                // Where the guest is, is not known any more.
                break;
            }
        }
    }
    Ok(failed)
}

/// Bytes after which a migration is in its middle: the guest has 64 MiB that are not zero.
const MIDDLE: u64 = 8 << 20;
/// MiB a second. The rest takes most of a minute then: longer than a busy machine takes for what
/// happens in mid-migration.
const SLOW: [&str; 2] = ["--bandwidth", "1"];

fn there_and_back(lab: &mut Lab) -> Result<()> {
    lab.migrate(&[])?;
    lab.migrate(&["--p2p"])
}

fn parallel(lab: &mut Lab) -> Result<()> {
    lab.migrate(&["--parallel", "--parallel-connections", "4"])
}

fn by_sockets(lab: &mut Lab) -> Result<()> {
    lab.migrate_by_socket(&[])?;
    // QEMU itself connects to the socket, several times.
    lab.migrate_by_socket(&["--parallel", "--parallel-connections", "3"])
}

fn by_sockets_with_flags(lab: &mut Lab) -> Result<()> {
    let _allowed = Userfaultfd::allowed()?;
    for _ in 0..2 {
        lab.migrate_by_socket(&["--p2p"])?;
        lab.migrate_by_socket(&["--persistent", "--undefinesource", "--bandwidth", "40"])?;
        lab.migrate_by_socket(&["--postcopy", "--postcopy-after-precopy"])?;
    }
    abort_with(lab, &lab.by_socket(1))?;
    lab.migrate_by_socket(&[])?;
    lab.migrate(&[])
}

fn socket_without_service(lab: &mut Lab) -> Result<()> {
    for side in [lab.at, lab.at.other()] {
        lab.kill_service(side)?;
        let begin = Instant::now();
        let socket = lab.by_socket(2);
        let (well, said) = lab.begin(&socket.each_ref().map(String::as_str))?.ends()?;
        ensure!(!well, "a migration without a service succeeded: {said}");
        ensure!(begin.elapsed() < Duration::from_secs(300), "it hung: {said}");
        lab.check_guest()?;
        lab.start_service(side)?;
    }
    lab.migrate_by_socket(&[])?;
    lab.migrate(&[])
}

/// `platen evacuate` of a domain, through the doors; one that does not exist stops it not.
fn evacuated(lab: &mut Lab) -> Result<()> {
    let to = lab.at.other();
    let before = counts(lab)?;
    let uri = format!("qemu+tcp://{}/system", lab.host(to).name);
    let words = ["evacuate", "--domain", "g1", "--domain", "none", "--libvirt", &uri];
    let (well, said) = lab.platen_with_virsh(lab.host(lab.at), &words)?;
    ensure!(!well && said.contains("g1: moved"), "{said}");
    ensure!(said.contains("none: refused") && said.contains("1 of 2 VMs moved"), "{said}");
    lab.at = to;
    lab.check_guest()?;
    for side in [Side::A, Side::B] {
        // It ends some time after libvirt's migration.
        let record = lab.service(side).ended(before[side as usize] + 1)?;
        ensure!(record["status"] == "completed", "the record is {record}");
    }
    ensure!(
        lab.service(to.other()).count()? == before[to.other() as usize] + 1,
        "not once through platen: {said}"
    );
    lab.migrate(&[])
}

/// `virsh save` and `restore`, where libvirt's gzip or zstd is platen; then `managedsave`, `start`.
fn save_and_restore(lab: &mut Lab) -> Result<()> {
    let host = lab.host(lab.at);
    host.virsh(&["save", "g1", "/tmp/g1.save"])?;
    ensure!(!host.runs("g1")?, "g1 runs after its save");
    let path = host.file("/tmp/g1.save");
    let mut saved = std::fs::read(&path)?;
    let members = members_of(host.filter, &saved)?;
    let size = saved.len();
    let middle = size / 2;
    saved[middle] ^= 0x10;
    std::fs::write(host.file("/tmp/damaged.save"), saved)?;
    let (well, said) = host.run(&["virsh", "-q", "restore", "/tmp/damaged.save"])?;
    ensure!(!well, "byte {middle} of {size} was changed, and libvirt restored the VM: {said}");
    ensure!(!host.runs("g1")?, "libvirt refused a damaged image, and g1 runs: {said}");
    by_image(lab)?;
    lab.check_guest()?;
    // libvirt saves so only a domain that it knows for good. Some migrations make it transient.
    let xml = host.virsh(&["dumpxml", "g1"])?;
    std::fs::write(host.file("/tmp/managed.xml"), xml)?;
    host.virsh(&["define", "/tmp/managed.xml"])?;
    host.virsh(&["managedsave", "g1"])?;
    ensure!(!host.runs("g1")?, "g1 runs after its managed save");
    let managed = "/var/lib/libvirt/qemu/save/g1.save";
    members_of(host.filter, &std::fs::read(host.file(managed))?)?;
    host.virsh(&["start", "g1"])?;
    ensure!(!host.file(managed).exists(), "libvirt has not restored {managed}");
    host.virsh(&["undefine", "g1"])?;
    lab.check_guest()?;
    println!("  {}: an image of {} MiB in {members} members", host.filter, size >> 20);
    lab.migrate(&[])
}

/// The number of platen's members or frames in a file that libvirt has saved, more than 64 MiB.
fn members_of(filter: &str, saved: &[u8]) -> Result<usize> {
    // A member with its length; a frame with window and checksum that states 2 MiB.
    let (ours, least): (&[u8], _) = match filter {
        "gzip" => (b"\x1f\x8b\x08\x04\0\0\0\0\0\x03\x08\0PL", 64),
        _ => (b"\x28\xb5\x2f\xfd\x84\x48\0\0\x20\0", 32),
    };
    let members = saved.windows(ours.len()).filter(|bytes| *bytes == ours).count();
    ensure!(members > least, "{members} members of platen's {filter} for more than 64 MiB");
    Ok(members)
}

/// Makes an image of libvirt's save file and a save file of the image, which libvirt restores.
fn by_image(lab: &Lab) -> Result<()> {
    let host = lab.host(lab.at);
    let file = |name: &str| host.file(&format!("/tmp/{name}")).display().to_string();
    std::fs::write(file("g1.xml"), host.virsh(&["save-image-dumpxml", "/tmp/g1.save"])?)?;
    let (save, image, again) = (file("g1.save"), file("g1.image"), file("again.save"));
    lab.platen(&["image", "import", &save, &image])?;
    lab.platen(&["image", "verify", &image])?;
    lab.platen(&["image", "export", &image, &again, "--libvirt", &file("g1.xml")])?;
    host.virsh(&["restore", "/tmp/again.save"])?;
    Ok(())
}

/// The number of ended migrations at both.
fn counts(lab: &Lab) -> Result<[usize; 2]> {
    Ok([lab.service(Side::A).count()?, lab.service(Side::B).count()?])
}

fn abort(lab: &mut Lab) -> Result<()> {
    abort_with(lab, &[])?;
    // The next one works.
    lab.migrate(&[])
}

/// Begins a migration with these flags, which has come to its middle and stays there for long.
fn in_the_middle(lab: &Lab, flags: &[String]) -> Result<Migration> {
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let migration = lab.begin(&[&SLOW[..], &flags].concat())?;
    lab.wait_for_bytes(MIDDLE)?;
    Ok(migration)
}

/// Lets it go on at full speed, and waits for its end.
fn lands(lab: &mut Lab, migration: Migration, before: [usize; 2]) -> Result<()> {
    lab.host(lab.at).virsh(&["migrate-setspeed", "g1", "1000"])?;
    lab.arrive(migration, before)
}

fn abort_with(lab: &Lab, flags: &[String]) -> Result<()> {
    let before = counts(lab)?;
    let migration = in_the_middle(lab, flags)?;
    lab.host(lab.at).virsh(&["domjobabort", "g1"])?;
    let (well, said) = migration.ends()?;
    ensure!(!well, "an aborted migration succeeded: {said}");
    for side in [Side::A, Side::B] {
        let record = lab.service(side).ended(before[side as usize] + 1)?;
        ensure!(record["status"] == "failed", "{record}");
        ensure!(!record["cause"].as_str().unwrap_or_default().is_empty(), "{record}");
    }
    lab.check_guest()
}

fn services_killed(lab: &mut Lab) -> Result<()> {
    let before = counts(lab)?;
    let migration = in_the_middle(lab, &[])?;
    for side in [Side::A, Side::B] {
        lab.kill_service(side)?;
        lab.start_service(side)?;
        let said = lab.service(side).said()?;
        ensure!(said.contains("migrations of a service before this one go on"), "{said}");
    }
    // The new service hands the new links to the process that has the session.
    cut(lab, Duration::from_secs(4))?;
    lands(lab, migration, before)
}

/// Cuts the link for so long, with every connection on it.
fn cut(lab: &Lab, time: Duration) -> Result<()> {
    lab.host(Side::B).set_link(false)?;
    std::thread::sleep(time);
    lab.host(Side::B).set_link(true)
}

fn link_down(lab: &mut Lab) -> Result<()> {
    let before = counts(lab)?;
    let migration = in_the_middle(lab, &[])?;
    cut(lab, Duration::from_secs(10))?;
    lands(lab, migration, before)
}

fn no_service(lab: &mut Lab) -> Result<()> {
    let mut before = 0;
    // At the source nobody listens at the door; at the destination the service refuses links.
    for side in [lab.at, lab.at.other()] {
        before = lab.service(lab.at).count()?;
        lab.kill_service(side)?;
        let begin = Instant::now();
        let (well, said) = lab.begin(&[])?.ends()?;
        ensure!(!well, "a migration without a service succeeded: {said}");
        ensure!(begin.elapsed() < Duration::from_secs(300), "it hung: {said}");
        lab.check_guest()?;
        lab.start_service(side)?;
    }
    let record = lab.service(lab.at).ended(before + 1)?;
    let cause = record["cause"].as_str().unwrap_or_default().to_owned();
    ensure!(cause.contains("cannot connect to"), "the cause is {record}");
    lab.migrate(&[])
}

fn ten_times(lab: &mut Lab) -> Result<()> {
    for _ in 0..10 {
        lab.migrate(&[])?;
        lab.migrate(&[])?;
    }
    Ok(())
}

fn persistent(lab: &mut Lab) -> Result<()> {
    lab.migrate(&["--persistent", "--undefinesource", "--bandwidth", "40"])?;
    lab.migrate(&["--persistent", "--undefinesource", "--p2p"])
}

/// Whether QEMU's user may use userfaultfd for as long as this lives.
struct Userfaultfd(String);

impl Userfaultfd {
    const FILE: &str = "/proc/sys/vm/unprivileged_userfaultfd";

    fn allowed() -> Result<Self> {
        Self::set("1")
    }

    fn forbidden() -> Result<Self> {
        Self::set("0")
    }

    fn set(value: &str) -> Result<Self> {
        let before = std::fs::read_to_string(Self::FILE)?;
        std::fs::write(Self::FILE, value)?;
        Ok(Self(before))
    }
}

impl Drop for Userfaultfd {
    fn drop(&mut self) {
        let _ = std::fs::write(Self::FILE, self.0.trim());
    }
}

fn postcopy(lab: &mut Lab) -> Result<()> {
    let _allowed = Userfaultfd::allowed()?;
    lab.migrate(&["--postcopy", "--postcopy-after-precopy"])
}

fn destination_killed(lab: &mut Lab) -> Result<()> {
    let before = counts(lab)?;
    let migration = in_the_middle(lab, &[])?;
    let there = lab.host(lab.at.other());
    let pid = std::fs::read_to_string(there.file("/run/libvirt/qemu/g1.pid"))?;
    let out =
        there.command(&["/bin/bash", "-c", &format!("kill -KILL {}", pid.trim())]).output()?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let (well, said) = migration.ends()?;
    ensure!(!well, "the migration succeeded: {said}");
    lab.service(lab.at).ended(before[lab.at as usize] + 1)?;
    lab.check_guest()?;
    lab.migrate(&[])
}
