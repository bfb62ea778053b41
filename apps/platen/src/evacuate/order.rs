//! A look at each VM before anything starts, and the order of their migrations.

use super::domain;
use super::entry::{Claim, Entry, Way};
use crate::args::MigrateArgs;
use crate::migrate;
use crate::monitor::open_monitor;
use crate::settings_former::capabilities;
use advise::vm::{dirtying, Vm};
use anyhow::{bail, Context};
use std::cmp::Ordering;

/// The rate in bytes per second at which memory is assumed to leave without --max-bandwidth: 1
/// Gbit/s.
pub(super) const ASSUMED: u64 = 125_000_000;

/// Run states of a VM that is at another host already, or on its way.
const NOT_HERE: [&str; 4] = ["postmigrate", "inmigrate", "finish-migrate", "colo"];

/// A VM that can migrate.
#[derive(Debug)]
pub(super) struct Found {
    /// The run state.
    pub(super) state: String,
    /// Bytes of RAM.
    pub(super) ram: u64,
    /// Bytes of distinct pages that the guest writes to per second; `None` where QEMU did not
    /// report them.
    pub(super) dirty: Option<f64>,
    _claim: Claim,
}

#[cfg(test)]
impl Found {
    pub(super) fn made(entry: &Entry) -> Self {
        let _claim = Claim::new(entry).unwrap();
        Self { state: "running".into(), ram: 0, dirty: None, _claim }
    }
}

/// The capability of a QEMU that hands no VM over by itself.
const HOLDS: &str = "pause-before-switchover";

/// Examines one VM, for some seconds if it runs. Changes nothing.
///
/// # Errors
/// The VM cannot migrate; the message gives the reason.
pub(super) fn look(
    entry: &Entry,
    args: Option<&MigrateArgs>,
    go_on: &dyn Fn() -> bool,
) -> anyhow::Result<Found> {
    let claim = Claim::new(entry)?;
    let (monitor, args) = match (&entry.way, args) {
        (Way::Monitor { monitor, .. }, Some(args)) => (monitor, args),
        _ => {
            let domain::Looked { state, ram, dirty } = domain::look(&entry.name, go_on)?;
            return Ok(Found { state, ram, dirty, _claim: claim });
        }
    };
    let mut qmp = open_monitor(monitor)?;
    let named = || format!("monitor {monitor}");
    migrate::check(&mut qmp, args).with_context(named)?;
    if capabilities(&mut qmp).with_context(named)?.get(HOLDS) == Some(&true) {
        bail!(
            "monitor {monitor}: its capability {HOLDS} is on: QEMU would stop the VM and wait for a \
             migrate-continue, and the other VMs would wait with it. Switch it off, or move this VM \
             by platen migrate"
        );
    }
    let vm = Vm::look(&mut qmp).with_context(named)?;
    if NOT_HERE.contains(&vm.state.as_str()) {
        bail!("monitor {monitor}: the VM does not run here (it is '{:.64}')", vm.state);
    }
    let dirty = match vm.state.as_str() {
        "running" => match dirtying(&mut qmp, vm.ram, go_on) {
            Ok(found) => found.passes.last().map(|pass| pass.bytes / pass.seconds),
            // Interrupted, or another client measures: the figure only sorts.
            Err(_) => None,
        },
        _ => Some(0.0),
    };
    Ok(Found { state: vm.state, ram: vm.ram, dirty, _claim: claim })
}

/// Seconds until a VM is expected to have converged when its memory leaves at `rate` bytes per
/// second; infinite where the guest writes faster. An unknown rate counts as none.
pub(super) fn converges_in(ram: u64, dirty: Option<f64>, rate: u64) -> f64 {
    let left = rate as f64 - dirty.unwrap_or(0.0);
    if left > 0.0 {
        ram as f64 / left
    } else {
        f64::INFINITY
    }
}

/// A VM that converges sooner comes first; of those that do not converge, the one that is written
/// to least.
pub(super) fn sooner(one: &Found, other: &Found, rate: u64) -> Ordering {
    let time = |found: &Found| converges_in(found.ram, found.dirty, rate);
    let dirty = |found: &Found| found.dirty.unwrap_or(0.0);
    time(one).total_cmp(&time(other)).then(dirty(one).total_cmp(&dirty(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_ram_over_what_the_guest_leaves_of_the_rate() {
        assert!((converges_in(1 << 30, Some(0.0), 1 << 27) - 8.0).abs() < 1e-9);
        assert!((converges_in(1 << 30, Some(f64::from(1 << 26)), 1 << 27) - 16.0).abs() < 1e-9);
        assert!((converges_in(1 << 30, None, 1 << 27) - 8.0).abs() < 1e-9);
        assert!(converges_in(1 << 30, Some(2e8), ASSUMED).is_infinite());
    }
}
