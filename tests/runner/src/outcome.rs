//! Parses a job's output: tests passed, failed and skipped, and the time of each.

use crate::job::Job;

/// The format of a job's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Rust's test harness with `--report-time`: `test NAME ... ok <0.123s>`. With `--show-output`
    /// a test that prints a line `skipped: REASON` counts as skipped.
    Libtest,
    /// `vm` and `swap` of `tests/vm`, `libvirt` of `tests/libvirt`: `test NAME ... ok (1.2 s)`.
    Scenarios,
    /// Any text: the job counts as one test.
    Plain,
}

/// One test.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Test {
    pub(crate) name: String,
    pub(crate) seconds: f64,
}

/// The result of a job.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) passed: Vec<Test>,
    /// Names and reasons.
    pub(crate) failed: Vec<(String, String)>,
    /// Names and reasons.
    pub(crate) skipped: Vec<(String, String)>,
}

/// Parses a job's output. `error` says why its process failed, if it did.
pub(crate) fn read(job: &Job, error: Option<String>, output: &str) -> Outcome {
    let mut outcome = Outcome::default();
    if job.format != Format::Plain {
        // Behind the results come the outputs of the tests, which may have such lines, too.
        let results = match job.format {
            Format::Libtest => output.split("\nsuccesses:\n").next().unwrap_or(output),
            _ => output,
        };
        results.lines().for_each(|line| read_line(&job.name, line, &mut outcome));
        add_causes(&job.name, output, &mut outcome);
        add_skips(&job.name, output, &mut outcome);
    }
    match error {
        None if job.format == Format::Plain => {
            outcome.passed.push(Test { name: job.name.clone(), seconds: 0.0 });
        }
        // A process that fails without a failed test has crashed, or has printed the reason before
        // its first test.
        Some(error) if outcome.failed.is_empty() => outcome.failed.push((job.name.clone(), error)),
        _ => {}
    }
    outcome
}

fn read_line(job: &str, line: &str, outcome: &mut Outcome) {
    // A test's output without a newline may precede the line.
    let Some((name, rest)) = line.strip_prefix("test ").and_then(|line| line.rsplit_once(" ... "))
    else {
        return;
    };
    let name = format!("{job}::{name}");
    if let Some(time) = rest.strip_prefix("ok") {
        let digits: String = time.chars().filter(|c| c.is_ascii_digit() || *c == '.').collect();
        outcome.passed.push(Test { name, seconds: digits.parse().unwrap_or(0.0) });
    } else if rest.starts_with("FAILED") {
        outcome.failed.push((name, rest.to_owned()));
    } else if rest.starts_with("skipped") || rest.starts_with("ignored") {
        outcome.skipped.push((name, rest.to_owned()));
    }
}

/// Adds the first line of each failed test's error to its reason: the output of the job may be too
/// long to be printed whole.
fn add_causes(job: &str, output: &str, outcome: &mut Outcome) {
    let mut lines = output.lines().peekable();
    // The test whose output the harness of Rust prints.
    let mut printed = None;
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----"))
        {
            printed = Some(name);
        }
        let scenario =
            || line.strip_prefix("test ")?.split_once(" ... FAILED").map(|(name, _)| name);
        let name = if line.contains(" panicked at ") { printed.take() } else { scenario() };
        let (Some(name), Some(cause)) = (name, lines.peek()) else { continue };
        let name = format!("{job}::{name}");
        let failed = outcome.failed.iter_mut().find(|(failed, _)| *failed == name);
        if let Some((_, reason)) =
            failed.filter(|_| !cause.is_empty() && !cause.starts_with("test "))
        {
            reason.push_str(": ");
            reason.push_str(cause.trim());
        }
    }
}

/// Moves the tests of the harness of Rust that have skipped something to the skipped ones. The
/// harness has no such result.
fn add_skips(job: &str, output: &str, outcome: &mut Outcome) {
    let mut printed = None;
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----"))
        {
            printed = Some(name);
        }
        let Some(name) = printed.filter(|_| line.starts_with("skipped")) else { continue };
        let name = format!("{job}::{name}");
        if let Some(at) = outcome.passed.iter().position(|test| test.name == name) {
            outcome.passed.remove(at);
            outcome.skipped.push((name, line.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(format: Format, error: Option<&str>, output: &str) -> Outcome {
        let job = Job::new("part", "job", format, "true", &[]);
        read(&job, error.map(str::to_owned), output)
    }

    #[test]
    fn both_harnesses_are_read() {
        let said = "running 3 tests\ntest a::b ... ok <0.250s>\ntest c ... FAILED <1.0s>\n\
                    test d ... ignored, slow\ntest result: FAILED. 1 passed; 1 failed\n";
        let found = outcome(Format::Libtest, Some("exit status: 101"), said);
        assert_eq!(found.passed, [Test { name: "job::a::b".into(), seconds: 0.25 }]);
        assert_eq!(found.failed[0].0, "job::c");
        assert_eq!(found.skipped[0].1, "ignored, slow");
        let said = "test swap by ublk: whole ... ok (61.5 s)\ntest x ... skipped: no QEMU 10\n";
        let found = outcome(Format::Scenarios, None, said);
        assert_eq!(found.passed[0].seconds, 61.5);
        assert_eq!((found.failed.len(), found.skipped.len()), (0, 1));
    }

    /// Regression: such tests counted as passed.
    #[test]
    fn a_test_that_skips_something_is_no_success() {
        let said = "test a ... ok <0.1s>\ntest b::c ... ok <0.1s>\ntest d ... ok <0.1s>\n\
                    test e ... FAILED <0.1s>\n\nsuccesses:\n\n---- a stdout ----\n\
                    the test d is skipped\ntest inner ... ok\n\n---- b::c stdout ----\nfirst\n\
                    skipped: needs root\nskipped x: no recording\n\n\nsuccesses:\n    a\n    \
                    b::c\n    d\n\nfailures:\n\n---- e stdout ----\nskipped: y\n";
        let found = outcome(Format::Libtest, Some("exit status: 101"), said);
        let passed: Vec<_> = found.passed.iter().map(|test| test.name.as_str()).collect();
        assert_eq!(passed, ["job::a", "job::d"]);
        assert_eq!(found.skipped, [("job::b::c".into(), "skipped: needs root".into())]);
        assert_eq!(found.failed.len(), 1);
    }

    #[test]
    fn a_failure_is_printed_with_its_cause() {
        let said = "test a ... FAILED <1.0s>\ntest b ... FAILED <0.1s>\n\nfailures:\n\n\
                    ---- a stdout ----\n\nthread 'a' panicked at x.rs:3:5:\nit hangs\nstack:\n\
                    ---- b stdout ----\nError: \"no file\"\n";
        let found = outcome(Format::Libtest, Some("exit status: 101"), said);
        assert_eq!(found.failed[0].1, "FAILED <1.0s>: it hangs");
        assert_eq!(found.failed[1].1, "FAILED <0.1s>");
        let said = "test x ... FAILED (56.6 s)\n  5 migrations missed it\n  relay: listening\n\
                    test y ... FAILED (1 s)\ntest z ... ok (1 s)\n";
        let found = outcome(Format::Scenarios, Some("exit status: 2"), said);
        assert_eq!(found.failed[0].1, "FAILED (56.6 s): 5 migrations missed it");
        assert_eq!(found.failed[1].1, "FAILED (1 s)");
    }

    #[test]
    fn a_process_that_dies_is_a_failure() {
        let found = outcome(Format::Libtest, Some("signal: 9 (SIGKILL)"), "test a ... ok <1s>\n");
        assert_eq!(found.failed, [("job".into(), "signal: 9 (SIGKILL)".into())]);
        let found = outcome(Format::Plain, None, "anything");
        assert_eq!(found.passed.len(), 1);
    }
}
