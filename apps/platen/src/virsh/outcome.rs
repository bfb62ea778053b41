//! The end of a restore under libvirt, or of one of its players, as libvirt reports it.

use super::daemon::Daemon;
use crate::say::say;
use anyhow::{bail, Context};
use libvirt::{Connection, Domain, Handover, LibvirtError, State, Why};
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
    match daemon.state(domain)? {
        // libvirt itself refuses if a player is at work, or if the VM has all of its RAM; so does
        // the image's lock, before, in the first case.
        Some(state) if may_lack_pages(state) => Ok(()),
        Some(State::Running(_)) => {
            bail!("domain {name} has all of its RAM: there is nothing to recover")
        }
        _ => bail!("domain {name} does not run: restore it without --recover"),
    }
}

/// Whether a VM in this state may lack pages. libvirt keeps the reason of a pause that precedes the
/// death of a player, for example an error of the guest's disk.
fn may_lack_pages(state: State) -> bool {
    match state {
        State::Paused(_) => true,
        state => matches!(state.why(), Some(Why::Postcopy | Why::PostcopyFailed)),
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

/// Asks libvirt about a VM whose player has gone. `said` is libvirt's error when it was to take the
/// VM over. A daemon that was restarted may not report that the load has failed; it accepts the
/// next player nevertheless.
pub(super) fn after_death(
    daemon: &Daemon,
    domain: &Domain,
    why: &str,
    said: Option<&LibvirtError>,
) -> anyhow::Result<Without> {
    // The daemon denies that the VM has all of its RAM. A lost connection tells nothing about it.
    let is_denied = said.is_some_and(|error| !error.is_lost());
    match daemon.state(domain)? {
        Some(state) if may_lack_pages(state) => Ok(Without::Waits),
        Some(State::Running(_)) if is_denied => Ok(Without::Waits),
        Some(State::Running(_)) => Ok(Without::Completed),
        _ => {
            let said = said.map(|error| format!(" ({error})")).unwrap_or_default();
            bail!(
                "{why}: the domain has ended{said}. The image is as good as before, but the VM may have run: its disks \
                 are not those of the image any more"
            )
        }
    }
}

/// The state of a VM that had all of its RAM when libvirt was to take it over. `finished` is
/// libvirt's answer, and `assumed` the state after a success. After the end of a daemon the next
/// one gets `limit` to find the VM's state.
pub(super) fn taken_over(
    finished: Result<(), LibvirtError>,
    daemon: &Daemon,
    domain: &Domain,
    assumed: &'static str,
    limit: Duration,
) -> anyhow::Result<&'static str> {
    match finished {
        Ok(()) => Ok(after_load(daemon, domain).unwrap_or(assumed)),
        // The daemon may have ended after it had started the CPUs.
        Err(error) if error.is_lost() => {
            if is_left_paused(daemon, domain, limit)? {
                return Err(anyhow::Error::from(error).context(not_taken_over(domain)));
            }
            match after_load(daemon, domain)? {
                "ended" => Err(error.into()),
                vm => {
                    say(RESTARTED);
                    Ok(vm)
                }
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether the daemon that follows leaves a VM paused as the former one prepared it. A daemon that
/// has just started knows that state first. Then it ends a VM that has not run, or finds that it
/// runs.
fn is_left_paused(daemon: &Daemon, domain: &Domain, limit: Duration) -> anyhow::Result<bool> {
    let until = Instant::now() + limit;
    while daemon.state(domain)? == Some(State::Paused(Why::Coming)) {
        if Instant::now() >= until {
            return Ok(true);
        }
        thread::sleep(LATER);
    }
    Ok(false)
}

fn not_taken_over(domain: &Domain) -> String {
    let name = domain.name();
    format!(
        "libvirt's daemon ended as it was to take the VM over, and its domain is paused for a \
         migration still. If QEMU says that the VM runs (virsh qemu-monitor-command {name} --hmp \
         'info status'), let it run: virsh resume {name}. If not, it has not run, and the image is \
         as good as before: virsh destroy {name}, and repeat this command"
    )
}

/// Printed for a daemon that has ended during the load.
pub(super) const RESTARTED: &str = "libvirt's daemon was restarted meanwhile";

/// Waits until libvirt knows that the VM has all of its RAM; returns the VM's state.
pub(super) fn after_load(daemon: &Daemon, domain: &Domain) -> anyhow::Result<&'static str> {
    let until = Instant::now() + NOTICES;
    let unknown = || {
        format!("QEMU has all of the VM's RAM: look at the VM (virsh domstate {})", domain.name())
    };
    loop {
        let state = daemon.state(domain).with_context(unknown)?;
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

#[cfg(test)]
mod tests {
    use super::super::made::made;
    use super::*;

    /// States and reasons by libvirt's numbers.
    const RUNS: [u32; 2] = [1, 1];
    const RUNS_IN_POSTCOPY: [u32; 2] = [1, 10];
    const STOPPED_AT_AN_ERROR: [u32; 2] = [3, 5];
    const WAITS: [u32; 2] = [3, 13];
    const NOT_TAKEN_OVER: [u32; 2] = [3, 2];

    fn refused() -> LibvirtError {
        LibvirtError::Said { code: 9, message: "migration failed".into() }
    }

    /// The guest has stopped at an error of its disk, and its player has died: libvirt still gives
    /// the first reason.
    #[test]
    fn a_vm_whose_player_died_is_complete_only_if_nothing_denies_it() {
        use Without::{Completed, Waits};
        for (state, said, expected) in [
            (STOPPED_AT_AN_ERROR, Some(refused()), Waits),
            (STOPPED_AT_AN_ERROR, Some(LibvirtError::Closed), Waits),
            (STOPPED_AT_AN_ERROR, None, Waits),
            (WAITS, Some(refused()), Waits),
            (RUNS_IN_POSTCOPY, None, Waits),
            (RUNS, Some(refused()), Waits),
            (RUNS, Some(LibvirtError::Closed), Completed),
            (RUNS, None, Completed),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let (daemon, domain) = made(folder.path(), Some(state));
            let without = after_death(&daemon, &domain, "why", said.as_ref()).unwrap();
            assert_eq!(without, expected, "{state:?} {said:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let (daemon, domain) = made(folder.path(), None);
        let error = after_death(&daemon, &domain, "why", Some(&refused())).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("has ended (libvirt says: migration failed)"), "{text}");
    }

    #[test]
    fn a_vm_that_stopped_at_an_error_can_be_recovered_and_one_that_runs_cannot() {
        for (state, refusal) in [
            (Some(STOPPED_AT_AN_ERROR), None),
            (Some(WAITS), None),
            (Some(RUNS), Some("all of its RAM")),
            (None, Some("does not run")),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let (daemon, domain) = made(folder.path(), state);
            let refused = refuse_unless_it_waits(&daemon, &domain).map_err(|e| e.to_string());
            match (refusal, refused) {
                (None, Ok(())) => {}
                (Some(words), Err(text)) => assert!(text.contains(words), "{text}"),
                other => panic!("{state:?}: {other:?}"),
            }
        }
    }

    /// With `--load`, the daemon ends after it has started the CPUs, and is there again.
    #[test]
    fn a_vm_that_runs_although_its_daemon_has_ended_is_restored() {
        let lost = || Err(LibvirtError::Closed);
        for (finished, state, expected) in [
            (lost(), Some(RUNS), Ok("running")),
            (lost(), Some(STOPPED_AT_AN_ERROR), Ok("paused")),
            (lost(), Some(NOT_TAKEN_OVER), Err("virsh destroy g1")),
            (lost(), None, Err("closed the connection")),
            (Err(refused()), Some(RUNS), Err("migration failed")),
            (Ok(()), Some(RUNS), Ok("running")),
            (Ok(()), Some(STOPPED_AT_AN_ERROR), Ok("paused")),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let (daemon, domain) = made(folder.path(), state);
            let what = format!("{finished:?} {state:?}");
            match (taken_over(finished, &daemon, &domain, "running", Duration::ZERO), expected) {
                (Ok(vm), Ok(expected)) => assert_eq!(vm, expected, "{what}"),
                (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
                other => panic!("{what}: {other:?}"),
            }
        }
    }
}
