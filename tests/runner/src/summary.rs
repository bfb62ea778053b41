//! The output while jobs run, and after the last one.

use std::fmt::Write as _;
use std::time::Duration;

use crate::job::Done;
use crate::outcome::Test;

/// How many lines of a failed job's output are printed.
const TAIL: usize = 120;

/// One line about a job that has ended.
pub(crate) fn say(done: &Done) {
    let outcome = &done.outcome;
    let verdict = if outcome.failed.is_empty() { "ok" } else { "FAILED" };
    println!(
        "{:6.1} s {:6.1} CPU s  {:14} {:44} {:4} passed {:3} failed {:3} skipped  {verdict}",
        done.took.as_secs_f64(),
        done.cpu,
        done.part,
        done.name,
        outcome.passed.len(),
        outcome.failed.len(),
        outcome.skipped.len(),
    );
}

/// Prints the summary. Returns whether everything passed.
pub(crate) fn print(all: &[Done], took: Duration) -> bool {
    let (text, passed) = summary(all, took);
    print!("{text}");
    passed
}

/// The summary: time of each part, ten slowest tests, skipped tests, failures. Also returns whether
/// everything passed.
pub(crate) fn summary(all: &[Done], took: Duration) -> (String, bool) {
    let mut text = String::new();
    macro_rules! line {
        ($($word:tt)*) => { writeln!(text, $($word)*).expect("a string takes all") };
    }
    line!("\nparts (jobs run side by side: the sum is more than the whole)");
    let mut parts: Vec<&str> = all.iter().map(|done| done.part).collect();
    parts.dedup();
    let mut seen = Vec::new();
    for part in parts {
        if !seen.contains(&part) {
            seen.push(part);
            let of_part = || all.iter().filter(|done| done.part == part);
            let seconds: f64 = of_part().map(|done| done.took.as_secs_f64()).sum();
            let cpu: f64 = of_part().map(|done| done.cpu).sum();
            line!("{seconds:8.1} s {cpu:8.1} CPU s  {part}");
        }
    }
    line!("{:8.1} s  in all", took.as_secs_f64());

    let mut tests: Vec<&Test> = all.iter().flat_map(|done| &done.outcome.passed).collect();
    tests.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    line!("\nten slowest tests");
    for test in tests.iter().take(10) {
        line!("{:8.1} s  {}", test.seconds, test.name);
    }

    let skipped: Vec<_> = all.iter().flat_map(|done| &done.outcome.skipped).collect();
    if !skipped.is_empty() {
        line!("\nskipped");
        skipped.iter().for_each(|(name, why)| line!("  {name}: {why}"));
    }
    let failed: Vec<_> = all.iter().filter(|done| !done.outcome.failed.is_empty()).collect();
    for done in &failed {
        line!("\n---- {} ({}) ----", done.name, done.log.display());
        let lines: Vec<&str> = done.output.lines().collect();
        lines[lines.len().saturating_sub(TAIL)..].iter().for_each(|line| line!("{line}"));
    }
    for (name, why) in failed.iter().flat_map(|done| &done.outcome.failed) {
        line!("failed: {name}: {why}");
    }
    let failures: usize = failed.iter().map(|done| done.outcome.failed.len()).sum();
    line!("\n{} passed, {failures} failed, {} skipped", tests.len(), skipped.len());
    (text, failures == 0)
}
