//! The end of a restore under libvirt, or of one of its players, as libvirt reports it.

use super::daemon::Daemon;
use anyhow::bail;
use libvirt::{Connection, Domain, Handover, State, Why};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for libvirt to notice the end of a player, or of the load.
pub(super) const NOTICES: Duration = Duration::from_secs(120);
/// Interval of queries about a VM whose state libvirt has not settled yet.
pub(super) const LATER: Duration = Duration::from_millis(50);

/// State of a VM whose player has gone.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Without {
    /// The VM waits for another player.
    Waits,
    /// QEMU had everything.
    Completed,
}

/// Refuses to continue a VM that does not wait for a player.
pub(super) fn refuse_unless_it_waits(daemon: &Daemon, domain: &Domain) -> anyhow::Result<()> {
    let name = domain.name();
    match daemon.state(domain)?.map(State::why) {
        // libvirt itself refuses if a player is at work; so does the image's lock, before.
        Some(Some(Why::PostcopyFailed | Why::Postcopy)) => Ok(()),
        Some(Some(_)) => bail!("domain {name} has all of its RAM: there is nothing to recover"),
        _ => bail!("domain {name} does not run: restore it without --recover"),
    }
}

/// Lets libvirt end a VM that has not run. Returns an error that names what is left, and quotes
/// QEMU.
pub(super) fn cancelled(
    mut connection: Connection,
    daemon: &Daemon,
    domain: &Domain,
    how: Handover,
) -> anyhow::Error {
    let cancelled = connection.cancel(domain, how);
    let state = daemon.state(domain);
    let left = match state.map(|state| state.and_then(State::why)) {
        Ok(None) => "libvirt has ended the domain, and the image is as good as before".into(),
        _ => format!(
            "the image is as good as before; end the domain: virsh destroy {}",
            domain.name()
        ),
    };
    match cancelled {
        // This is QEMU's last message, if it has ended by itself.
        Err(error) => anyhow::Error::from(error).context(left),
        Ok(()) => anyhow::Error::msg(left),
    }
}

/// Asks libvirt about a VM whose player has gone. `said` is libvirt's error message. A daemon that
/// was restarted may not report that the load has failed; it accepts the next player nevertheless.
pub(super) fn after_death(
    daemon: &Daemon,
    domain: &Domain,
    why: &str,
    said: &str,
) -> anyhow::Result<Without> {
    match daemon.state(domain)?.and_then(State::why) {
        Some(Why::PostcopyFailed | Why::Postcopy) => Ok(Without::Waits),
        Some(_) => Ok(Without::Completed),
        None => bail!(
            "{why}: the domain has ended{said}. The image is as good as before, but the VM may have run: its disks \
             are not those of the image any more"
        ),
    }
}

/// Waits until libvirt knows that the VM has all of its RAM; returns the VM's state.
pub(super) fn after_load(daemon: &Daemon, domain: &Domain) -> anyhow::Result<&'static str> {
    let until = Instant::now() + NOTICES;
    loop {
        let state = daemon.state(domain)?;
        match state.and_then(State::why) {
            Some(Why::Postcopy | Why::PostcopyFailed) if Instant::now() < until => {
                thread::sleep(LATER);
            }
            _ => {
                return Ok(match state {
                    Some(State::Running(_)) => "running",
                    Some(State::Paused(_)) => "paused",
                    _ => "ended",
                })
            }
        }
    }
}
