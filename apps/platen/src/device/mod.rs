//! `platen device`: a block device of compressed pages.

mod args;
mod control;
mod metrics;
mod serve;
mod size;
mod stat;
mod status;

pub(crate) use args::DeviceArgs;
use args::DeviceCommand;

pub(crate) fn run(args: DeviceArgs) -> anyhow::Result<()> {
    match args.command {
        DeviceCommand::Serve(args) => serve::run(&args),
        DeviceCommand::Stat(args) => stat::run(&args),
    }
}
