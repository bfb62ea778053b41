//! A new configuration for a service that runs, at SIGHUP.
//!
//! All of the new configuration is read and checked before any of it takes effect, so that a bad
//! file changes nothing. Migrations that run have their own copy.

use super::settings::Settings;
use super::users::{self, LookUp};
use super::ServiceArgs;
use anyhow::{anyhow, Context};
use host::Change;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::time::{clock_gettime, ClockId};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::sync::Arc;
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

/// The configuration as a thread of its own reads it: the directory service (LDAP) that knows its
/// users may not answer, and the doors must not wait.
pub(super) struct Reading(Receiver<anyhow::Result<Reload>>);

impl Reading {
    /// Begins to read the configuration again.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(super) fn begin(args: ServiceArgs, now: Arc<Settings>) -> anyhow::Result<Self> {
        Self::of(move || read(&args, &now, &users::by_name))
    }

    fn of(read: impl FnOnce() -> anyhow::Result<Reload> + Send + 'static) -> anyhow::Result<Self> {
        let (sender, result) = mpsc::channel();
        let body = move || drop(sender.send(read()));
        let thread = std::thread::Builder::new().name("reload".into()).spawn(body);
        thread.context("cannot start a thread")?;
        Ok(Self(result))
    }

    /// The result, once it has come.
    pub(super) fn end(&self) -> Option<anyhow::Result<Reload>> {
        match self.0.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            // The panic handler has reported the panic.
            Err(TryRecvError::Disconnected) => Some(Err(anyhow!("its thread has ended"))),
        }
    }
}

/// Reads the configuration again.
///
/// # Errors
/// The file, or the certificates that it names, cannot be used; a user cannot be looked up.
fn read(args: &ServiceArgs, now: &Settings, look_up: LookUp<'_>) -> anyhow::Result<Reload> {
    let new = Settings::new_by(args, look_up)?;
    anyhow::ensure!(
        new.me().name == now.me().name,
        "this host is '{}' in it, and was '{}': restart the service to rename it",
        new.me().name,
        now.me().name
    );
    let change = Change::between(&now.config, new.config.clone(), &now.me().name);
    let settings = new.with(&change);
    let (acceptor, certificate_end) = settings.acceptor()?;
    Ok(Reload { change, settings, acceptor, certificate_end })
}

/// The message to the service manager at the beginning of a reload.
pub(super) fn reloading() -> String {
    let now = clock_gettime(ClockId::Monotonic);
    let microseconds = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
    format!("RELOADING=1\nMONOTONIC_USEC={microseconds}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;

    /// As of a directory service (LDAP) that does not run yet.
    #[test]
    fn a_user_who_cannot_be_looked_up_is_named_and_not_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("platen.toml");
        let text = "allow_users = [\"qemu\"]\n[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\n\
                    ports = \"1-9\"\n";
        std::fs::write(&config, text).unwrap();
        let args = ServiceArgs { config, name: Some("a".into()), run_dir: None };
        let old = Settings::new_by(&args, &|_| Ok(Some(107))).unwrap();
        let error = read(&args, &old, &|_| Err(Errno::EIO)).err().expect("it is no user");
        let error = format!("{error:#}");
        assert!(error.contains("allow_users") && error.contains("'qemu'"), "{error}");
        assert!(error.contains("EIO"), "{error}");
        assert_eq!(old.qemu_users(), [0, 107]);
        assert!(Settings::new_by(&args, &|_| Err(Errno::EIO)).is_err());
        let none = Settings::new_by(&args, &|_| Ok(None)).unwrap();
        assert_eq!(none.qemu_users(), [0]);
    }

    #[test]
    fn a_directory_service_that_does_not_answer_is_not_waited_for() {
        let (answers, waits) = mpsc::channel::<()>();
        let reading = Reading::of(move || {
            let _ = waits.recv();
            Err(anyhow!("it has answered late"))
        });
        let reading = reading.unwrap();
        assert!(reading.end().is_none());
        drop(answers);
        let error = loop {
            match reading.end() {
                Some(result) => break result.err().expect("an error"),
                None => std::thread::yield_now(),
            }
        };
        assert!(error.to_string().contains("late"), "{error}");
        // A thread that panics has an end, too.
        assert!(reading.end().is_some_and(|result| result.is_err()));
    }
}
