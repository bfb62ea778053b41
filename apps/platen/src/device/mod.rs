//! `platen device`: a block device of compressed pages.

mod adopt;
mod another;
mod args;
mod backing;
mod changes;
mod check;
mod claims;
mod codec_name;
pub(crate) mod control;
mod covered;
mod detach;
pub(crate) mod endpoint;
mod family;
mod footprint;
mod inherited;
mod manager;
pub(crate) mod metrics;
mod offload;
mod owner;
mod pending;
mod plan;
mod program;
mod renew;
mod renewal;
mod requests;
mod serve;
mod serving;
pub(crate) mod settings_file;
mod stat;
mod status;
mod supervise;
mod swap_helper;
mod train;
mod waiting;
mod writeback;

use crate::say::{say, say_panics};
pub(crate) use args::DeviceArgs;
use args::DeviceCommand;
pub(crate) use program::use_small_one;
use std::process::ExitCode;

#[cfg(test)]
pub(crate) use metrics::{tests::example_status, text as metrics_text};

/// Adds to this program what `platen-device` leaves out.
pub(crate) fn with_everything() {
    offload::with_drivers();
    serve::with_fuse();
}

pub(crate) fn run(args: DeviceArgs) -> anyhow::Result<ExitCode> {
    let done = match args.command {
        DeviceCommand::Stat(args) => stat::run(&args),
        DeviceCommand::Writeback(args) => writeback::run(&args),
        DeviceCommand::Set(args) => renew::set(&args),
        DeviceCommand::Upgrade(args) => renew::upgrade(&args),
        DeviceCommand::Check(args) => return check::run(&args),
        DeviceCommand::Serve(mut args) => {
            if let Some(changed) = &args.changed.clone() {
                args.change(changed);
            }
            return Ok(unattended(|| match &args.inherited {
                // `set` may replace the arguments later; a supervisor's arguments live as long as
                // its process.
                None if !args.no_supervisor => supervise::run(Box::leak(args)),
                inherited => serve::run(&args, inherited.as_ref()),
            }));
        }
        DeviceCommand::Train => return Ok(unattended(train::run)),
        DeviceCommand::SwapHelper(args) => return Ok(helping(|| swap_helper::run(&args))),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Runs a command that works in the background, and logs errors and panics.
fn unattended(run: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    helping(|| run().map(|()| ExitCode::SUCCESS))
}

/// As [`unattended`], for a command whose exit status tells its supervisor more.
fn helping(run: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    say_panics();
    // A process started from `/proc/self/exe` is named "exe" by the kernel, in `ps` and in the OOM
    // killer's report, so it sets its own name. A failure is no reason not to serve.
    let _ = std::fs::write("/proc/self/comm", "platen");
    run().unwrap_or_else(|error| {
        say(&format!("{error:#}"));
        ExitCode::FAILURE
    })
}
