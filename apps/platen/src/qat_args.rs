//! The arguments of `platen qat`, and those for QAT of other commands.

use clap::Args;
use std::path::PathBuf;

/// Compressor, or decompressor, of codec qatzip.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// A QAT device, by libqat, if the host has one; else software.
    Auto,
    /// A QAT device, by libqat; without one the command fails before it touches the VM.
    Qat,
    /// Software.
    None,
}

/// Compressor of codecs qatzip and qpl at the source.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SourceAccelerator {
    /// qatzip: a QAT device, by libqat, if the host has one. qpl: libqpl with an IAA device if the
    /// host has both, else libqpl in software. Else platen's own software.
    Auto,
    /// A QAT device, by libqat; without one the command fails before it touches the VM.
    Qat,
    /// An IAA device, by libqpl; without one the command fails before it touches the VM.
    Iaa,
    /// Software.
    None,
}

/// Place of libqpl.
#[derive(Args, Debug)]
pub(crate) struct QplLibrary {
    /// File of Intel's libqpl, for codec qpl [default: libqpl.so.1 in the dynamic linker's search
    /// path]
    #[arg(long, value_name = "FILE")]
    pub(crate) qpl_library: Option<PathBuf>,
}

/// Places of the QAT libraries.
#[derive(Args, Debug)]
pub(crate) struct QatLibraries {
    /// Folder of libqat.so.4 and libusdm.so.0 [default: the dynamic linker's search path]
    #[arg(long, value_name = "DIR")]
    pub(crate) qat_libraries: Option<PathBuf>,
}

/// Arguments of `platen qat`.
#[derive(Args, Debug)]
pub(crate) struct QatArgs {
    #[command(subcommand)]
    pub(crate) command: QatCommand,
}

/// The commands of `platen qat`.
#[derive(clap::Subcommand, Debug)]
pub(crate) enum QatCommand {
    /// Show the QAT devices, libraries and instances of this host, and the parts that are missing
    Status(StatusArgs),
    /// Run a command on a simulated QAT device
    Sim(SimArgs),
}

/// Arguments of `platen qat status`.
#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Do not start the device. The status then lists no instances
    #[arg(long)]
    pub(crate) no_start: bool,
    #[command(flatten)]
    pub(crate) libraries: QatLibraries,
}

/// Arguments of `platen qat sim`.
#[derive(Args, Debug)]
pub(crate) struct SimArgs {
    /// Script with the device's properties and its faults (accel/qat-sim/SCRIPT.md)
    #[arg(long, value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,
    /// Write the device's counters to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Folder of the simulated libqat.so.4 and libusdm.so.0 [default: the folder of the platen
    /// program]
    #[arg(long = "libraries", value_name = "DIR")]
    pub(crate) simulated: Option<PathBuf>,
    /// Command to run, with its arguments
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<std::ffi::OsString>,
}
