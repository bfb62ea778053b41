//! Shared by `migrate` and `relay`: makes a source relay from its options. All local steps come
//! before the peer is contacted.

use crate::args::{OnOff, SourceOptions};
use crate::keeper;
use crate::network;
use crate::qat_command;
use crate::qpl_library;
use crate::relay_options::ConnectOptions;
use crate::report::{process_cpu, Report};
use crate::say::say;
use crate::seed::{source_seed, Departure};
use crate::turns_option::TurnsOption;
use anyhow::bail;
use codec::Settings;
use relay::{Listening, RelayError, Source, SourceConfig, UnixAddress};
use session::Setup;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Exit status of a migration that was delivered and cannot be confirmed, because the source QEMU
/// uses no return path.
pub(crate) const UNCONFIRMED: u8 = 3;

/// The exit statuses of a relay, for its help.
pub(crate) const EXIT_STATUS: &str =
    "Exit status: 0 the destination has confirmed the migration; 1 it failed; 3 unconfirmed: the whole stream was \
     delivered, but the source QEMU uses no return path, so that no relay knows whether the destination runs the VM. \
     receive: of its one migration with --once";

/// The longest name of a target in bytes. It crosses the network in a message of 8 KiB.
pub(crate) const MAX_NAME: usize = 255;

/// A source relay that is not connected yet.
pub(crate) struct Plan {
    config: SourceConfig,
    accelerator: Option<Arc<qat::Qat>>,
    /// Codec and level; `None` with --codec auto.
    pub(crate) settings: Option<Settings>,
    /// The seed to write, until it is written.
    departure: Mutex<Option<Departure>>,
}

impl Plan {
    /// Reads the options, certificates and accelerator.
    pub(crate) fn new(
        options: &SourceOptions,
        connect: &ConnectOptions,
        setup: Option<Setup>,
    ) -> anyhow::Result<Self> {
        if let Some(name) = options.name.as_ref().filter(|name| name.len() > MAX_NAME) {
            bail!("--name has {} bytes, allowed are {MAX_NAME}", name.len());
        }
        let settings = options.settings()?;
        options.relay.apply_cpus()?;
        let connector =
            network::connector(&options.relay.tls, &options.peer, options.peer_name.as_deref())?;
        let accelerator = qat_command::accelerator(options.accelerator, &options.qat, settings)?;
        let qpl = qpl_library::for_source(options.accelerator, &options.qpl, settings)?;
        let departure = options.seed.begin(options.relay.page_size)?;
        let config = SourceConfig {
            peer: options.peer.clone(),
            connector,
            settings: settings.unwrap_or_default(),
            auto: options.auto()?,
            compress_threads: options.threads(),
            compress_wait_thread: options.compress_wait_thread == OnOff::On,
            max_bandwidth: options.max_bandwidth.map(|rate| rate.0),
            turns: options.turns.as_ref().map(TurnsOption::open).transpose()?,
            links: options.links,
            page_size: options.relay.page_size,
            name: options.name.clone(),
            setup,
            resume: options.relay.resume(),
            silence: session::SILENCE,
            connect_timeout: connect.timeout(),
            answer_timeout: connect.timeout(),
            setup_timeout: Duration::from_secs(options.setup_timeout),
            delta_cache: options.delta_cache(),
            seed: source_seed(settings),
            pages: departure.as_ref().map(Departure::sink),
            history: options.history.0,
            qpl,
        };
        check_history(options, &config)?;
        Ok(Self { config, accelerator, settings, departure: Mutex::new(departure) })
    }

    /// Writes the seed of the VM `label`, which has migrated, if the user wants one.
    pub(crate) fn write_seed(&self, label: Option<&str>) {
        let departure = self.departure.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(departure) = departure {
            departure.write(label, &host::new_id());
        }
    }

    /// Connects a relay that accepts QEMU's connections on `listening`. The keeper runs and the
    /// socket is bound before the peer is contacted, so a failure here costs the peer nothing.
    /// `before` is called before QEMU's first byte is read.
    pub(crate) fn connect(
        &self,
        listening: &Arc<Listening>,
        before: impl FnOnce(&Source),
    ) -> anyhow::Result<Source> {
        let keeper = keeper::start()?;
        let source =
            Source::connect_with(&self.config, self.accelerator.as_ref(), &mut |text| say(text))?;
        qat_command::say_problems(self.accelerator.clone());
        source.set_keeper(keeper);
        before(&source);
        source.accept_on(listening.clone())?;
        Ok(source)
    }
}

/// Refuses a --history that would have no effect.
fn check_history(options: &SourceOptions, config: &SourceConfig) -> anyhow::Result<()> {
    let size = options.history;
    if size.0 == 0 {
        return Ok(());
    }
    let count = config.history_count();
    if count == 0 {
        bail!("--history {size} goes with --codec auto, and with zstd of --level 3 to 19");
    }
    if config.histories().is_none() {
        bail!(
            "--history {size} is too little for {} compression threads: {count}M at least, or fewer \
             --compress-threads",
            config.compress_threads
        );
    }
    Ok(())
}

/// Binds the socket that QEMU migrates to.
pub(crate) fn listen(address: &UnixAddress) -> Result<Arc<Listening>, RelayError> {
    address.listen().map(Arc::new)
}

/// The beginning of a source relay's measurement.
#[derive(Clone, Copy)]
pub(crate) struct Measure {
    settings: Option<Settings>,
    started: Instant,
    cpu: f64,
}

impl Measure {
    /// Starts measuring.
    pub(crate) fn begin(settings: Option<Settings>) -> Self {
        Self { settings, started: Instant::now(), cpu: process_cpu() }
    }

    /// Reports the figures of `source` so far.
    pub(crate) fn report(&self, source: &Source) -> Report {
        let cpu = process_cpu() - self.cpu;
        Report::of_source(source, self.settings, self.started.elapsed(), cpu)
    }

    /// Makes the report for the peer, after everything has succeeded.
    pub(crate) fn for_peer(&self, source: &Source) -> Vec<u8> {
        self.report(source).for_peer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use clap::Parser;

    /// Its message to the receiver has 8 KiB.
    #[test]
    fn a_name_that_no_target_can_have_is_refused_before_anything_else() {
        let plan = |command: &[&str], name: &str| {
            let common = ["--peer", "192.0.2.1:7", "--insecure", "--name", name];
            let words = [&["platen"], command, &common].concat();
            let plan = match Cli::try_parse_from(words).unwrap().command {
                Command::Migrate(args) => Plan::new(&args.source, &args.connect, None),
                Command::Relay(args) => Plan::new(&args.source, &args.connect, None),
                _ => panic!("another command"),
            };
            plan.err().map(|error| error.to_string())
        };
        let migrate = ["migrate", "--qmp", "unix:/nonexistent/qmp"];
        let relay = ["relay", "--listen", "unix:/nonexistent/relay"];
        for command in [migrate, relay] {
            let refused = plan(&command, &"a".repeat(9000)).expect("it is too long");
            assert_eq!(refused, "--name has 9000 bytes, allowed are 255");
            assert_eq!(plan(&command, &"a".repeat(255)), None);
        }
    }
}
