//! `platen advise`: advice for the VMs and the memory of this host, or of machines that are not
//! here.
//!
//! ```text
//!  what_if  --what-if
//!  gather   this host, its QEMU, a peer
//!  command the command line of a method
//!  report   the answer as JSON;  text: for people
//! ```
//!
//! It changes nothing: no setting of QEMU, no VM, no host.

mod command;
mod gather;
mod report;
mod text;
mod what_if;

use crate::interrupt;
use crate::qat_args::QplLibrary;
use crate::relay_options::TlsOptions;
use crate::report_file::check_file;
use crate::say::show;
use anyhow::ensure;
use clap::Args;
use relay::UnixAddress;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use what_if::WhatIf;

/// Arguments of `platen advise`.
#[derive(Args, Debug)]
pub(crate) struct AdviseArgs {
    /// Monitor socket of the running QEMU of the VM to advise on. platen only reads from it
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<UnixAddress>,
    /// Let QEMU measure for 6 seconds how much the guest writes (calc-dirty-rate). The guest runs
    /// meanwhile
    #[arg(long, requires = "qmp")]
    sample: bool,
    /// Read up to 32 MiB of the guest's memory, twice, to measure the codecs on, and 2048 single
    /// pages to learn how much of it is not zeros (pmemsave). QEMU writes it in pieces to a private
    /// folder in TMPDIR, from which platen removes each piece at once
    #[arg(long, requires = "qmp")]
    sample_memory: bool,
    /// Address on which `platen receive` or `platen host` listens: measure the throughput of the
    /// links to it for two seconds. No VM migrates there
    #[arg(long, value_name = "HOST:PORT")]
    peer: Option<String>,
    /// Name or address that the receiver's certificate must contain [default: HOST of --peer]
    #[arg(long, value_name = "NAME", requires = "peer")]
    peer_name: Option<String>,
    /// Answer for another machine: KEY=VALUE with commas between. link (25g, 200m: bits per
    /// second), rtt (milliseconds), cores, there (cores of the destination), ram, data (bytes of
    /// RAM that are not zeros), dirty (bytes per second, 500M/s), qat and iaa (devices). Omitted
    /// keys have the values of this host. Repeat it for more machines [default: the link to
    /// --peer, or the fastest interface with a known speed, or 1 and 10 Gbit/s]
    #[arg(long, value_name = "KEY=VALUE,...")]
    what_if: Vec<WhatIf>,
    /// Both ends are this host, and share its cores
    #[arg(long)]
    same_host: bool,
    /// Longest downtime of the migrations that are forecast, milliseconds [default: QEMU's
    /// downtime-limit, or 300]
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(1..=crate::ending_options::LONGEST))]
    max_downtime: Option<u64>,
    /// Seconds for which the codecs are measured, 1 to 60
    #[arg(long, value_name = "SECONDS", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=60))]
    seconds: u64,
    #[command(flatten)]
    qpl: QplLibrary,
    #[command(flatten)]
    tls: TlsOptions,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &AdviseArgs) -> anyhow::Result<ExitCode> {
    check_file(args.json.as_deref())?;
    let interrupted = interrupt::noticed()?;
    let go_on = move || !interrupted.load(Ordering::Acquire);
    let gathered = gather::gather(args, &go_on)?;
    ensure!(go_on(), "interrupted");
    let report = report::Report::new(args, &gathered);
    show(&report.text())?;
    report.publish(args.json.as_deref())?;
    Ok(ExitCode::SUCCESS)
}
