//! `platen bench`: every published figure comes from one of these.

mod device;
mod hop;
mod lanes;
mod offload;

use clap::{Args, Subcommand};

/// Arguments of `platen bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The engine: over a bare codec loop, and against QEMU's old thread model
    Lanes(lanes::LanesArgs),
    /// The way through both relays: CPU seconds per GiB, GB/s
    Hop(hop::HopArgs),
    /// Compressed memory: what a page costs in CPU time and memory, beside the kernel's zram
    Device(device::DeviceBenchArgs),
    /// A QAT device: what a page costs the host, and asynchronous against direct offload
    Offload(offload::OffloadArgs),
}

pub(crate) fn run(args: BenchArgs) -> anyhow::Result<()> {
    match args.what {
        What::Lanes(args) => lanes::run(args),
        What::Hop(args) => hop::run(&args),
        What::Device(args) => device::run(&args),
        What::Offload(args) => offload::run(&args),
    }
}
