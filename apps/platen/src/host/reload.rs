//! A new configuration for a service that runs, at SIGHUP.
//!
//! All of the new configuration is read and checked before any of it takes effect, so that a bad
//! file changes nothing. Migrations that run have their own copy.

use super::settings::Settings;
use super::ServiceArgs;
use anyhow::Context;
use host::Change;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::time::{clock_gettime, ClockId};
use tls::Acceptor;

/// The signals that ask for a new configuration (SIGHUP).
pub(super) struct Hangups(SignalFd);

impl Hangups {
    /// Blocks the signal, which would end the process. Call this before there are threads: they
    /// inherit the mask, as do carriers, which have no use for the signal.
    pub(super) fn take() -> anyhow::Result<Self> {
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGHUP);
        signals.thread_block().context("cannot block SIGHUP")?;
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        Ok(Self(SignalFd::with_flags(&signals, flags).context("cannot wait for SIGHUP")?))
    }

    /// Whether a signal has come since the last call.
    pub(super) fn came(&self) -> bool {
        let mut came = false;
        while matches!(self.0.read_signal(), Ok(Some(_))) {
            came = true;
        }
        came
    }
}

/// A new configuration that can take effect.
pub(super) struct Reload {
    pub(super) change: Change,
    pub(super) settings: Settings,
    /// The certificates as they are now.
    pub(super) acceptor: Acceptor,
    /// End of this host's own certificate, seconds since 1970.
    pub(super) certificate_end: u64,
}

/// Reads the configuration again.
///
/// # Errors
/// The file, or the certificates that it names, cannot be used.
pub(super) fn read(args: &ServiceArgs, now: &Settings) -> anyhow::Result<Reload> {
    let new = Settings::new(args)?;
    anyhow::ensure!(
        new.me().name == now.me().name,
        "this host is '{}' in it, and was '{}': restart the service to rename it",
        new.me().name,
        now.me().name
    );
    let change = Change::between(&now.config, new.config, &now.me().name);
    let settings = now.with(&change);
    let (acceptor, certificate_end) = settings.acceptor()?;
    Ok(Reload { change, settings, acceptor, certificate_end })
}

/// The message to the service manager at the beginning of a reload.
pub(super) fn reloading() -> String {
    let now = clock_gettime(ClockId::Monotonic);
    let microseconds = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
    format!("RELOADING=1\nMONOTONIC_USEC={microseconds}")
}
