//! Checks SPECIFICATION.md against the existing tests: a row names tests, and says where they run.
//!
//! A row of a table with the columns `held by` and `runs in` is a promise. Its `held by` cell has
//! clauses, separated by semicolons:
//!
//! ```text
//! `crate/file`: `test`, `test_with_*`      tests of one file or folder, also in clauses behind it
//! `crate/file`, all                        every test there
//! `scenario_*`                             whole-VM scenarios and swap guests
//! fuzz `target`                            a fuzz target, over its seeds and instrumented
//! `scripts/loom crate`                     the models of a crate, weakened
//! ```
//!
//! Each name in backticks must match something that exists. `runs in` must be `test` if `make test`
//! runs all of it, and `test, proof` if `make proof` adds to it. A row with nothing in `make test`
//! is an error.

mod inventory;

use std::fs;

use anyhow::{Context, Result};

use inventory::{Inventory, Place};

/// Prints the errors in SPECIFICATION.md; returns whether there are none.
///
/// # Errors
/// If it cannot be read, or the scenarios cannot be listed.
pub(crate) fn print() -> Result<bool> {
    let text = fs::read_to_string("SPECIFICATION.md").context("SPECIFICATION.md")?;
    let (rows, errors) = check(&text, &Inventory::of_the_repository()?);
    errors.iter().for_each(|error| println!("SPECIFICATION.md:{error}"));
    println!("{rows} promises, {} errors", errors.len());
    Ok(errors.is_empty())
}

/// Counts the promises and lists the errors by line.
fn check(text: &str, inventory: &Inventory) -> (usize, Vec<String>) {
    let (mut rows, mut errors) = (0, Vec::new());
    let mut in_table = false;
    for (number, line) in (1..).zip(text.lines()) {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        if !line.starts_with('|') {
            in_table = false;
        } else if cells.len() == 3 && cells[1] == "held by" && cells[2] == "runs in" {
            in_table = true;
        } else if in_table && !cells[0].starts_with("--") {
            rows += 1;
            let found = match cells.as_slice() {
                [_, held_by, runs_in] => row(held_by, runs_in, inventory),
                _ => vec![format!("{} cells instead of 3", cells.len())],
            };
            errors.extend(found.into_iter().map(|error| format!("{number}: {error}")));
        }
    }
    (rows, errors)
}

/// The errors of one row.
fn row(held_by: &str, runs_in: &str, inventory: &Inventory) -> Vec<String> {
    let mut errors = Vec::new();
    let mut places = Vec::new();
    let mut location = None;
    for clause in held_by.split(';') {
        for (nth, (name, after)) in names(clause).into_iter().enumerate() {
            if nth == 0 && after.starts_with(':') && inventory.has_location(name) {
                location = Some(name);
                continue;
            }
            // A scenario may follow the tests of a file.
            let mut found = inventory.find(location, name);
            if found.is_empty() {
                found = inventory.find(None, name);
            }
            if found.is_empty() {
                let within = location.map(|place| format!(" in {place}")).unwrap_or_default();
                errors.push(format!("`{name}`{within} names no test that exists"));
            }
            places.extend(found);
        }
    }
    if !errors.is_empty() {
        return errors;
    }
    let tested = places.contains(&Place::Test);
    let truth = if places.contains(&Place::Proof) { "test, proof" } else { "test" };
    if !tested {
        errors.push("nothing of it runs in `make test`".into());
    } else if runs_in != truth {
        errors.push(format!("'{runs_in}' should be '{truth}'"));
    }
    errors
}

/// The names in backticks, each with the text that follows it.
fn names(clause: &str) -> Vec<(&str, &str)> {
    let parts: Vec<&str> = clause.split('`').collect();
    parts
        .chunks_exact(2)
        .map(|pair| pair[1])
        .zip(parts.iter().skip(2).step_by(2).copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(row: &str) -> Vec<String> {
        let text = format!("| promise | held by | runs in |\n|---|---|---|\n{row}\n");
        check(&text, &Inventory::example()).1
    }

    #[test]
    fn rows_that_are_true_pass() {
        assert_eq!(errors("| a | `ring/loom`: `woken_*`, `full` | test |"), [""; 0]);
        assert_eq!(errors("| a | `ring/loom`, all; fuzz `unpack` | test, proof |"), [""; 0]);
        assert_eq!(errors("| a | `moves_*` | test, proof |"), [""; 0]);
        assert_eq!(errors("| a | `ring`: `full`; `scripts/loom ring` | test, proof |"), [""; 0]);
    }

    #[test]
    fn rows_that_are_not_are_named() {
        let wrong = |row: &str, why: &str| assert_eq!(errors(row), [format!("3: {why}")]);
        wrong(
            "| a | `ring/loom`: `gone` | test |",
            "`gone` in ring/loom names no test that exists",
        );
        wrong("| a | `ring/absent`, all | test |", "`ring/absent` names no test that exists");
        wrong("| a | `moves_*` | test |", "'test' should be 'test, proof'");
        wrong("| a | `slow_one` | proof |", "nothing of it runs in `make test`");
        wrong("| a | by construction | test |", "nothing of it runs in `make test`");
        wrong("| a | `ring`, all |", "2 cells instead of 3");
    }
}
