//! The jobs of tests with guests: whole VMs, guests that swap, hosts under libvirt.

use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};

use crate::cargo::{self, Program};
use crate::fetched::{is_set, SKIP_LIBVIRT, SKIP_PACKAGES, SKIP_SWAP};
use crate::job::{Done, Job, Track};
use crate::outcome::{Format, Outcome};

/// The parts of a proof with guests.
pub(crate) const PARTS: [&str; 5] = ["vm", "libvirt", "swap", "demo-memory", "memory-matrix"];

/// The number of programs that run the whole-VM tests at once. Each boots the VMs that its
/// scenarios share, so more of them cost more CPU. Fewer would wait too much of their time, above
/// all for timeouts.
const VM_SHARDS: usize = 3;

/// The number of programs that run the swap guests at once.
const SWAP_SHARDS: usize = 2;

/// The newer kernel of the guests that swap, and the scenarios that `make proof` repeats with it: a
/// ublk disk grows only there.
const NEWER_LINUX: &str = "target/linux7";
const WITH_NEWER_LINUX: [&str; 3] =
    ["a ublk disk keeps", "swap by ublk: eaten memory", "a ublk disk that is swapped to grows"];

/// The newer systems with libvirt: the job's name, and the folder.
const NEWER_LIBVIRT: [(&str, &str); 2] =
    [("libvirt 11.3", "target/libvirt-trixie"), ("libvirt 12", "target/libvirt-forky")];

/// The scenarios of libvirt 9.0 that `make proof` repeats with the newer ones: migrations. Those of
/// saved VMs recover postcopy, at which libvirtd 11.3 crashes.
const WITH_NEWER_LIBVIRT: [&str; 8] = [
    "libvirt_migrates_",
    "libvirt_aborts_",
    "libvirt_saves_",
    "services_killed_",
    "a_service_",
    "a_killed_",
    "a_link_",
    "a_disk_",
];

/// The scenarios of saved VMs, with the newest libvirt only: the daemon of libvirt 11.3 ends when a
/// postcopy migration is continued.
const SAVED_WITH_NEWEST_LIBVIRT: [&str; 2] = ["a_saved_vm_", "a_damaged_or_"];

/// Tracks side by side, and the folder of what their programs have claimed, which goes with this
/// value.
#[derive(Debug, Default)]
pub(crate) struct Guests {
    pub(crate) tracks: Vec<Track>,
    /// Tracks that run when those have ended.
    pub(crate) later: Vec<Track>,
    /// Parts that do not run.
    pub(crate) left_out: Vec<Done>,
    /// Jobs that measure, and run alone after the tracks.
    pub(crate) alone: Vec<Track>,
    claims: Vec<tempfile::TempDir>,
}

/// The choice of `make test`. The hosts under libvirt come last, when fewer tests run beside them:
/// their QEMU loses a guest's writes under TCG (tests/libvirt/src/domain.rs), the more the busier
/// the machine is.
///
/// # Errors
/// If a program of scenarios was not built, or no folder can be made.
pub(crate) fn quick(programs: &[Program]) -> Result<Guests> {
    let mut guests = Guests::default();
    let shards = guests.shards(programs, "vm", VM_SHARDS, &["--quick"])?;
    guests.side_by_side(shards);
    // A guest that swaps goes on swapping while a test waits for it: what these guests do takes
    // three times the CPU time when others get as much of the CPUs.
    for track in &mut guests.tracks {
        track.jobs = std::mem::take(&mut track.jobs).into_iter().map(Job::nice).collect();
    }
    if guests.runs("swap") {
        let shards = guests.shards(programs, "swap", SWAP_SHARDS, &["--quick"])?;
        guests.side_by_side(shards);
    }
    if guests.runs("libvirt") {
        let job = harness(programs, "libvirt", "libvirt", &["--quick"])?;
        match guests.tracks.last_mut() {
            Some(track) => track.jobs.push(job),
            None => guests.tracks.push(vec![job].into()),
        }
    }
    Ok(guests)
}

/// Everything that these parts have. Scenarios that measure run alone, after the others.
///
/// # Errors
/// If a program of scenarios was not built, or no folder can be made.
pub(crate) fn all(programs: &[Program], parts: &[&str]) -> Result<Guests> {
    let mut guests = Guests::default();
    if parts.contains(&"vm") {
        let shards = guests.shards(programs, "vm", VM_SHARDS, &["--without-measurements"])?;
        guests.side_by_side(shards);
        let measures = harness(programs, "vm", "vm, measurements", &["--only-measurements"])?;
        guests.alone.push(vec![measures].into());
    }
    if parts.contains(&"libvirt") && guests.runs("libvirt") {
        let mut jobs = vec![harness(programs, "libvirt", "libvirt", &[])?];
        for (name, folder) in NEWER_LIBVIRT {
            let mut names = WITH_NEWER_LIBVIRT.to_vec();
            if folder.ends_with("forky") {
                names.extend(SAVED_WITH_NEWEST_LIBVIRT);
            }
            let job = harness(programs, "libvirt", name, &names)?;
            jobs.push(job.env("PLATEN_LIBVIRT", folder));
        }
        guests.tracks.push(jobs.into());
    }
    if parts.contains(&"memory-matrix") && guests.runs("memory-matrix") {
        // Its guests have a time limit for what they store and read, so it counts as a measurement.
        let jobs = guests.shards(programs, "memory-matrix", SWAP_SHARDS, &[])?;
        guests.alone.push(Track { jobs, at_once: SWAP_SHARDS });
    }
    if parts.contains(&"demo-memory") && guests.runs("demo-memory") {
        let job = harness(programs, "demo-memory", "demo-memory", &[])?;
        guests.later.push(vec![job].into());
    }
    if parts.contains(&"swap") && guests.runs("swap") {
        let shards = guests.shards(programs, "swap", SWAP_SHARDS, &[])?;
        guests.later.extend(shards.into_iter().map(|job| Track::from(vec![job])));
        let newer = harness(programs, "swap", "swap, Linux 7", &WITH_NEWER_LINUX)?;
        let newer = newer.env("PLATEN_SWAP_LINUX", NEWER_LINUX);
        guests.later.last_mut().context("no shard")?.jobs.push(newer);
    }
    Ok(guests)
}

impl Guests {
    /// `count` programs that share out the scenarios of a part.
    fn shards(
        &mut self,
        programs: &[Program],
        part: &'static str,
        count: usize,
        arguments: &[&str],
    ) -> Result<Vec<Job>> {
        let claims = tempfile::Builder::new().prefix("claims-").tempdir_in("target")?;
        let folder = format!("--claims={}", claims.path().canonicalize()?.display());
        let program = |number| {
            let shard = format!("--shard={number}/{count}");
            let arguments = [arguments, &[&*shard, &*folder]].concat();
            harness(programs, part, &format!("{part} {number} of {count}"), &arguments)
        };
        let jobs = (1..=count).map(program).collect();
        self.claims.push(claims);
        jobs
    }

    /// Adds a track for each of these jobs.
    fn side_by_side(&mut self, jobs: Vec<Job>) {
        self.tracks.extend(jobs.into_iter().map(|job| vec![job].into()));
    }

    /// Whether a part runs. One that does not counts as skipped.
    fn runs(&mut self, part: &'static str) -> bool {
        let why = why_not(part);
        self.left_out.extend(why.as_ref().map(|why| without(part, why)));
        why.is_none()
    }
}

/// A job of the whole-VM tests (`vm`), of the swap guests (`swap`), under libvirt (`libvirt`), or
/// of a program that compares platen with zram.
fn harness(
    programs: &[Program],
    part: &'static str,
    name: &str,
    arguments: &[&str],
) -> Result<Job> {
    let scenarios = |part: &str| -> Result<&Program> {
        let is_wanted = |program: &&Program| {
            cargo::SCENARIOS.contains(&&*program.name)
                && program.name.ends_with(&format!("/{part}"))
        };
        let found = programs.iter().find(is_wanted);
        found.with_context(|| format!("cargo has built no program of the scenarios of {part}"))
    };
    let compares = match part {
        "demo-memory" => "demo_memory",
        "memory-matrix" => "swap_matrix",
        _ => {
            let path = &scenarios(part)?.path;
            return Ok(Job::new(part, name, Format::Scenarios, path, arguments));
        }
    };
    // cargo builds the programs of a crate beside the folder of its tests.
    let folder = scenarios("swap")?.path.ancestors().nth(2).context("no folder")?;
    Ok(Job::new(part, name, Format::Plain, folder.join(compares), arguments))
}

/// Why a part cannot run, or shall not; `None` if it does.
pub(crate) fn why_not(part: &str) -> Option<String> {
    let skip = match part {
        "swap" | "demo-memory" | "memory-matrix" => SKIP_SWAP,
        "packages" => SKIP_PACKAGES,
        "libvirt" => SKIP_LIBVIRT,
        _ => return None,
    };
    if is_set(skip) {
        return Some(format!("{skip} is set"));
    }
    let needs_root = ["libvirt", "packages"].contains(&part);
    (needs_root && !is_root()).then(|| "it needs root, for namespaces and mounts".into())
}

pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Stands for a part that does not run, for the reason given; it counts as skipped.
pub(crate) fn without(part: &'static str, why: &str) -> Done {
    let skipped = vec![(part.to_owned(), why.to_owned())];
    Done {
        part,
        name: part.to_owned(),
        took: std::time::Duration::ZERO,
        cpu: 0.0,
        outcome: Outcome { skipped, ..Outcome::default() },
        output: String::new(),
        log: std::path::PathBuf::new(),
    }
}
