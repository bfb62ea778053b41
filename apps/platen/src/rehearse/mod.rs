//! `platen rehearse`: a migration whose bytes are discarded, and forecasts of real ones.
//!
//! ```text
//!  link     --what-if
//!  vm       QEMU's settings, and the inputs of forecasts
//!  course   the migration into crate `rehearse`'s discarding end, and its cancel
//!  report   the forecasts, as a table and as JSON
//! ```
//!
//! The VM stays at the source, by guards that do not depend on each other:
//!
//! 1. `switchover-ack` (from QEMU 8.1 on; 11.1 heeds it for some devices only): QEMU does not stop
//!    the VM before the destination allows it, which this end never does.
//! 2. `pause-before-switchover`: any other QEMU stops the VM once it has converged, and waits for
//!    `migrate-continue`. This program cancels at once, and sends `migrate-continue` only for a
//!    migration in `cancelling`, which cannot complete any more.
//! 3. `return-path`: QEMU completes a migration only when the destination has answered, and nothing
//!    is ever written to the socket. Its end makes QEMU resume the VM.
//! 4. The helper process that restores the settings cancels a migration that waits in
//!    `pre-switchover`, should this process be killed: there QEMU does not notice the end of a
//!    socket.

mod course;
mod link;
mod report;
mod vm;

use crate::args::compress_threads;
use crate::interrupt;
use crate::link::{measure, Over};
use crate::monitor::open_monitor;
use crate::relay_options::TlsOptions;
use crate::report_file::check_file;
use crate::say::{say, show};
use crate::settings::Before;
use anyhow::{bail, ensure, Context};
use clap::Args;
use link::WhatIf;
use relay::UnixAddress;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Arguments of `platen rehearse`.
#[derive(Args, Debug)]
pub(crate) struct RehearseArgs {
    /// Monitor socket of the QEMU; start QEMU with -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "unix:PATH")]
    qmp: UnixAddress,
    /// Address on which `platen receive` or `platen host` listens: measure the throughput of the
    /// links to it for two seconds. No VM migrates there
    #[arg(long, value_name = "HOST:PORT")]
    peer: Option<String>,
    /// Name or address that the receiver's certificate must contain [default: HOST of --peer]
    #[arg(long, value_name = "NAME", requires = "peer")]
    peer_name: Option<String>,
    /// Forecast for another link, too: link=RATE, with more rates and the round trip in
    /// milliseconds if you like (link=100mbit,1gbit,rtt=20). RATE is as for `migrate
    /// --max-bandwidth` [default: 1 and 10 Gbit/s, if there is no --peer]
    #[arg(long, value_name = "link=RATE")]
    what_if: Vec<WhatIf>,
    /// Seconds that the rehearsal takes, 5 to 600. It takes longer if QEMU needs more than 40 % of
    /// that to write the RAM once. A longer rehearsal measures more of a guest that changes
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(5..=600))]
    seconds: u64,
    /// Longest downtime of the migrations that are forecast, milliseconds [default: QEMU's
    /// downtime-limit, which is 300 unless it was set]
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(1..=crate::ending_options::LONGEST))]
    max_downtime: Option<u64>,
    #[command(flatten)]
    tls: TlsOptions,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(crate) fn run(args: &RehearseArgs) -> anyhow::Result<ExitCode> {
    check_file(args.json.as_deref())?;
    let what_if: Vec<Over> = args.what_if.iter().flat_map(WhatIf::links).collect();
    let mut settings = Before::with_keeper(&args.qmp)?;
    let mut qmp = open_monitor(&args.qmp)?;
    let monitor = || format!("monitor {}", args.qmp);
    let before = vm::check(&mut qmp, args.max_downtime).with_context(monitor)?;
    // A rehearsal that is stopped cancels nothing, while QEMU may have stopped the VM.
    swap::ignore_terminal()?;
    let interrupted = interrupt::noticed()?;
    // Before the guest is disturbed: a peer that cannot be measured is an error.
    let peer = args.peer.as_deref();
    let measured =
        peer.map(|peer| measure(peer, &args.tls, args.peer_name.as_deref())).transpose()?;
    ensure!(!interrupted.load(Ordering::Acquire), "interrupted");
    let length = Duration::from_secs(args.seconds);
    let rehearsed = vm::rehearse(&mut qmp, &mut settings, length, &interrupted);
    if let Some(error) = rehearsed.as_ref().err().filter(|error| vm::is_silent(error)) {
        // Every further question would take as long. The helper process acts when this one ends.
        bail!(
            "monitor {}: {error:#}; the rehearsal is given up, and a helper process lets the VM go on and \
             restores QEMU's settings as soon as the monitor answers",
            args.qmp
        );
    }
    let rehearsed = rehearsed.with_context(monitor);
    let put_back = settings.put_back(&mut qmp).with_context(monitor);
    let rehearsed = match (rehearsed, put_back) {
        (rehearsed, Ok(())) => rehearsed,
        (Ok(_), Err(error)) => return Err(error),
        (Err(error), Err(stuck)) => {
            say(&format!("{stuck:#}; a helper process tries again until QEMU takes them"));
            Err(error)
        }
    };
    let rehearsed = rehearsed.map_err(|error| {
        let vm = qmp.query_status().map_or("unknown".into(), |vm| vm.status);
        error.context(format!("no rehearsal; the source QEMU's VM is '{vm}'"))
    })?;
    say(&rehearsed.vm_in_words());
    let setup = before.setup(&rehearsed, workers());
    let mut over: Vec<Over> = measured.into_iter().chain(what_if).collect();
    if over.is_empty() {
        over = link::defaults();
    }
    let report = report::Report::new(&rehearsed, &setup, &over);
    show(&report.text())?;
    report.publish(args.json.as_deref())?;
    Ok(ExitCode::SUCCESS)
}

/// Codec threads of a migration with default options.
#[expect(clippy::cast_precision_loss, reason = "a number of threads")]
fn workers() -> f64 {
    compress_threads(None) as f64
}
