//! `make demo`: migrates a VM that constantly writes to its memory, then saves and restores a
//! larger one, each by platen and by QEMU's own methods. After each migration and restore the guest
//! recomputes every byte of its memory. The last lines say what platen has gained or lost.

mod migration;
mod saved;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use vm_tests::{cleanup, platen, Lab};

fn main() -> ExitCode {
    match demo() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\ndemo: {error:#}");
            eprintln!(
                "Nothing was left running. If a package or the guest's kernel is missing: \
                 scripts/setup"
            );
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<()> {
    cleanup::install()?;
    // Check before anything is started.
    platen::binary()?;
    let begin = Instant::now();
    let lab = Lab::new()?;
    let migrated = migration::run(&lab)?;
    let saved = saved::run(&lab)?;
    println!("\nWhole demo: {:.0} s.\n", begin.elapsed().as_secs_f64());
    println!("Live migration: {migrated}");
    println!("Saved VM: {saved}");
    Ok(())
}
