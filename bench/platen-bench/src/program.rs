//! The program that is measured, and the libraries of its QAT device.

use anyhow::{ensure, Context};
use clap::Args;
use qat::Location;
use std::env::current_exe;
use std::path::PathBuf;
use std::process::Command;

/// The path of `platen` in this program's folder.
pub(crate) fn platen() -> anyhow::Result<PathBuf> {
    let own = current_exe().context("cannot tell where platen-bench is")?;
    let platen = own.with_file_name("platen");
    ensure!(
        platen.is_file(),
        "{} does not exist: build it with `cargo build --release -p platen`",
        platen.display()
    );
    Ok(platen)
}

/// A command that runs this program again: on a simulated QAT device with `script`, or on this
/// host's.
pub(crate) fn again(script: Option<&str>) -> anyhow::Result<Command> {
    let own = current_exe().context("cannot tell where platen-bench is")?;
    let Some(script) = script else { return Ok(Command::new(own)) };
    let mut command = Command::new(platen()?);
    command.args(["qat", "sim", "--"]).arg(own).env("PLATEN_QAT_SIM", script);
    Ok(command)
}

/// Places of the QAT libraries.
#[derive(Args, Debug)]
pub(crate) struct QatLibraries {
    /// Folder of libqat.so.4 and libusdm.so.0 [default: the dynamic linker's search path]
    #[arg(long, value_name = "DIR")]
    pub(crate) qat_libraries: Option<PathBuf>,
}

impl QatLibraries {
    pub(crate) fn location(&self) -> Location {
        self.qat_libraries.clone().map_or(Location::System, Location::Folder)
    }
}
