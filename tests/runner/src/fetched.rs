//! Set-up: packages, and the builds of others that tests need.

use anyhow::{ensure, Result};

use crate::guests::is_root;
use crate::job::{log_folder, Done, Job};
use crate::outcome::Format;
use crate::summary;

/// A fetch script with its arguments, and the variable by which a user opts out of it.
pub(crate) type Fetched = (&'static str, &'static [&'static str], &'static str);

/// The builds that `make test` and `make proof` need.
pub(crate) const FETCHED: [Fetched; 5] = [
    ("scripts/fetch-qemu", &["10"], "PLATEN_SKIP_QEMU10"),
    ("scripts/fetch-linux612", &[], SKIP_SWAP),
    ("scripts/fetch-qat", &[], "PLATEN_SKIP_QAT"),
    ("scripts/fetch-qpl", &[], "PLATEN_SKIP_QPL"),
    ("scripts/fetch-libvirt", &[], SKIP_LIBVIRT),
];

/// The builds that only `make proof` needs.
pub(crate) const FETCHED_FOR_PROOF: [Fetched; 5] = [
    ("scripts/fetch-qemu", &["11"], "PLATEN_SKIP_QEMU11"),
    ("scripts/fetch-linux7", &[], SKIP_SWAP),
    ("scripts/fetch-libvirt", &["trixie"], SKIP_LIBVIRT),
    ("scripts/fetch-libvirt", &["forky"], SKIP_LIBVIRT),
    // A crate's test needs its rpmbuild, beside the part of the packages.
    ("scripts/fetch-packaging", &[], SKIP_PACKAGES),
];

pub(crate) const SKIP_SWAP: &str = "PLATEN_SKIP_SWAP";
pub(crate) const SKIP_LIBVIRT: &str = "PLATEN_SKIP_LIBVIRT";
pub(crate) const SKIP_PACKAGES: &str = "PLATEN_SKIP_PACKAGES";

/// The variables of builds that only root can unpack and use.
const NEEDS_ROOT: [&str; 2] = [SKIP_LIBVIRT, SKIP_PACKAGES];

/// Packages, the guest's kernel and its init.
pub(crate) fn set_up() -> Result<Done> {
    std::fs::create_dir_all(log_folder())?;
    let done = Job::new("set-up", "set-up", Format::Plain, "scripts/setup", &[]).run()?;
    summary::say(&done);
    ensure!(done.outcome.failed.is_empty(), "{}", done.output.trim());
    Ok(done)
}

/// The jobs of the fetch scripts whose builds the user has not left out.
pub(crate) fn fetch(all: &[Fetched]) -> Vec<Job> {
    all.iter()
        .filter(|(_, _, skip)| !is_set(skip) && (!NEEDS_ROOT.contains(skip) || is_root()))
        .map(|(script, arguments, _)| {
            let name = [&[*script], *arguments].concat().join(" ");
            Job::new("set-up", &name, Format::Plain, script, arguments)
        })
        .collect()
}

/// Whether this variable leaves something out.
pub(crate) fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guests::without;
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
