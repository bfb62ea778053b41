//! The build, and the jobs of tests without guests.

use std::path::Path;

use anyhow::Result;

use crate::cargo::{self, Program};
use crate::guests::is_root;
use crate::job::Job;
use crate::outcome::Format;

/// The number of the crates' test programs that run at once: many of them wait for timeouts.
pub(crate) const CRATES_AT_ONCE: usize = 4;

/// The crates' test programs that take longest. They come first, so that none of them is left alone
/// at the end.
const LONGEST: [&str; 11] = [
    "relay/carry",
    "platen/saved",
    "platen/migration",
    "platen/evacuate",
    "platen/device_renew",
    "qat/simulated",
    "platen/host",
    "platen/device",
    "controller/sim",
    "store",
    "platen/device_hung",
];

/// Builds the product, the simulated device and every test program of the workspace.
pub(crate) fn build(profile: &[&str]) -> Result<Vec<Program>> {
    cargo::test_programs(&[&["--workspace"], profile].concat())
}

/// One job for each test program of the crates.
pub(crate) fn crates(programs: &[Program]) -> Vec<Job> {
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
            // The pinned toolchain's harness reports times only with this unstable option. The
            // output of tests that pass says what they have skipped.
            let arguments = ["-Zunstable-options", "--report-time", "--show-output"];
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
pub(crate) fn circles() -> Job {
    Job::new("specification", "circles", Format::Plain, crate::me(), &["circles"])
}

/// The check of comments and documents.
pub(crate) fn words() -> Job {
    Job::new("specification", "words", Format::Plain, crate::me(), &["words"])
}

/// The tests of the guest's init, which is a separate workspace.
pub(crate) fn guest_init() -> Job {
    let target = crate::root().join("target/vm/guest-build");
    Job::new("crates", "guest init", Format::Libtest, "cargo", &["test", "--locked"])
        .env("CARGO_TARGET_DIR", target)
        .env("RUSTFLAGS", "")
        .folder("tests/vm/guest")
}
