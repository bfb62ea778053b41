//! The arguments that `platen restore` and `platen virsh-restore` share.

use crate::descriptors::raise_descriptors;
use crate::image_watch;
use crate::remote_image::RemoteOptions;
use crate::report_file::check_file;
use crate::restore_player_link::PlayerOptions;
use crate::restore_source::Source;
use crate::saved_vm::write_json;
use crate::size::Size;
use clap::Args;
use image::Options;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// How a saved VM is loaded.
#[derive(Args, Debug)]
pub(crate) struct Loading {
    /// Another copy of the image, used if IMAGE is damaged. Repeatable
    #[arg(long, value_name = "IMAGE")]
    copy: Vec<PathBuf>,
    /// Load everything before the VM runs. Without this option the VM runs at once, if its QEMU
    /// supports that, and its RAM is loaded while it runs
    #[arg(long)]
    pub(crate) load: bool,
    /// Continue with a VM that runs already and lacks pages, because the command that restored it
    /// was killed or its image damaged. IMAGE is the same image, or a copy
    #[arg(long, conflicts_with = "load")]
    pub(crate) recover: bool,
    /// Compare the checksums of all units of IMAGE and its copies before the VM's QEMU is touched
    #[arg(long)]
    verify: bool,
    /// Number of decompression threads, 1 to 255 [default: the number of CPUs, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=255))]
    decompress_threads: Option<u16>,
    /// Bytes a second at which RAM that the VM has not asked for is loaded while it runs; 0 is no
    /// limit. Pages that it requests are not limited. Each of several VMs has this limit
    #[arg(long, value_name = "SIZE", default_value = "0")]
    push_rate: Size,
    /// Neither send the pages that earlier restores of this image asked for before the VM runs, nor
    /// record those that this one asks for
    #[arg(long)]
    no_hot_set: bool,
    #[command(flatten)]
    remote: RemoteOptions,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Loading {
    /// The image at `path` and its copies. With `--verify` those are left out whose checksums are
    /// wrong.
    ///
    /// # Errors
    /// One cannot be opened, or none is left; or the report cannot be put where `--json` says.
    pub(crate) fn sources<'a>(
        &'a self,
        path: &'a Path,
        shared: bool,
    ) -> anyhow::Result<Vec<Source<'a>>> {
        check_file(self.json.as_deref())?;
        // Each copy of a save may lie in hundreds of packs.
        raise_descriptors();
        image_watch::begin(image_watch::VMS)?;
        let mut sources = Source::all(path, &self.copy, shared, &self.remote)?;
        if self.verify {
            Source::verify(&mut sources, self.threads())?;
        }
        Ok(sources)
    }

    /// The number of threads that decode units.
    pub(crate) fn threads(&self) -> usize {
        self.decompress_threads.map_or(Options::default().threads, usize::from)
    }

    /// Options of the players, with `cache` bytes of decoded pages. `shared`: other VMs may be
    /// restored from the image.
    pub(crate) fn players(&self, cache: u64, shared: bool) -> PlayerOptions<'_> {
        PlayerOptions {
            threads: self.threads(),
            rate: Some(self.push_rate.0).filter(|&rate| rate > 0),
            cache,
            hot_set: !self.no_hot_set,
            shared,
            remote: &self.remote,
        }
    }

    /// Writes the report to the file of `--json`, if there is one.
    pub(crate) fn write_report(&self, report: &Value) {
        write_json(self.json.as_deref(), report);
    }
}
