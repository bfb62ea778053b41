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
mod source_end;

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
    #[command(after_help = source_end::EXIT_STATUS)]
    Relay(args::RelayArgs),
    /// Destination end: take migrations and hand them to QEMU
    #[command(after_help = source_end::EXIT_STATUS)]
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

/// Has a file that reaches the limit of `ulimit -f` be an error of its write. The signal would end
/// the process, and a VM may be on its way through it.
fn block_file_size_signal() {
    let mut signals = nix::sys::signal::SigSet::empty();
    signals.add(nix::sys::signal::Signal::SIGXFSZ);
    // The mask goes on to every thread and every process that is started.
    let _ = signals.thread_block();
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    if !matches!(command, Command::Qat(_)) {
        block_file_size_signal();
    }
    let result = match command {
        Command::Migrate(args) => migrate::run(&args),
        Command::Relay(args) => relay_command::run(&args),
        Command::Receive(args) => receive::run(&args),
        Command::Device(args) => return finish(device::run(args)),
        Command::Qat(args) => return finish(qat_command::run(args)),
        Command::Cert(args) => cert::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(args) => bench::run(args).map(|()| ExitCode::SUCCESS),
        Command::Keep => keeper::run().map(|()| ExitCode::SUCCESS),
    };
    let status = match &result {
        Ok(code) if *code == ExitCode::SUCCESS => 0,
        Ok(_) => source_end::UNCONFIRMED,
        Err(_) => 1,
    };
    let code = finish(result);
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
