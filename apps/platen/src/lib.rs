//! platen: migrates VMs and stores memory at a fraction of its size.
//!
//! `args` defines the command line, each command has a module, and the crates hold everything else.
//! Two binaries use it: `platen` has all commands, `platen-device` those of a device only. A swap
//! device locks its whole program in memory, so `platen device serve` executes the small one.

// These macros block while the reader of a pipe does not read, and panic without a reader: see
// `say`.
#![cfg_attr(not(test), deny(clippy::print_stderr, clippy::print_stdout))]

mod advise;
mod args;
mod auto;
mod cert;
mod compression;
mod cpus;
mod descriptors;
mod device;
mod ending;
mod ending_options;
mod evacuate;
mod filter_command;
mod host;
mod image_command;
mod image_import;
mod image_lock;
mod image_verify;
mod image_watch;
mod interrupt;
mod keeper;
mod leave;
mod link;
mod load;
mod lost_writes;
mod migrate;
mod migrate_cancel;
mod migrate_monitor;
mod migrate_outcome;
mod monitor;
mod network;
mod peer_report;
mod progress;
mod qat_args;
mod qat_command;
mod qat_status;
mod qpl_library;
mod rate;
mod receive;
mod receive_args;
mod receive_settings;
#[cfg(test)]
mod reference;
mod rehearse;
mod relay_command;
mod relay_options;
mod remote_image;
mod report;
mod report_file;
mod report_text;
mod restore;
mod restore_args;
mod restore_clash;
mod restore_disks;
mod restore_events;
mod restore_fit;
mod restore_interrupt;
mod restore_load;
mod restore_player;
mod restore_player_events;
mod restore_player_link;
mod restore_players;
mod restore_recovery;
mod restore_service;
mod restore_source;
mod restore_supervisor;
mod restore_vm;
mod save;
mod save_args;
mod save_channels;
mod save_check;
mod save_ending;
mod save_intake;
mod save_leave;
mod save_limit;
mod save_name;
mod save_pause;
mod save_watch;
mod saved_vm;
mod say;
mod seed;
mod serve_images;
mod settings;
mod settings_claim;
mod settings_former;
mod settings_helper;
mod settings_inherited;
mod settings_keeper;
mod size;
mod source_end;
mod store_command;
mod store_list;
mod stranger;
mod stream_keeper;
mod turns_option;
mod virsh;

use clap::{Parser, Subcommand};
use nix::sys::signal::{SigSet, Signal};
use std::process::ExitCode;

/// Aborts a debug build whose I/O threads allocate.
#[cfg(debug_assertions)]
#[global_allocator]
static ALLOCATOR: ::device::guard::Allocator = ::device::guard::Allocator;

#[derive(Parser)]
#[command(
    name = "platen",
    version,
    about = "Migrate and save running VMs of unmodified QEMUs, and serve compressed memory as a block device"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Migrate the VM of a QEMU, controlled by its monitor, to a host that runs `platen receive`
    Migrate(args::MigrateArgs),
    /// Migrate the VMs of this host to hosts that run `platen receive`: first those that converge
    /// soonest, and several at once while the link has capacity. A failure of one stops no other
    #[command(after_help = evacuate::EXIT_STATUS)]
    Evacuate(evacuate::EvacuateArgs),
    /// Rehearse a migration: measure a running VM under a migration whose bytes are discarded, and
    /// forecast real ones. The VM stays
    Rehearse(rehearse::RehearseArgs),
    /// Advise how to migrate the VMs of this host, or of other machines, and how to set up
    /// compressed memory. Nothing is changed
    Advise(advise::AdviseArgs),
    /// Forward a migration that QEMU or libvirt starts to a host that runs `platen receive`
    #[command(after_help = source_end::EXIT_STATUS)]
    Relay(args::RelayArgs),
    /// Receive migrations from `platen migrate` and `platen relay`, and deliver them to QEMU
    #[command(after_help = source_end::EXIT_STATUS)]
    Receive(receive_args::ReceiveArgs),
    /// Run the service for the migrations of this host, or use its commands
    Host(host::HostArgs),
    /// List the migrations that this host carries now
    List(host::ListArgs),
    /// Watch the migrations of this host on a terminal: progress, ratio, rates, share of the
    /// network, expected end. q quits
    Top(host::TopArgs),
    /// Follow the migrations of this host: a line for each change of a migration's phase, until
    /// interrupted
    Events(host::EventsArgs),
    /// Check this host before its first migration, and print the remedies. The exit status is 1 if
    /// migrations would fail
    Doctor(host::DoctorArgs),
    /// Check the configuration of `platen host`
    Config(host::ConfigArgs),
    /// Save the VM of a QEMU, controlled by its monitor, as an image: compressed, verified, one
    /// file. Images in one store share their pages
    Save(save_args::SaveArgs),
    /// Restore a saved VM into a QEMU that was started with -incoming defer. The VM runs before its
    /// RAM is loaded
    Restore(restore::RestoreArgs),
    /// Serve the images of a folder to `platen restore` on other hosts
    ServeImages(serve_images::ServeImagesArgs),
    /// Restore a saved VM under libvirt, which controls it from then on. The VM runs before its RAM
    /// is loaded
    VirshRestore(virsh::VirshRestoreArgs),
    /// Inspect, verify and convert images of saved VMs, and manage stores of them
    Image(image_command::ImageArgs),
    /// Compress or decompress standard input on all threads, for example for `virsh save`
    Filter(filter_command::FilterArgs),
    /// Serve and inspect block devices of compressed memory
    Device(device::DeviceArgs),
    /// Inspect Intel QAT on this host, or simulate a device
    Qat(qat_args::QatArgs),
    /// Make certificates for the hosts that migrate VMs to each other
    Cert(cert::CertArgs),
    /// Helper process of `migrate` and `relay`: see `relay::keep`
    #[command(hide = true)]
    Keep,
    /// Process of `host` that carries one migration
    #[command(hide = true)]
    Carry,
    /// Helper process of `restore` that serves the image
    #[command(hide = true)]
    Play(restore_player::PlayArgs),
    /// Helper process of `save` and `migrate` that restores QEMU's settings
    #[command(hide = true)]
    KeepSettings(settings_keeper::KeepSettingsArgs),
    /// Helper process of `save` that reads QEMU's stream to the end
    #[command(hide = true)]
    KeepStream(stream_keeper::KeepStreamArgs),
}

/// Makes a write beyond the file size limit (`ulimit -f`) return an error. The signal would end the
/// process, and any running migration with it.
fn block_file_size_signal() {
    block(&[Signal::SIGXFSZ]);
}

/// Keeps a terminal from stopping this process, by Ctrl-Z or for output in the background. A VM
/// that is handed over, or that waits for a page in postcopy, would stand still.
///
/// The end of the terminal does not end this process either. An outage that loses the peer often
/// ends the user's session, too, and in doubt (W23) only a person may end a relay: the source VM
/// then continues.
fn block_stop_signals() {
    block(&[Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU, Signal::SIGHUP]);
}

fn block(signals: &[Signal]) {
    let signals: SigSet = signals.iter().copied().collect();
    // Threads and child processes inherit the mask.
    let _ = signals.thread_block();
}

/// Resets SIGCHLD, which the parent may have ignored: no child could be waited for then.
fn heed_children() {
    say::say_untaken(swap::heed_children().err());
}

/// The program `platen`.
pub fn platen() -> ExitCode {
    leave::with(run())
}

fn run() -> ExitCode {
    if let Some(result) = filter_command::as_program() {
        return finish(result);
    }
    let command = Cli::parse().command;
    heed_children();
    if !matches!(command, Command::Qat(_)) {
        block_file_size_signal();
    }
    if matches!(command, Command::Migrate(_) | Command::Relay(_) | Command::Receive(_)) {
        block_stop_signals();
    }
    let result = match command {
        Command::Migrate(args) => migrate::run(&args),
        Command::Evacuate(args) => evacuate::run(&args),
        Command::Rehearse(args) => rehearse::run(&args),
        Command::Advise(args) => advise::run(&args),
        Command::Relay(args) => relay_command::run(&args),
        Command::Receive(args) => receive::run(&args),
        Command::Host(args) => host::run(&args),
        Command::List(args) => host::list(&args),
        Command::Top(args) => host::top(&args),
        Command::Events(args) => host::events(&args),
        Command::Doctor(args) => host::doctor(&args),
        Command::Config(args) => host::config(&args),
        Command::Carry => host::carry(),
        Command::Save(args) => save::run(&args),
        Command::Restore(args) => restore::run(&args),
        Command::ServeImages(args) => serve_images::run(&args),
        Command::VirshRestore(args) => virsh::run(&args),
        Command::Image(args) => return finish(image_command::run(&args)),
        Command::Filter(args) => filter_command::run(&args),
        Command::KeepSettings(args) => settings_keeper::run(&args).map(|()| ExitCode::SUCCESS),
        Command::KeepStream(args) => stream_keeper::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Play(args) => return finish(restore_player::run(&args)),
        Command::Device(args) => {
            device::use_small_one(&args);
            device::with_everything();
            return finish(device::run(args));
        }
        Command::Qat(args) => return finish(qat_command::run(args)),
        Command::Cert(args) => cert::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Keep => keeper::run().map(|()| ExitCode::SUCCESS),
    };
    finish(result)
}

/// The command line of `platen-device`.
#[derive(Parser)]
#[command(name = "platen-device", version, about = "The part of platen that serves block devices")]
struct DeviceCli {
    #[command(subcommand)]
    command: DeviceOnly,
}

#[derive(Subcommand)]
enum DeviceOnly {
    /// Serve and inspect block devices of compressed memory, as `platen device` does
    Device(device::DeviceArgs),
}

/// The program `platen-device`.
pub fn platen_device() -> ExitCode {
    let DeviceOnly::Device(args) = DeviceCli::parse().command;
    heed_children();
    block_file_size_signal();
    leave::with(finish(device::run(args)))
}

/// The command lines of `platen` and `platen-device`, for manual pages and completions.
pub fn commands() -> [clap::Command; 2] {
    use clap::CommandFactory;
    [Cli::command(), DeviceCli::command()]
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
