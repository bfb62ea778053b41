//! The parts of a proof: the build, the jobs and the tracks of each.

use std::time::Instant;

use anyhow::{bail, Result};

use crate::crates::{self, CRATES_AT_ONCE};
use crate::fetched::{fetch, set_up, FETCHED, FETCHED_FOR_PROOF};
use crate::guests;
use crate::job::{run_tracks, Job, Track};
use crate::outcome::Format;
use crate::summary;

/// The parts of `proof`, in the order of their execution.
pub(crate) const PARTS: [&str; 12] = [
    "check",
    "crates",
    "specification",
    "loom",
    "fuzz",
    "vm",
    "libvirt",
    "swap",
    "demo-memory",
    "memory-matrix",
    "packages",
    "demo",
];

/// The parts that run behind all others, by the command that a user types: each builds the product.
const ALONE: [&str; 2] = ["packages", "demo"];

/// `make test`: one build without link-time optimisation; all tests of crates, the loom models as
/// written, the fuzz targets over their seeds, a choice of whole-VM tests and swap guests.
///
/// # Errors
/// If something cannot be built or started. Failed tests return `false`.
pub(crate) fn test() -> Result<bool> {
    let begin = Instant::now();
    let mut all = vec![set_up()?];
    let (programs, fetched) = std::thread::scope(|scope| {
        let fetching = scope.spawn(|| run_tracks(vec![fetch(&FETCHED).into()], summary::say));
        let built = crates::build(&[]);
        (built, fetching.join())
    });
    let programs = programs?;
    all.extend(fetched.map_err(|_| anyhow::anyhow!("the fetch track has panicked"))??);
    println!("{:6.1} s  set-up and build", begin.elapsed().as_secs_f64());

    // loom takes longest, so it comes first.
    let mut jobs = vec![
        Job::new("loom", "loom as written", Format::Plain, "scripts/loom", &["--as-written"]),
        Job::new("specification", "specification", Format::Plain, crate::me(), &["specification"]),
        crates::circles(),
        crates::words(),
        crates::guest_init(),
    ];
    // The same cases in every run: a failure is one of the change. `make proof` takes new ones, and
    // all of those of which `PLATEN_QUICK` takes a part.
    let quick = |job: Job| job.env("PROPTEST_RNG_SEED", "20261101").env("PLATEN_QUICK", "1");
    jobs.extend(crates::crates(&programs).into_iter().map(quick));
    let jobs = jobs.into_iter().map(Job::nice).collect();
    let mut guests = guests::quick(&programs)?;
    let mut tracks = vec![Track { jobs, at_once: CRATES_AT_ONCE }];
    tracks.append(&mut guests.tracks);
    all.append(&mut guests.left_out);
    all.extend(run_tracks(tracks, summary::say)?);
    Ok(summary::print(&all, begin.elapsed()))
}

/// `make proof`: everything, or the named parts, in waves: the parts without guests, those with
/// whole VMs, those with guests that swap, then one by one the jobs that measure and those that
/// build the product once more. Within a wave tracks run side by side. All of them at once starve
/// each other on 2 CPUs: commands give up after 30 s on services that hardly run.
///
/// # Errors
/// Those of [`test`](fn@test), and an unknown part.
pub(crate) fn proof(chosen: &[String]) -> Result<bool> {
    for part in chosen {
        if !PARTS.contains(&part.as_str()) {
            bail!("there is no part '{part}': the parts are {}", PARTS.join(" "));
        }
    }
    let begin = Instant::now();
    let mut all = vec![set_up()?];
    let fetched = [&FETCHED[..], &FETCHED_FOR_PROOF[..]].concat();
    all.extend(run_tracks(vec![fetch(&fetched).into()], summary::say)?);
    let is_chosen = |part: &&str| chosen.is_empty() || chosen.iter().any(|name| name == part);
    let parts: Vec<&'static str> = PARTS.iter().copied().filter(|part| is_chosen(part)).collect();
    let mut waves = vec![without_guests(&parts)?];
    let with_guests: Vec<&str> =
        parts.iter().copied().filter(|part| guests::PARTS.contains(part)).collect();
    let mut alone = Vec::new();
    // The folder of what the programs have claimed goes with this value.
    let mut guests = guests::Guests::default();
    if !with_guests.is_empty() {
        let programs = crates::build(&["--release"])?;
        guests = guests::all(&programs, &with_guests)?;
        waves.extend([std::mem::take(&mut guests.tracks), std::mem::take(&mut guests.later)]);
        alone.append(&mut guests.alone);
    }
    all.append(&mut guests.left_out);
    println!("{:6.1} s  set-up and build", begin.elapsed().as_secs_f64());
    for wave in waves {
        all.extend(run_tracks(wave, summary::say)?);
    }
    for part in parts.into_iter().filter(|part| ALONE.contains(part)) {
        match guests::why_not(part) {
            Some(why) => all.push(guests::without(part, &why)),
            None => alone.push(vec![script(part, "make", &[part])].into()),
        }
    }
    for track in alone {
        all.extend(run_tracks(vec![track], summary::say)?);
    }
    Ok(summary::print(&all, begin.elapsed()))
}

/// The tracks of a proof's parts without guests. They let those with guests go first.
fn without_guests(parts: &[&'static str]) -> Result<Vec<Track>> {
    let has = |part: &str| parts.contains(&part);
    let mut tracks = Vec::new();
    if has("crates") || has("specification") {
        // The inventory of the tests asks the programs.
        let programs = crates::build(&[])?;
        if has("crates") {
            let mut jobs = vec![crates::guest_init()];
            let whole = |job: Job| job.env("PLATEN_PROOF", "1");
            jobs.extend(crates::crates(&programs).into_iter().map(whole));
            let jobs = jobs.into_iter().map(Job::nice).collect();
            tracks.push(Track { jobs, at_once: CRATES_AT_ONCE });
        }
    }
    let mut jobs = Vec::new();
    if has("specification") {
        let rows = Job::new(
            "specification",
            "specification",
            Format::Plain,
            crate::me(),
            &["specification"],
        );
        jobs.extend([rows, crates::circles(), crates::words()]);
    }
    let scripts: [(&str, &str, &[&str]); 3] = [
        ("check", "make", &["check"]),
        ("loom", "scripts/loom", &[]),
        ("fuzz", "fuzz/run.sh", &["60"]),
    ];
    let scripts = scripts.into_iter().filter(|(part, ..)| has(part));
    jobs.extend(scripts.map(|(part, program, arguments)| script(part, program, arguments).nice()));
    tracks.push(jobs.into());
    Ok(tracks)
}

fn script(part: &'static str, program: &str, arguments: &[&str]) -> Job {
    Job::new(part, part, Format::Plain, program, arguments)
}
