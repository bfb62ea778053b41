//! Control of a running source relay from other threads.

use super::shared::{Event, Shared};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

/// Ends a running [`Source`](crate::Source) from another thread (Ctrl-C), and shows its progress.
#[derive(Clone)]
pub struct SourceHandle(pub(super) Arc<Shared>);

impl std::fmt::Debug for SourceHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SourceHandle")
    }
}

/// The state of a migration, for a progress line.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Plain bytes read from QEMU.
    pub plain: u64,
    /// Bytes written to the links.
    pub transferred: u64,
    /// Non-zero pages.
    pub normal: u64,
    /// Zero pages.
    pub duplicate: u64,
    /// Codec threads that run a job now.
    pub busy_workers: usize,
    /// Codec threads.
    pub workers: usize,
    /// How long the bytes delivered last took from the source QEMU to the destination QEMU.
    pub delay: Duration,
    /// Plain bytes per second delivered lately while QEMU had to wait; 0 while unknown.
    pub drain: f64,
}

impl SourceHandle {
    /// Asks the relay to end, at the user's request. Before the commit point the source VM
    /// continues.
    pub fn stop(&self) {
        let _ = self.0.events.send(Event::Stop(None));
    }

    /// Makes the relay end because of `reason`.
    pub fn end(&self, reason: &str) {
        let _ = self.0.events.send(Event::Stop(Some(reason.to_string())));
    }

    /// Call this before the source QEMU is ordered to cancel, which starts its VM again. True: no
    /// bytes that start the destination's VM have been sent, and none will be. False: they may have
    /// been sent, and a cancel could make two copies run.
    pub fn forbid_commit(&self) -> bool {
        self.0.forbid_commit()
    }

    /// Call this when the source QEMU has refused to cancel because it is in postcopy: the
    /// destination may have the VM.
    pub fn allow_commit(&self) {
        self.0.allow_commit();
    }

    /// Whether the migration has ended, or is about to: the relay accepts no connection any more.
    pub fn is_over(&self) -> bool {
        self.0.over.load(Ordering::Acquire)
    }

    /// Whether the relay still accepts connections. Once this is false, another process may accept
    /// at its entrance ([`Entrance::returns`](crate::Entrance::returns)).
    pub fn accepts(&self) -> bool {
        self.0.accepts()
    }

    /// Whether the destination may be starting the VM now, or has it: a cancel could then make two
    /// copies run.
    pub fn in_doubt(&self) -> bool {
        let shared = &self.0;
        shared.return_path.load(Ordering::Acquire)
            && shared.may_run_there()
            && !shared.over.load(Ordering::Acquire)
    }

    /// Whether the source QEMU can turn to postcopy, or has: its stream has announced that, or has
    /// not come as far as that announcement, which is before the size of the RAM.
    pub fn may_turn_to_postcopy(&self) -> bool {
        let is_undecided = || self.0.counters.ram.load(Ordering::Relaxed) == 0;
        self.0.postcopy.load(Ordering::Acquire) || (self.0.has_main() && is_undecided())
    }

    /// Figures so far.
    pub fn progress(&self) -> Progress {
        let counters = &self.0.counters;
        Progress {
            plain: counters.plain.load(Ordering::Relaxed),
            transferred: self.0.session.bytes_out.load(Ordering::Relaxed),
            normal: counters.normal.load(Ordering::Relaxed),
            duplicate: counters.duplicate.load(Ordering::Relaxed),
            busy_workers: self.0.submitter.pool().busy_workers(),
            workers: self.0.submitter.pool().threads(),
            delay: self.0.session.credits().last_delay(),
            drain: self.0.session.credits().recent_rate(),
        }
    }
}
