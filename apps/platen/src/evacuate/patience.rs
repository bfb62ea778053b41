//! How long an interrupted evacuation waits for a migration whose source QEMU does not answer.
//!
//! The order to cancel reaches a source QEMU by its monitor. While the monitor is silent, the
//! migration neither ends nor can be ended: a forced end may leave the VM at neither host, or in
//! doubt for good. So the evacuation reports the VM as in doubt and leaves the process alone. The
//! process cancels when the monitor answers again, or completes what has gone too far for that.

use std::time::{Duration, Instant};

/// The longest silence of a source QEMU after the interrupt. A command of `platen migrate` has 10 s
/// for its answer, and one of `virsh` 30 s: so at least one of them was in vain. QEMU is silent for
/// seconds, too, while it stops a VM with a slow disk.
pub(super) const SILENCE: Duration = Duration::from_secs(60);

/// The last sign of each migration's source QEMU; `None` before the interrupt.
#[derive(Debug)]
pub(super) struct Patience(Vec<Option<Instant>>);

impl Patience {
    /// Patience with this number of VMs.
    pub(super) fn new(vms: usize) -> Self {
        Self(vec![None; vms])
    }

    /// Takes note of the order to cancel a VM's migration.
    pub(super) fn ordered(&mut self, vm: usize, now: Instant) {
        self.0[vm] = Some(now);
    }

    /// Takes note that a VM's source QEMU has answered.
    pub(super) fn answered(&mut self, vm: usize, now: Instant) {
        if let Some(last) = &mut self.0[vm] {
            *last = now;
        }
    }

    /// Whether a VM's source QEMU has been silent for too long.
    pub(super) fn is_over(&self, vm: usize, now: Instant) -> bool {
        self.0[vm].is_some_and(|last| now.saturating_duration_since(last) >= SILENCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_given_up_only_after_an_interrupt_and_a_silence() {
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let mut patience = Patience::new(2);
        patience.answered(0, begun);
        assert!(!patience.is_over(0, after(1000)), "nobody has interrupted");
        patience.ordered(0, after(1000));
        assert!(!patience.is_over(0, after(1059)));
        assert!(patience.is_over(0, after(1060)));
        // It was busy.
        patience.answered(0, after(1061));
        assert!(!patience.is_over(0, after(1120)));
        assert!(patience.is_over(0, after(1121)));
        assert!(!patience.is_over(1, after(1121)), "another VM");
    }
}
