//! `platen device`: a block device of compressed pages.

mod args;
mod backing;
mod check;
mod control;
mod metrics;
mod offload;
mod say;
mod serve;
mod stat;
mod status;
mod supervise;
mod swap_helper;
mod train;
mod writeback;

pub(crate) use args::DeviceArgs;
use args::DeviceCommand;
use std::process::ExitCode;

pub(crate) fn run(args: DeviceArgs) -> anyhow::Result<ExitCode> {
    let done = match args.command {
        DeviceCommand::Serve(args) => match &args.inherited {
            None if !args.no_supervisor => supervise::run(&args),
            inherited => serve::run(&args, inherited.as_ref()),
        },
        DeviceCommand::Stat(args) => stat::run(&args),
        DeviceCommand::Writeback(args) => writeback::run(&args),
        DeviceCommand::Check(args) => return check::run(&args),
        DeviceCommand::Train => train::run(),
        DeviceCommand::SwapHelper(args) => swap_helper::run(&args),
    };
    done.map(|()| ExitCode::SUCCESS)
}
