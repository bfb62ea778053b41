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
    "packages",
    "swap",
    "demo",
    "demo-memory",
    "memory-matrix",
];

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

/// `make proof`: everything, or the named parts.
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
    let mut parts: Vec<&'static str> = PARTS.to_vec();
    parts.retain(|part| chosen.is_empty() || chosen.iter().any(|name| name == part));
    let has_guests = |part: &&&str| guests::PARTS.contains(*part);
    let with_guests: Vec<&str> = parts.iter().filter(has_guests).copied().collect();
    for part in parts {
        if with_guests.first() == Some(&part) {
            println!("\n== {}", with_guests.join(", "));
            let programs = crates::build(&["--release"])?;
            let mut guests = guests::all(&programs, &with_guests)?;
            all.append(&mut guests.left_out);
            all.extend(run_tracks(std::mem::take(&mut guests.tracks), summary::say)?);
            all.extend(run_tracks(std::mem::take(&mut guests.alone), summary::say)?);
        } else if !guests::PARTS.contains(&part) {
            println!("\n== {part}");
            match guests::why_not(part) {
                Some(why) => all.push(guests::without(part, &why)),
                None => all.extend(run_tracks(vec![track(part)?], summary::say)?),
            }
        }
    }
    Ok(summary::print(&all, begin.elapsed()))
}

/// The jobs of one part of a proof, without guests of the runner's own.
fn track(part: &'static str) -> Result<Track> {
    let script =
        |program: &str, arguments: &[&str]| Job::new(part, part, Format::Plain, program, arguments);
    Ok(match part {
        "crates" => {
            let programs = crates::build(&[])?;
            let mut jobs = vec![crates::guest_init()];
            let whole = |job: Job| job.env("PLATEN_PROOF", "1");
            jobs.extend(crates::crates(&programs).into_iter().map(whole));
            Track { jobs, at_once: CRATES_AT_ONCE }
        }
        "specification" => {
            crates::build(&[])?;
            let rows = Job::new(part, part, Format::Plain, crate::me(), &["specification"]);
            vec![rows, crates::circles(), crates::words()].into()
        }
        "loom" => vec![script("scripts/loom", &[])].into(),
        "fuzz" => vec![script("fuzz/run.sh", &["60"])].into(),
        // The checks, the packages and the demos, by the commands that a user types.
        _ => vec![script("make", &[part])].into(),
    })
}
