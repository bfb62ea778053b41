//! `platen relay`: the source end alone, for libvirt and scripts.

use crate::args::RelayArgs;
use crate::keeper;
use crate::network;
use crate::qat_command;
use crate::report::{process_cpu, Report};
use crate::say::say;
use anyhow::Context;
use relay::{Source, SourceConfig};
use session::Setup;
use std::time::{Duration, Instant};

pub(crate) fn run(args: &RelayArgs) -> anyhow::Result<()> {
    let options = &args.source;
    let settings = options.settings()?;
    options.keep_to_cpus()?;
    let connector = network::connector(&options.tls, &options.peer, options.peer_name.as_deref())?;
    let accelerator = qat_command::accelerator(options.accelerator, &options.qat, settings)?;
    args.listen.check_target()?;
    let source = Source::connect_with(
        &SourceConfig {
            peer: options.peer.clone(),
            connector,
            settings: settings.unwrap_or_default(),
            auto: options.auto()?,
            compress_threads: options.threads(),
            compress_wait_thread: options.compress_wait_thread == crate::args::OnOff::On,
            links: options.links,
            page_size: options.page_size,
            name: options.name.clone(),
            setup: args.channels.map(|channels| Setup { channels, return_path: true }),
            resume: Duration::from_secs(options.resume_timeout),
            delta_cache: options.delta_cache(),
        },
        accelerator.as_ref(),
    )?;
    source.kept_by(keeper::start()?);
    source.listen(&args.listen)?;
    let handle = source.handle();
    ctrlc::set_handler(move || handle.stop()).context("cannot handle signals")?;
    say(&format!("listening on {} for QEMU, peer {}", args.listen, options.peer));
    let started = Instant::now();
    let cpu = process_cpu();
    let measured = || Report::of_source(&source, settings, started.elapsed(), process_cpu() - cpu);
    let result = source.run(say, || {
        let mut report = measured();
        report.status = "completed".into();
        report.json().into_bytes()
    });
    let mut report = measured();
    match &result {
        Ok(end) => {
            report.status = "completed".into();
            report.set_end(end);
            if !end.return_path {
                say("the source QEMU used no return path: it has called the migration completed without hearing from \
                     the destination. Turn the capability return-path on");
            }
        }
        Err(error) => {
            report.status = "failed".into();
            report.error = Some(error.to_string());
        }
    }
    report.publish(options.json.as_deref());
    result.map(drop).map_err(Into::into)
}
