//! How long an evacuation waits for a migration whose source QEMU does not answer.
//!
//! While a source QEMU's monitor is silent, nobody can tell whether its migration will end, and the
//! order to cancel does not reach it. A forced end may leave the VM at neither host, or in doubt
//! for good. So the evacuation reports the VM as in doubt, leaves the process alone, and goes on
//! with the others. The process completes the migration, or cancels it if it was told to, when the
//! monitor answers again.
//!
//! Before an interrupt a migration that sends is waited for: QEMU's main thread may be busy, for
//! example with a slow disk, while other threads send the VM.
//!
//! Only time in which the evacuation itself runs counts. After a stop (Ctrl-Z) the signs of that
//! time are still to be read.

use std::time::Duration;

/// The longest silence of a source QEMU. A command of `platen migrate` has 10 s for its answer, and
/// one of `virsh` 30 s: so at least one of them was in vain. QEMU is silent for seconds, too, while
/// it stops a VM with a slow disk.
pub(super) const SILENCE: Duration = Duration::from_secs(60);
/// Bytes in that time that are no more than heartbeats.
const NEXT_TO_NOTHING: u64 = 1 << 20;
/// The most time that a turn of the evacuation's loop counts for. It takes a fifth of a second.
const MOST: Duration = Duration::from_secs(1);

/// The signs of a migration.
#[derive(Clone, Debug, Default)]
struct Signs {
    is_ordered: bool,
    /// The time since the last answer of the source QEMU.
    silent: Duration,
    /// The time since it last sent more than next to nothing, and the bytes then.
    still: Duration,
    sent: u64,
}

/// The last signs of each migration.
#[derive(Debug)]
pub(super) struct Patience(Vec<Option<Signs>>);

impl Patience {
    /// Patience with this number of VMs.
    pub(super) fn new(vms: usize) -> Self {
        Self(vec![None; vms])
    }

    /// Takes note that a VM's migration has started, if that is not known. A `platen migrate` shows
    /// it by its first sample: before, it may wait for its receiver, and its commands have limits.
    pub(super) fn started(&mut self, vm: usize) {
        self.0[vm].get_or_insert_default();
    }

    /// Takes note of the order to cancel a VM's migration.
    pub(super) fn ordered(&mut self, vm: usize) {
        self.0[vm] = Some(Signs { is_ordered: true, ..Signs::default() });
    }

    /// Takes note that a VM's source QEMU has answered.
    pub(super) fn answered(&mut self, vm: usize) {
        if let Some(signs) = &mut self.0[vm] {
            signs.silent = Duration::ZERO;
        }
    }

    /// Takes note that libvirt has answered without any figure of the migration. After the order to
    /// cancel it does not count: then the migration has to end.
    pub(super) fn heard(&mut self, vm: usize) {
        if self.0[vm].as_ref().is_some_and(|signs| !signs.is_ordered) {
            self.answered(vm);
        }
    }

    /// Takes note of the bytes that a VM's migration has sent so far.
    pub(super) fn sent(&mut self, vm: usize, bytes: u64) {
        if let Some(signs) = &mut self.0[vm] {
            if bytes.abs_diff(signs.sent) > NEXT_TO_NOTHING {
                (signs.sent, signs.still) = (bytes, Duration::ZERO);
            }
        }
    }

    /// Takes note that time has passed.
    pub(super) fn pass(&mut self, time: Duration) {
        let time = time.min(MOST);
        for signs in self.0.iter_mut().flatten() {
            signs.silent = signs.silent.saturating_add(time);
            signs.still = signs.still.saturating_add(time);
        }
    }

    /// Whether a VM's source QEMU has been silent for too long.
    pub(super) fn is_over(&self, vm: usize) -> bool {
        self.0[vm].as_ref().is_some_and(|signs| {
            signs.silent >= SILENCE && (signs.is_ordered || signs.still >= SILENCE)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(patience: &mut Patience, seconds: u32) {
        (0..seconds).for_each(|_| patience.pass(Duration::from_secs(1)));
    }

    #[test]
    fn a_source_that_has_to_cancel_is_given_up_after_a_silence() {
        let mut patience = Patience::new(2);
        patience.answered(0);
        pass(&mut patience, 1000);
        assert!(!patience.is_over(0), "it has not started");
        patience.started(0);
        patience.ordered(0);
        pass(&mut patience, 59);
        // Bytes end no such migration, and neither does an answer without figures.
        patience.sent(0, 1 << 30);
        patience.heard(0);
        assert!(!patience.is_over(0));
        pass(&mut patience, 1);
        assert!(patience.is_over(0));
        // It was busy.
        patience.answered(0);
        pass(&mut patience, 59);
        assert!(!patience.is_over(0));
        pass(&mut patience, 1);
        assert!(patience.is_over(0) && !patience.is_over(1));
    }

    #[test]
    fn without_an_order_a_source_that_sends_or_answers_is_waited_for() {
        let mut patience = Patience::new(2);
        patience.started(0);
        patience.started(1);
        for minute in 1..10_u64 {
            pass(&mut patience, 59);
            patience.sent(0, minute << 21);
            patience.heard(1);
            assert!(!patience.is_over(0) && !patience.is_over(1));
        }
        // Heartbeats.
        patience.sent(0, (9 << 21) + 1000);
        pass(&mut patience, 59);
        assert!(!patience.is_over(0));
        pass(&mut patience, 1);
        assert!(patience.is_over(0) && patience.is_over(1));
    }

    #[test]
    fn time_in_which_the_evacuation_does_not_run_does_not_count() {
        let mut patience = Patience::new(1);
        patience.started(0);
        patience.pass(Duration::from_secs(3600));
        pass(&mut patience, 58);
        assert!(!patience.is_over(0));
        pass(&mut patience, 1);
        assert!(patience.is_over(0));
    }
}
