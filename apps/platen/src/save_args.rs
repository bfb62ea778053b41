//! The arguments of `platen save`.

use crate::args::Channels;
use crate::compression::CompressionArgs;
use clap::{Args, ValueEnum};
use relay::UnixAddress;
use std::path::PathBuf;

/// Arguments of `platen save`.
#[derive(Args, Debug)]
pub(crate) struct SaveArgs {
    /// Image to write. A file of this name must not exist. In a store (`platen image init`), it
    /// shares pages with the other images there
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,
    /// Monitor socket of the QEMU; start QEMU with -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: UnixAddress,
    /// Stop the VM at the beginning, and save each page once
    #[arg(long, conflicts_with = "live")]
    pub(crate) stop: bool,
    /// Let the VM run while its RAM is saved, and stop it for the rest. This is the default
    #[arg(long)]
    live: bool,
    /// Save the VM as it is at the beginning, and let it run meanwhile (QEMU's
    /// background-snapshot): each page is saved once, before the VM changes it
    #[arg(long, conflicts_with_all = ["live", "stop"])]
    pub(crate) snapshot: bool,
    /// Number of QEMU's multifd channels, 0 to 255; 0 is a single stream. auto is 0
    #[arg(
        long,
        default_value = "auto",
        visible_alias = "multifd-channels",
        conflicts_with = "snapshot"
    )]
    pub(crate) channels: Channels,
    /// Seconds after which a VM that dirties pages faster than they are saved is stopped, 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=3600))]
    pub(crate) live_limit: u64,
    /// State of the VM after the save
    #[arg(long, value_enum, default_value = "continue")]
    pub(crate) then: Then,
    #[command(flatten)]
    pub(crate) compression: CompressionArgs,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// The state of a VM after it is saved.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// It continues. A VM that was paused stays paused.
    Continue,
    /// It stays paused, as after a migration: `cont` resumes it.
    Pause,
    /// Its QEMU exits once the image is complete and on disk.
    Quit,
}
