//! `runner test` and `runner proof [PART...]`: the work of `make test` and `make proof`.
//!
//! ```text
//! set-up ─► build ─► jobs on several tracks side by side ─► times, ten slowest, failures
//! ```
//!
//! A *part* is a kind of proof ([`parts::PARTS`]). A *job* is one process: a test program of `cargo
//! test`, a shard of the whole-VM tests, a script. Jobs of one track run in sequence. Tracks run in
//! parallel, because most tests wait more than they compute; a proof runs them in waves. No test
//! may depend on the machine's speed, so the order of jobs does not affect results.
//!
//! The last line is `N passed, N failed, N skipped`. The exit status is 0 only if nothing failed.
//!
//! `runner specification` only checks that each row of SPECIFICATION.md names tests that exist;
//! `runner circles FOLDER...` only checks that no modules of these crates import each other;
//! `runner words` only checks comments and documents.

mod cargo;
mod circles;
mod crates;
mod fetched;
mod guests;
mod job;
mod outcome;
mod parts;
mod specification;
mod summary;
mod words;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::{bail, Result};

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("runner: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether everything passed.
fn run() -> Result<bool> {
    me();
    std::env::set_current_dir(root())?;
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first() {
        Some((word, [])) if word == "test" => parts::test(),
        Some((word, parts)) if word == "proof" => parts::proof(parts),
        Some((word, [])) if word == "specification" => specification::print(),
        Some((word, folders)) if word == "circles" => circles::print(folders),
        Some((word, [])) if word == "words" => words::print(),
        _ => bail!(
            "usage: runner test | proof [PART...] | specification | circles FOLDER... | words"
        ),
    }
}

/// This program's path. The build may replace the file: it is asked for before.
fn me() -> &'static Path {
    static ME: OnceLock<PathBuf> = OnceLock::new();
    ME.get_or_init(|| std::env::current_exe().unwrap_or_default())
}

/// The repository's root.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}
