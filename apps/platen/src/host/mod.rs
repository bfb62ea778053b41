//! `platen host`: the service for this host's migrations, and its commands.
//!
//! The service ([`service`]) starts a process for each migration ([`carry`](fn@carry)), which
//! outlives it. Crate `host` has the parts that both use.

mod activity;
mod asking;
mod carriage;
mod carry;
mod configure;
mod destination;
mod doctor;
mod doors;
mod enrol;
mod events;
mod feed;
mod init;
mod intercept;
mod journal;
mod links;
pub(crate) mod metrics;
mod question;
mod reload;
mod room;
mod said;
mod service;
mod settings;
mod source;
mod status;
mod switchboard;
mod top;
mod users;

use crate::say::show;
use anyhow::Context;
use clap::{Args, Subcommand};
use host::{DEFAULT_CONFIG, QEMU_CONF};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `platen host`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct HostArgs {
    #[command(subcommand)]
    command: Option<HostCommand>,
    #[command(flatten)]
    service: ServiceArgs,
}

#[derive(Subcommand)]
enum HostCommand {
    /// Show the service's doors and counters, the migrations that run, and the last hundred
    Status(ListArgs),
    /// Make a CA, and put this host's key and certificate where its service reads them. Run this on
    /// one host; the others join by `platen host add`
    Init(init::InitArgs),
    /// Enrol another host: wait until it has joined with the one-time token that this prints, or
    /// let it join over ssh. Run this on the host of the CA
    Add(enrol::AddArgs),
    /// Join the hosts of a CA with a one-time token of `platen host add`. The key is generated here
    /// and stays here
    Join(enrol::JoinArgs),
    /// Redirect QEMU's connections to the migration ports of the other hosts (`intercept`) to their
    /// doors, by rules of nftables, or remove the rules
    Intercept(intercept::InterceptArgs),
    /// Write the lines of libvirt's qemu.conf that give this host its door address, or remove them
    Doors(doors::DoorsArgs),
}

/// Where the configuration is, and which host this is.
#[derive(Args, Clone)]
pub(crate) struct ServiceArgs {
    /// Configuration, the same on every host
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Name of this host in the configuration [default: the host name]
    #[arg(long)]
    name: Option<String>,
    /// Folder of the sockets and records of migrations [default: run_dir of the configuration]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
}

/// Arguments of `platen list` and `platen host status`.
#[derive(Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    service: ServiceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `platen top`.
#[derive(Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    service: ServiceArgs,
}

/// Arguments of `platen events`.
#[derive(Args)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    service: ServiceArgs,
    /// Print each event as one line of JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `platen doctor`.
#[derive(Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    service: ServiceArgs,
    /// libvirt's configuration of QEMU
    #[arg(long, value_name = "FILE", default_value = QEMU_CONF)]
    qemu_conf: PathBuf,
    /// Print each result as one line of JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `platen config`.
#[derive(Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Check a configuration of `platen host`
    Check(CheckArgs),
}

#[derive(Args)]
struct CheckArgs {
    /// File to check
    #[arg(value_name = "FILE", default_value = DEFAULT_CONFIG)]
    file: PathBuf,
}

pub(crate) fn run(args: &HostArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        None => service::run(&args.service),
        Some(HostCommand::Status(args)) => status::status(&args.service, args.json),
        Some(HostCommand::Intercept(args)) => intercept::run(args),
        Some(HostCommand::Doors(args)) => doors::run(args),
        Some(HostCommand::Init(args)) => init::run(args),
        Some(HostCommand::Add(args)) => enrol::add(args),
        Some(HostCommand::Join(args)) => enrol::join(args),
    }
}

pub(crate) fn list(args: &ListArgs) -> anyhow::Result<ExitCode> {
    status::list(&args.service, args.json)
}

pub(crate) fn top(args: &TopArgs) -> anyhow::Result<ExitCode> {
    top::run(&args.service)
}

pub(crate) fn events(args: &EventsArgs) -> anyhow::Result<ExitCode> {
    events::run(args)
}

pub(crate) fn doctor(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    doctor::run(args)
}

pub(crate) fn config(args: &ConfigArgs) -> anyhow::Result<ExitCode> {
    let ConfigCommand::Check(CheckArgs { file }) = &args.command;
    let config = settings::read(file)?;
    let hosts = config.host.iter().map(|host| format!("{} ({})", host.name, host.door));
    let hosts: Vec<_> = hosts.collect();
    show(&format!(
        "{} is in order. Hosts and their doors: {}\n",
        file.display(),
        hosts.join(", ")
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Carries one migration for the service that has started this process.
pub(crate) fn carry() -> anyhow::Result<ExitCode> {
    carry::run().context("this command is for the use of platen itself")
}
