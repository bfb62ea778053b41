//! The whole-VM tests, one after the other.
//!
//! ```text
//! cargo test --release -p vm-tests --test vm -- [FILTER...] [--list] [--quick]
//!     [--only-measurements | --without-measurements] [--shard=N/M [--claims=FOLDER]]
//! ```
//!
//! A scenario runs if its name contains one of the filters; with `--quick`, if it is in the choice
//! of `make test`. Programs with the same folder of claims share the scenarios out among themselves
//! (`vm_tests::Shard`). Needs the files of `scripts/setup` and the binary of the same profile.
//! `PLATEN_VM_LOOPBACK=1` does without namespaces.

mod accelerator;
mod advise;
mod auto;
mod bad_input;
mod bare;
mod cancel;
mod choice;
mod clones;
mod course;
mod doors;
mod doubt;
mod ending;
mod evacuate;
mod guest;
mod intercept;
mod kill;
mod latency;
mod matrix;
mod moves;
mod phase;
mod postcopy;
mod postcopy_links;
mod rehearse;
mod remote;
mod resume;
mod room;
mod saved;
mod saved_limit;
mod saved_memory;
mod security;
mod seed;
mod several;
mod stage;
mod versions;

use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use stage::{Skip, Stage};
use vm_tests::{cleanup, platen};

/// A test: a claim, and the code that checks it.
pub(crate) struct Scenario {
    /// A claim.
    name: String,
    /// Whether it uses the binary under test.
    needs_platen: bool,
    /// Whether it is in the quick choice, which [`choice`] also lists by name.
    quick: bool,
    /// Whether it measures time or CPU, so that others beside it would spoil it.
    measures: bool,
    run: Box<Run>,
}

type Run = dyn Fn(&mut Stage) -> anyhow::Result<()>;

impl Scenario {
    pub(crate) fn new(
        name: impl Into<String>,
        run: impl Fn(&mut Stage) -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            needs_platen: true,
            quick: false,
            measures: false,
            run: Box::new(run),
        }
    }

    /// A scenario about the guest or QEMU alone.
    pub(crate) fn without_platen(
        name: impl Into<String>,
        run: impl Fn(&mut Stage) -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self { needs_platen: false, ..Self::new(name, run) }
    }

    /// A scenario that measures.
    pub(crate) fn measurement(
        name: impl Into<String>,
        run: impl Fn(&mut Stage) -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self { measures: true, ..Self::new(name, run) }
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether one page of a guest arrived half updated: a write that QEMU itself has lost (see
/// `torn.rs` of the guest). That is rare, and a scenario may meet it once.
fn is_qemus_own(error: &anyhow::Error) -> bool {
    let said = format!("{error:#}");
    said.contains("@bad pages=1 ") && said.contains("torn=yes")
}

/// Runs the chosen scenarios; returns how many failed.
fn run() -> anyhow::Result<u32> {
    let all = [
        guest::scenarios(),
        moves::scenarios(),
        auto::scenarios(),
        accelerator::scenarios(),
        cancel::scenarios(),
        kill::scenarios(),
        several::scenarios(),
        evacuate::scenarios(),
        security::scenarios(),
        resume::scenarios(),
        latency::scenarios(),
        bad_input::scenarios(),
        versions::scenarios(),
        course::scenarios(),
        postcopy::scenarios(),
        postcopy_links::scenarios(),
        matrix::scenarios(),
        doubt::scenarios(),
        ending::scenarios(),
        rehearse::scenarios(),
        intercept::scenarios(),
        doors::scenarios(),
        advise::scenarios(),
        saved::scenarios(),
        saved_limit::scenarios(),
        saved_memory::scenarios(),
        seed::scenarios(),
        clones::scenarios(),
        remote::scenarios(),
    ];
    let choice = choice::Choice::new(std::env::args().skip(1))?;
    let chosen = choice.of(all.into_iter().flatten().collect())?;
    let order = choice.shard.order(chosen.len());
    if choice.list {
        for scenario in &order {
            println!("{}: test", chosen[*scenario].name);
        }
        return Ok(0);
    }

    cleanup::install()?;
    if chosen.iter().any(|s| s.needs_platen) {
        println!("binary under test: {}", platen::binary()?.display());
    }
    let mut stage = Stage::new()?;
    println!("up to {} scenarios ({})", order.len(), stage.lab.net.describe());
    let (mut passed, mut failed, mut skipped) = (0u32, Vec::new(), 0u32);
    for number in order {
        if !choice.shard.claim(number)? {
            continue;
        }
        let scenario = &chosen[number];
        let (begin, wall) = (Instant::now(), SystemTime::now());
        let mut result = stage.prepare().and_then(|()| (scenario.run)(&mut stage));
        if let Some(error) = result.as_ref().err().filter(|error| is_qemus_own(error)) {
            println!("  QEMU has lost a write (TCG), so once more: {error:#}");
            stage.print_logs(wall);
            stage.discard();
            result = stage.prepare().and_then(|()| (scenario.run)(&mut stage));
        }
        let took = begin.elapsed().as_secs_f64();
        match result {
            Ok(()) => {
                passed += 1;
                println!("test {} ... ok ({took:.1} s)", scenario.name);
            }
            Err(error) if error.is::<Skip>() => {
                skipped += 1;
                println!("test {} ... skipped: {error}", scenario.name);
            }
            Err(error) => {
                println!("test {} ... FAILED ({took:.1} s)\n  {error:#}", scenario.name);
                stage.print_logs(wall);
                stage.discard();
                failed.push(scenario.name.as_str());
            }
        }
    }
    drop(stage);
    for name in &failed {
        println!("failed: {name}");
    }
    println!("{passed} passed, {} failed, {skipped} skipped", failed.len());
    Ok(u32::try_from(failed.len())?)
}
