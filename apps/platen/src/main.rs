//! platen: moves and holds memory at a fraction of its size.
//!
//! The one binary. `args` is what was typed, a module for each command is what it does; everything
//! else is in the crates.

// These wait for a reader that does not read, and panic when there is none: see `say`.
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod args;
mod auto;
#[allow(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "nobody needs a benchmark that nobody watches"
)]
mod bench;
mod cert;
mod cpus;
mod device;
mod keeper;
mod migrate;
mod network;
mod progress;
mod qat_command;
mod qat_status;
mod receive;
mod relay_command;
mod report;
mod say;
mod size;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Ends a debug build whose I/O threads allocate.
#[cfg(debug_assertions)]
#[global_allocator]
static ALLOCATOR: ::device::guard::Allocator = ::device::guard::Allocator;

#[derive(Parser)]
#[command(
    name = "platen",
    version,
    about = "Moves a running virtual machine between two unmodified QEMUs, compressed by many threads"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Migrate the VM of the QEMU whose monitor is given to a host where `platen receive` runs
    Migrate(args::MigrateArgs),
    /// Source end alone: listen where QEMU (or libvirt) migrates to
    Relay(args::RelayArgs),
    /// Destination end: take migrations and hand them to QEMU
    Receive(args::ReceiveArgs),
    /// Block devices of compressed memory
    Device(device::DeviceArgs),
    /// Intel QAT: a simulated device to run things on
    Qat(args::QatArgs),
    /// Make certificates for the hosts between which VMs move
    Cert(cert::CertArgs),
    /// Measure
    Bench(bench::BenchArgs),
    /// What `migrate` and `relay` start beside themselves: see `relay::keep`
    #[command(hide = true)]
    Keep,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Migrate(args) => migrate::run(&args),
        Command::Relay(args) => relay_command::run(&args),
        Command::Receive(args) => receive::run(&args),
        Command::Device(args) => return finish(device::run(args)),
        Command::Qat(args) => return finish(qat_command::run(args)),
        Command::Cert(args) => cert::run(&args),
        Command::Bench(args) => bench::run(args),
        Command::Keep => keeper::run(),
    };
    let status = u8::from(result.is_err());
    let code = finish(result.map(|()| ExitCode::SUCCESS));
    qatzip::end_process_if_stuck(status);
    code
}

fn finish(result: anyhow::Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) => {
            say::say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}
