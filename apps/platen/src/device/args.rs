//! Command line of `platen device`.

use super::adopt::Adopt;
use super::changes::Changes;
use super::codec_name::page_codec;
use super::inherited::Inherited;
use crate::size::Size;
use clap::{ArgGroup, Args, Subcommand};
use codec::Codec;
use relay::UnixAddress;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Arguments of `platen device`.
#[derive(Args, Debug)]
pub(crate) struct DeviceArgs {
    #[command(subcommand)]
    pub(crate) command: DeviceCommand,
}

/// The commands of `platen device`.
#[derive(Subcommand, Debug)]
pub(crate) enum DeviceCommand {
    /// Serve a block device whose contents are compressed in memory, until SIGINT or SIGTERM
    Serve(Box<ServeArgs>),
    /// Show contents, memory and CPU time of the devices that this host serves
    Stat(StatArgs),
    /// Write pages of a device to its backing device now, and wait until they are written
    Writeback(WritebackArgs),
    /// Change settings of a device that is served. A server with the new settings replaces the
    /// present one and takes over its stored pages; later servers have the same settings
    Set(SetArgs),
    /// Let this version of platen take over a device that another version serves: store, disk, name
    /// and sockets stay. If this version cannot, the command is refused and nothing is changed
    Upgrade(UpgradeArgs),
    /// Check the precautions that prevent a swap server from waiting for its own swap device. The
    /// exit status is 0 if every required one is met
    Check(CheckArgs),
    /// Train a dictionary for a server. `serve` starts this process; its standard output is the
    /// socket to the server
    #[command(hide = true)]
    Train,
    /// Attach, start or stop swapping for `serve --swap`, which starts this process
    #[command(hide = true)]
    SwapHelper(SwapHelperArgs),
}

/// Arguments of `platen device serve`.
#[derive(Args, Debug, Clone)]
#[command(group(ArgGroup::new("transport").required(true).multiple(true).args(["nbd", "ublk", "fuse"])))]
pub(crate) struct ServeArgs {
    /// Name of the device, of its control socket and of its NBD export: 1 to 32 letters, digits,
    /// '-', '_' and '.'
    #[arg(long, default_value = "platen0", value_parser = name)]
    pub(crate) name: String,
    /// Size of the block device in bytes, for example 8G; 409G at most. The server allocates memory
    /// only for what is written
    #[arg(long)]
    pub(crate) size: Size,
    /// Codec: none, lz4, zlib, zstd or qatzip. qatzip is deflate that a QAT device can compress;
    /// none stores pages uncompressed
    #[arg(long, default_value = "zstd", value_parser = page_codec)]
    pub(crate) codec: Codec,
    /// Compression level: zlib 0 to 9, zstd -5 to 19, lz4 -63 to 1, qatzip 1 to 9 [default: 1]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) level: Option<i32>,
    /// Compressor for codec qatzip
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) accelerator: PageAccelerator,
    /// Number of threads with an instance of the QAT device each, 1 to 32 [default: 1/8 of the
    /// CPUs, at least 1]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=32))]
    pub(crate) qat_threads: Option<u16>,
    /// Folder of libqat.so.4 and libusdm.so.0 [default: the dynamic linker's search path]
    #[arg(long, value_name = "DIR")]
    pub(crate) qat_libraries: Option<PathBuf>,
    /// Memory that compressed pages and their tables may use, in bytes; 0 is no limit. A write that
    /// needs more fails with ENOSPC. Connections (3 MiB each), codec contexts and buffers are not
    /// part of it [default: 7/8 of the memory of the cgroup, or all but 24M if that is less; with
    /// --swap at most 7/8 of the host's memory; without either no limit]
    #[arg(long, value_name = "SIZE")]
    pub(crate) mem_limit: Option<Size>,
    /// Number of threads that help with large requests, 0 to 32 [default: the number of CPUs less
    /// 1; with --swap and less than 1 GiB of memory 0]
    #[arg(long, value_parser = clap::value_parser!(u16).range(0..=32))]
    pub(crate) workers: Option<u16>,
    /// Serve NBD on this socket, with mode 0600
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) nbd: Option<UnixAddress>,
    /// Serve the block device /dev/ublkbN; needs root, the module ublk_drv and Linux 6.1 or later
    #[arg(long)]
    pub(crate) ublk: bool,
    /// Serve the device as this file, by FUSE; `losetup --direct-io=on` makes a block device of it.
    /// Not for swap
    #[arg(long, value_name = "PATH", conflicts_with_all = ["ublk", "swap"])]
    pub(crate) fuse: Option<PathBuf>,
    /// Number of queues of the ublk device, 1 to 32, with a thread each [default: the number of
    /// CPUs, at most 8; with --swap and less than 1 GiB of memory at most 2]
    #[arg(long, requires = "ublk", value_parser = clap::value_parser!(u16).range(1..=32))]
    pub(crate) queues: Option<u16>,
    /// Memory for the ublk device's requests in flight, in bytes [default: 1/128 of the memory
    /// of the host or the cgroup, the lesser, 1M to 256M; with --swap and less than 1 GiB of memory
    /// 1/512, 256K to 2M]
    #[arg(long, value_name = "SIZE", requires = "ublk")]
    pub(crate) buffers: Option<Size>,
    /// Memory that the server allocates ahead of writes, in bytes, less while the host is short of
    /// memory [default: 64M, at most 1/16 of the cgroup's limit; with --swap 1/16 of the memory of
    /// the host or the cgroup, the lesser, 8M to 512M]
    #[arg(long, value_name = "SIZE")]
    pub(crate) reserve: Option<Size>,
    /// Make the block device a swap area and swap to it. Without --ublk the kernel's NBD client
    /// (module nbd) is the block device
    #[arg(long)]
    pub(crate) swap: bool,
    /// Priority of the disk's first swap area, 0 to 32767; up to 13 further areas follow, each a
    /// priority lower by one. The kernel fills areas of higher priority first
    #[arg(long, default_value_t = 100, requires = "swap", value_parser = clap::value_parser!(u16).range(0..=32767))]
    pub(crate) swap_priority: u16,
    /// Seconds that swapoff may take when the server is told to exit
    #[arg(long, default_value_t = 300, value_name = "SECONDS", requires = "swap")]
    pub(crate) swapoff_timeout: u64,
    /// Run as one process. When it exits or is killed, the contents of the device are lost
    #[arg(long, conflicts_with = "swap")]
    pub(crate) no_supervisor: bool,
    /// Descriptors and names that the supervisor passes to the server
    #[arg(long, hide = true)]
    pub(crate) inherited: Option<Inherited>,
    /// Changes made by `device set`
    #[arg(long, hide = true)]
    pub(crate) changed: Option<Changes>,
    /// Hand-over from the supervisor of another version, in the same process
    #[arg(long, hide = true)]
    pub(crate) adopt: Option<Adopt>,
    /// TOML file with a section `[policy]`: recompression, writeback and dictionaries [default:
    /// idle pages are recompressed in groups after 10 minutes]
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// Number of NBD connections at a time, 1 to 30
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=30))]
    pub(crate) connections: u16,
    /// Serve metrics to Prometheus on this address, at /metrics, for example 127.0.0.1:9600
    /// [default: none]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) prometheus: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// Compressor of pages for codec qatzip.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum PageAccelerator {
    /// A QAT device if the host has one; else software.
    Auto,
    /// A QAT device; without one the command fails.
    Qat,
    /// Software.
    None,
}

impl ServeArgs {
    /// Applies `changes` to these arguments.
    pub(super) fn change(&mut self, changes: &Changes) {
        self.size = changes.size.unwrap_or(self.size);
        self.mem_limit = changes.mem_limit.or(self.mem_limit);
        self.codec = changes.codec.unwrap_or(self.codec);
        self.level = changes.level.unwrap_or(self.level);
    }
}

/// Arguments of `platen device check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// Name of the device
    #[arg(default_value = "platen0", value_parser = name)]
    pub(crate) name: String,
    /// Print a JSON array with one object for each precaution
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// Arguments of `platen device set`.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("setting").required(true).multiple(true).args(["mem_limit", "codec", "level", "settings", "size"])))]
pub(crate) struct SetArgs {
    /// Name of the device
    #[arg(value_parser = name)]
    pub(crate) name: String,
    /// Memory that compressed pages and their tables may use, in bytes; 0 is no limit
    #[arg(long, value_name = "SIZE")]
    pub(crate) mem_limit: Option<Size>,
    /// Codec of pages that are written from now on: none, lz4, zlib, zstd or qatzip
    #[arg(long, value_parser = page_codec)]
    pub(crate) codec: Option<Codec>,
    /// Compression level [default with --codec: that codec's]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) level: Option<i32>,
    /// TOML file with a section `[policy]`. Its backing device has to be the present one
    #[arg(id = "settings", long = "policy", value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// Size of the block device in bytes, at least the present one and at most 16 times the first
    /// one. A ublk disk grows from Linux 6.16 on, and further swap areas are added to it; the disk
    /// of the kernel's NBD client does not grow while the host swaps to it
    #[arg(long)]
    pub(crate) size: Option<Size>,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// Arguments of `platen device upgrade`.
#[derive(Args, Debug)]
pub(crate) struct UpgradeArgs {
    /// Name of the device
    #[arg(value_parser = name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// Arguments of `platen device writeback`.
#[derive(Args, Debug)]
pub(crate) struct WritebackArgs {
    /// Name of the device
    pub(crate) name: String,
    /// Pages to write: huge (stored uncompressed), idle, huge_idle (both), or incompressible
    /// (recompression made them no smaller)
    #[arg(value_parser = str::parse::<policy::What>)]
    pub(crate) what: policy::What,
    /// Seconds to wait for the end of the writeback. After that the command ends and the writeback
    /// continues
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    pub(crate) timeout: u64,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// Arguments of the helper that `serve --swap` starts.
#[derive(Args, Debug)]
pub(crate) struct SwapHelperArgs {
    #[arg(value_enum)]
    pub(crate) task: SwapTask,
    /// The disk
    #[arg(long)]
    pub(crate) disk: PathBuf,
    /// The server's socket, if the disk is the kernel's NBD client's
    #[arg(long)]
    pub(crate) socket: Option<PathBuf>,
    /// The process that made this socket
    #[arg(long, default_value_t = 0)]
    pub(crate) listener: u32,
    #[arg(long, default_value_t = 1)]
    pub(crate) connections: usize,
    /// The process that attached the disk, unless another one has done so since
    #[arg(long)]
    pub(crate) attached_by: Option<u32>,
    #[arg(long, default_value_t = 0)]
    pub(crate) priority: u16,
    /// Seconds that swapoff may take
    #[arg(long, default_value_t = 300)]
    pub(crate) timeout: u64,
    /// Processes to check
    #[arg(long, value_delimiter = ',')]
    pub(crate) pids: Vec<u32>,
}

/// Task of a helper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SwapTask {
    /// Start swapping to the disk of a server that is ready.
    On,
    /// Swap to the rest of a disk that has grown.
    Grow,
    /// Stop swapping.
    Off,
    /// Detach a disk of the kernel's NBD client that is not swapped to.
    Detach,
}

impl SwapTask {
    /// The name on the command line.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Grow => "grow",
            Self::Off => "off",
            Self::Detach => "detach",
        }
    }
}

/// Folder of the control sockets.
#[derive(Args, Debug, Clone)]
pub(crate) struct ControlOptions {
    /// Folder of the control sockets [default: /run/platen for root, else $XDG_RUNTIME_DIR/platen]
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
}

/// Arguments of `platen device stat`.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    /// Name of one device, to show with every counter [default: all devices, one line each]
    pub(crate) name: Option<String>,
    /// Print a JSON array with one object for each device
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// Parses a device name, which is a file name too.
fn name(text: &str) -> Result<String, String> {
    let sound = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=32).contains(&text.len()) && text.chars().all(sound) && !text.starts_with('.') {
        Ok(text.to_owned())
    } else {
        Err(format!("'{text}' is not a name: 1 to 32 letters, digits, '-', '_' and '.'"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_file_names_and_codecs_are_those_for_pages() {
        assert_eq!(name("platen0"), Ok("platen0".to_owned()));
        for bad in ["", ".", "../x", "a/b", "a b", "ä"] {
            assert!(name(bad).unwrap_err().contains("not a name"), "{bad}");
        }
        assert!(name(&"x".repeat(33)).is_err());
        assert_eq!(page_codec("zlib"), Ok(Codec::Zlib));
        assert_eq!(page_codec("qatzip"), Ok(Codec::DeflateQz));
        assert!(page_codec("same-filled").unwrap_err().contains("none of"));
    }
}
