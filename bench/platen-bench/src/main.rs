//! platen-bench: every published figure that needs no VM comes from one of these commands.

mod codecs;
mod device;
mod hop;
mod offload;
mod pool;
mod program;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Benchmarks of platen. Those that measure the program run `platen` from their own folder.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// The engine, against a bare codec loop and against QEMU's old thread model
    Pool(pool::PoolArgs),
    /// A migration through both relays: CPU seconds per GiB, GB/s
    Hop(hop::HopArgs),
    /// Compressed memory beside the kernel's zram: CPU time and memory for each page
    Device(Box<device::DeviceBenchArgs>),
    /// Each codec alone: compression, decompression, ratio
    Codec(codecs::CodecArgs),
    /// A QAT device: CPU time of the host for each page, asynchronous against direct offload
    Offload(offload::OffloadArgs),
}

fn main() -> ExitCode {
    match run(Cli::parse().benchmark) {
        Ok(()) => ExitCode::SUCCESS,
        // Without the backtrace that RUST_BACKTRACE would add.
        Err(error) => {
            eprintln!("platen-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(benchmark: Benchmark) -> anyhow::Result<()> {
    match benchmark {
        Benchmark::Pool(args) => pool::run(args),
        Benchmark::Hop(args) => hop::run(&args),
        Benchmark::Device(args) => device::run(&args),
        Benchmark::Codec(args) => codecs::run(&args),
        Benchmark::Offload(args) => offload::run(&args),
    }
}
