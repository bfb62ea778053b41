//! The parts of a proof: the build, the jobs and the tracks of each.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{bail, ensure, Result};

use crate::cargo::{self, Program};
use crate::job::{run_tracks, Done, Job, Track};
use crate::outcome::{Format, Outcome};
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

/// The number of programs among which `make test` divides the whole-VM tests. Each boots the VMs
/// that its scenarios share, so more of them cost more CPU. Fewer would wait too much of their
/// time, above all for timeouts.
const SHARDS: usize = 3;

/// The number of the crates' test programs that run at once: many of them wait for timeouts.
const CRATES_AT_ONCE: usize = 4;

/// The crates' test programs that take longest. They come first, so that none of them is left alone
/// at the end.
const LONGEST: [&str; 8] = [
    "relay/carry",
    "platen/saved",
    "qat/simulated",
    "platen/host",
    "platen/device",
    "controller/sim",
    "store",
    "platen/device_hung",
];

/// A fetch script with its arguments, and the variable by which a user opts out of it.
type Fetched = (&'static str, &'static [&'static str], &'static str);

/// The builds that `make test` and `make proof` need.
const FETCHED: [Fetched; 5] = [
    ("scripts/fetch-qemu", &["10"], "PLATEN_SKIP_QEMU10"),
    ("scripts/fetch-linux612", &[], SKIP_SWAP),
    ("scripts/fetch-qat", &[], "PLATEN_SKIP_QAT"),
    ("scripts/fetch-qpl", &[], "PLATEN_SKIP_QPL"),
    ("scripts/fetch-libvirt", &[], SKIP_LIBVIRT),
];

const SKIP_SWAP: &str = "PLATEN_SKIP_SWAP";
const SKIP_LIBVIRT: &str = "PLATEN_SKIP_LIBVIRT";
const SKIP_PACKAGES: &str = "PLATEN_SKIP_PACKAGES";

/// The builds that only `make proof` needs.
const FETCHED_FOR_PROOF: [Fetched; 4] = [
    ("scripts/fetch-qemu", &["11"], "PLATEN_SKIP_QEMU11"),
    ("scripts/fetch-linux7", &[], SKIP_SWAP),
    ("scripts/fetch-libvirt", &["trixie"], SKIP_LIBVIRT),
    ("scripts/fetch-libvirt", &["forky"], SKIP_LIBVIRT),
];

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
        let built = build(&[]);
        (built, fetching.join())
    });
    let programs = programs?;
    all.extend(fetched.map_err(|_| anyhow::anyhow!("the fetch track has panicked"))??);
    println!("{:6.1} s  set-up and build", begin.elapsed().as_secs_f64());

    let shard = |number: usize| {
        let name = format!("vm {number} of {SHARDS}");
        harness(&programs, "vm", &name, &["--quick", "--shard", &format!("{number}/{SHARDS}")])
            .map(|job| Track::from(vec![job]))
    };
    let mut tracks = (1..=SHARDS).map(shard).collect::<Result<Vec<_>>>()?;
    // loom takes longest, so it comes first.
    let mut jobs = vec![
        Job::new("loom", "loom as written", Format::Plain, "scripts/loom", &["--as-written"]),
        Job::new("specification", "specification", Format::Plain, crate::me(), &["specification"]),
        circles(),
        words(),
        guest_init(),
    ];
    // The same cases in every run: a failure is one of the change. `make proof` takes new ones, and
    // all of those of which `PLATEN_QUICK` takes a part.
    let quick = |job: Job| job.env("PROPTEST_RNG_SEED", "20261101").env("PLATEN_QUICK", "1");
    jobs.extend(crates(&programs).into_iter().map(quick));
    tracks.push(Track { jobs, at_once: CRATES_AT_ONCE });
    // A guest that swaps goes on swapping while a test waits for it: what these guests do takes
    // three times the CPU time when others get as much of the CPUs.
    for track in &mut tracks {
        track.jobs = std::mem::take(&mut track.jobs).into_iter().map(Job::nice).collect();
    }
    tracks.extend(swap_and_libvirt(&programs, &mut all)?);
    all.extend(run_tracks(tracks, summary::say)?);
    Ok(summary::print(&all, begin.elapsed()))
}

/// The tracks of the guests that swap, which take longest, and of the hosts under libvirt. The
/// latter come last, when fewer tests run beside them: their QEMU loses a guest's writes under TCG
/// (tests/libvirt/src/domain.rs), the more the busier the machine is.
fn swap_and_libvirt(programs: &[Program], all: &mut Vec<Done>) -> Result<Vec<Track>> {
    let mut tracks: Vec<Track> = Vec::new();
    match why_not("swap") {
        Some(why) => all.push(without("swap", &why)),
        None => {
            for shard in ["1/2", "2/2"] {
                let name = format!("swap {}", shard.replace('/', " of "));
                let arguments = ["--quick", &format!("--shard={shard}")];
                tracks.push(vec![harness(programs, "swap", &name, &arguments)?].into());
            }
        }
    }
    match why_not("libvirt") {
        Some(why) => all.push(without("libvirt", &why)),
        None => {
            let job = harness(programs, "libvirt", "libvirt", &["--quick"])?;
            match tracks.last_mut() {
                Some(track) => track.jobs.push(job),
                None => tracks.push(vec![job].into()),
            }
        }
    }
    Ok(tracks)
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
    for part in PARTS {
        if chosen.is_empty() || chosen.iter().any(|name| name == part) {
            println!("\n== {part}");
            for track in proof_jobs(part, &mut all)? {
                all.extend(run_tracks(vec![track.into()], summary::say)?);
            }
        }
    }
    Ok(summary::print(&all, begin.elapsed()))
}

/// The jobs of one part of a proof. If a part has several tracks, they run in sequence, because
/// they measure.
fn proof_jobs(part: &'static str, all: &mut Vec<Done>) -> Result<Vec<Vec<Job>>> {
    let script =
        |program: &str, arguments: &[&str]| Job::new(part, part, Format::Plain, program, arguments);
    Ok(match part {
        "check" => vec![vec![script("make", &["check"])]],
        "crates" => {
            let programs = build(&[])?;
            let mut jobs = vec![guest_init()];
            jobs.extend(crates(&programs).into_iter().map(|job| job.env("PLATEN_PROOF", "1")));
            vec![jobs]
        }
        "specification" => {
            build(&[])?;
            let rows = Job::new(part, part, Format::Plain, crate::me(), &["specification"]);
            vec![vec![rows, circles(), words()]]
        }
        "loom" => vec![vec![script("scripts/loom", &[])]],
        "fuzz" => vec![vec![script("fuzz/run.sh", &["60"])]],
        "vm" => vec![vec![harness(&build(&["--release"])?, "vm", "vm", &[])?]],
        "swap" | "libvirt" => match why_not(part) {
            Some(why) => {
                all.push(without(part, &why));
                vec![]
            }
            None if part == "libvirt" => {
                let programs = build(&["--release"])?;
                let mut jobs = vec![harness(&programs, part, part, &[])?];
                for (name, folder) in NEWER_LIBVIRT {
                    let job = harness(&programs, part, name, &WITH_NEWER_LIBVIRT)?;
                    jobs.push(job.env("PLATEN_LIBVIRT", folder));
                }
                vec![jobs]
            }
            None => {
                let programs = build(&["--release"])?;
                let newer = harness(&programs, part, "swap, Linux 7", &WITH_NEWER_LINUX)?;
                let newer = newer.env("PLATEN_SWAP_LINUX", NEWER_LINUX);
                vec![vec![harness(&programs, part, part, &[])?, newer]]
            }
        },
        "packages" => match why_not(part) {
            Some(why) => {
                all.push(without(part, &why));
                vec![]
            }
            None => vec![vec![script("make", &[part])]],
        },
        // The demos, by the commands that a user types.
        _ => vec![vec![script("make", &[part])]],
    })
}

/// Packages, the guest's kernel and its init.
fn set_up() -> Result<Done> {
    std::fs::create_dir_all(crate::job::log_folder())?;
    let done = Job::new("set-up", "set-up", Format::Plain, "scripts/setup", &[]).run()?;
    summary::say(&done);
    ensure!(done.outcome.failed.is_empty(), "{}", done.output.trim());
    Ok(done)
}

fn fetch(all: &[Fetched]) -> Vec<Job> {
    all.iter()
        .filter(|(_, _, skip)| !is_set(skip) && (*skip != SKIP_LIBVIRT || is_root()))
        .map(|(script, arguments, _)| {
            let name = [&[*script], *arguments].concat().join(" ");
            Job::new("set-up", &name, Format::Plain, script, arguments)
        })
        .collect()
}

/// Builds the product, the simulated device and every test program of the workspace.
fn build(profile: &[&str]) -> Result<Vec<Program>> {
    cargo::test_programs(&[&["--workspace"], profile].concat())
}

/// One job for each test program of the crates.
fn crates(programs: &[Program]) -> Vec<Job> {
    let is_root = is_root();
    let libtest = |program: &&Program| !cargo::SCENARIOS.contains(&&*program.name);
    let mut programs: Vec<&Program> = programs.iter().filter(libtest).collect();
    let place = |program: &&Program| {
        LONGEST.iter().position(|name| *name == program.name).unwrap_or(LONGEST.len())
    };
    programs.sort_by_key(place);
    programs
        .iter()
        .map(|program| {
            // The pinned toolchain's harness reports times only with this unstable option.
            let arguments = ["-Zunstable-options", "--report-time"];
            let path = program.path.to_string_lossy().into_owned();
            // Its own mount namespace: a network namespace that a whole-VM test enters at the same
            // time copies all mounts, and would hold a FUSE mount of a crate's test.
            let mut words = if is_root { vec!["unshare", "--mount", "--"] } else { Vec::new() };
            words.push(&path);
            words.extend(arguments);
            // Beside the folder of the test programs lie the libraries of the simulated device.
            let built = program.path.ancestors().nth(2).map(Path::to_owned).unwrap_or_default();
            Job::new("crates", &program.name, Format::Libtest, words[0], &words[1..])
                .env("PLATEN_QAT_SIM_BUILT", built)
                .env("RUSTC_BOOTSTRAP", "1")
                .env("CARGO_MANIFEST_DIR", &program.folder)
                .folder(&program.folder)
        })
        .collect()
}

/// The search for modules of the product that import each other.
fn circles() -> Job {
    Job::new("specification", "circles", Format::Plain, crate::me(), &["circles"])
}

/// The check of comments and documents.
fn words() -> Job {
    Job::new("specification", "words", Format::Plain, crate::me(), &["words"])
}

/// The tests of the guest's init, which is a separate workspace.
fn guest_init() -> Job {
    let target = crate::root().join("target/vm/guest-build");
    Job::new("crates", "guest init", Format::Libtest, "cargo", &["test", "--locked"])
        .env("CARGO_TARGET_DIR", target)
        .env("RUSTFLAGS", "")
        .folder("tests/vm/guest")
}

/// A job of the whole-VM tests (`vm`), of the swap guests (`swap`), or under libvirt (`libvirt`).
fn harness(
    programs: &[Program],
    part: &'static str,
    name: &str,
    arguments: &[&str],
) -> Result<Job> {
    let is_wanted = |program: &&Program| {
        cargo::SCENARIOS.contains(&&*program.name) && program.name.ends_with(&format!("/{part}"))
    };
    let Some(program) = programs.iter().find(is_wanted) else {
        bail!("cargo has built no program of the scenarios of {part}");
    };
    Ok(Job::new(part, name, Format::Scenarios, &program.path, arguments))
}

/// Why a part cannot run, or shall not; `None` if it does.
fn why_not(part: &str) -> Option<String> {
    let skip = match part {
        "swap" => SKIP_SWAP,
        "packages" => SKIP_PACKAGES,
        _ => SKIP_LIBVIRT,
    };
    if is_set(skip) {
        return Some(format!("{skip} is set"));
    }
    let needs_root = ["libvirt", "packages"].contains(&part);
    (needs_root && !is_root()).then(|| "it needs root, for namespaces and mounts".into())
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Stands for a part that does not run, for the reason given; it counts as skipped.
fn without(part: &'static str, why: &str) -> Done {
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

fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;
    use std::time::Duration;

    /// Without the fetched builds tests do not run: nobody is to take that for a success.
    #[test]
    fn a_fetch_that_fails_makes_the_run_fail_and_says_how_to_do_without() {
        let folder = tempfile::tempdir().unwrap();
        let made = |name: &str, text: &str| -> &'static str {
            let path = folder.path().join(name);
            // By another process: those that other tests start at that moment would inherit a
            // descriptor that is open for writing, and such a file cannot be executed.
            let made = "printf %s \"$1\" > \"$2\" && chmod 755 \"$2\"";
            let made = Command::new("sh").args(["-c", made, "sh", text]).arg(&path).status();
            assert!(made.unwrap().success());
            path.display().to_string().leak()
        };
        let private = fs::read_to_string(crate::root().join("scripts/apt-private")).unwrap();
        let helper = made("apt-private", &private);
        let fails = format!(
            "#!/bin/sh\nme=fetch-it skip={SKIP_SWAP}\n. {helper}\nfail 'no such package'\n"
        );
        let fails = made("fetch-it", &fails);
        let run = |all: &[Fetched]| -> Vec<Done> {
            let jobs = fetch(all).into_iter();
            jobs.map(|job| job.run_in(folder.path()).unwrap()).collect()
        };
        // Not the variable itself: whoever runs this test may have set it.
        let mut all = run(&[(fails, &[], "PLATEN_SKIP_IN_A_TEST")]);
        all.extend(run(&[("true", &[], "PLATEN_SKIP_IN_A_TEST")]));
        let (text, passed) = summary::summary(&all, Duration::ZERO);
        assert!(!passed, "{text}");
        assert!(text.contains("fetch-it: no such package"), "{text}");
        assert!(text.contains("PLATEN_SKIP_SWAP=1 makes the tests do without it"), "{text}");
        assert!(text.ends_with("\n1 passed, 1 failed, 0 skipped\n"), "{text}");
        // Whoever does without is told what is left out.
        let left_out = without("swap", "PLATEN_SKIP_SWAP is set");
        let (text, passed) = summary::summary(&[left_out], Duration::ZERO);
        assert!(passed && text.contains("swap: PLATEN_SKIP_SWAP is set"), "{text}");
    }

    #[test]
    fn each_fetch_script_names_the_variable_that_leaves_it_out() {
        for (script, arguments, skip) in FETCHED.iter().chain(&FETCHED_FOR_PROOF) {
            let text = fs::read_to_string(crate::root().join(script)).unwrap();
            let number = arguments.first().unwrap_or(&"");
            let named = text.contains(&format!("skip={skip}\n"))
                || text.contains("skip=PLATEN_SKIP_QEMU$number\n")
                    && *skip == format!("PLATEN_SKIP_QEMU{number}");
            assert!(named, "{script} {number}: {skip}");
        }
    }
}
