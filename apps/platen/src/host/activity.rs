//! History since the service started: counters, events, messages.

use super::feed::Feed;
use super::journal::say_of;
use host::{Event, Phase, Record, Role, Status, Watcher, What};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Counters of a service since its start, and the followers of its events.
#[derive(Debug)]
pub(super) struct Activity {
    pub(super) since: Instant,
    /// Doors that are open now; `doors_configured` counts all.
    pub(super) doors: AtomicU64,
    pub(super) doors_configured: AtomicU64,
    /// Connections reset because of their user, or because too many waited.
    pub(super) refused: AtomicU64,
    /// Connections that carried no migration.
    pub(super) strangers: AtomicU64,
    /// Connections from other hosts that were refused.
    pub(super) links_refused: AtomicU64,
    /// Reloads of the configuration that took effect; `reloads_failed` counts the others.
    pub(super) reloads: AtomicU64,
    pub(super) reloads_failed: AtomicU64,
    /// End of this host's certificate, seconds since 1970; 0 if it is not known.
    pub(super) certificate_end: AtomicU64,
    pub(super) source: OfRole,
    pub(super) destination: OfRole,
    pub(super) feed: Feed,
}

/// Counters of the migrations of one role.
#[derive(Debug, Default)]
pub(super) struct OfRole {
    /// Migrations that have begun.
    pub(super) begun: AtomicU64,
    /// Migrations that have ended, in the order of [`Status::ALL`].
    ended: [AtomicU64; Status::ALL.len()],
    /// NBD connections that have begun.
    pub(super) disks_begun: AtomicU64,
    /// NBD connections that have failed.
    pub(super) disks_failed: AtomicU64,
    /// Bytes of QEMU's streams and of NBD connections.
    pub(super) plain: AtomicU64,
    /// Bytes on the network.
    pub(super) transferred: AtomicU64,
}

impl OfRole {
    /// Counts a migration, or an NBD connection, that begins.
    pub(super) fn begins(&self, what: What) {
        let counter = if what == What::Vm { &self.begun } else { &self.disks_begun };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn ends(&self, what: What, status: Status) {
        let counter = match (what, status) {
            (What::Vm, status) => &self.ended[status as usize],
            (What::Disk, Status::Failed) => &self.disks_failed,
            (What::Disk, _) => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of migrations that have ended with `status`.
    pub(super) fn ended(&self, status: Status) -> u64 {
        self.ended[status as usize].load(Ordering::Relaxed)
    }
}

impl Activity {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            doors: AtomicU64::new(0),
            doors_configured: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            strangers: AtomicU64::new(0),
            links_refused: AtomicU64::new(0),
            reloads: AtomicU64::new(0),
            reloads_failed: AtomicU64::new(0),
            certificate_end: AtomicU64::new(0),
            source: OfRole::default(),
            destination: OfRole::default(),
            feed: Feed::default(),
        }
    }

    pub(super) fn of(&self, role: Role) -> &OfRole {
        match role {
            Role::Source => &self.source,
            Role::Destination => &self.destination,
        }
    }
}

impl Watcher for Activity {
    fn changed(&self, before: Option<&Record>, now: &Record) {
        let counters = self.of(now.role);
        // One that was found again has sent bytes for a service before this one.
        if let Some(before) = before {
            let add = |counter: &AtomicU64, before: u64, now: u64| {
                counter.fetch_add(now.saturating_sub(before), Ordering::Relaxed);
            };
            add(&counters.plain, before.plain, now.plain);
            add(&counters.transferred, before.transferred, now.transferred);
        }
        let ended = now.phase == Phase::Ended;
        if ended {
            counters.ends(now.what, now.status.unwrap_or(Status::Failed));
            tell(now);
        }
        if ended || before.is_none_or(|before| before.phase != now.phase) {
            self.feed.send(&Event::from(now));
        }
    }
}

/// Logs how a migration has ended.
fn tell(record: &Record) {
    let outcome = match (record.status, &record.cause) {
        (Some(Status::Completed), _) => "completed".into(),
        (Some(Status::Unconfirmed), _) => {
            "is unconfirmed: look at the destination for the VM".into()
        }
        (Some(Status::Forwarded), Some(cause)) => format!("went in the clear: {cause}"),
        (Some(Status::Forwarded), None) => "went in the clear".into(),
        (_, cause) => {
            let cause = cause.as_deref().unwrap_or("its cause is not known");
            format!("failed (phase {}): {cause}", record.reached.name())
        }
    };
    let (plain, transferred) = (record.plain, record.transferred);
    let title = record.title();
    let of = if record.what == What::Vm { "QEMU's stream" } else { "NBD" };
    let text = format!("{title} {outcome}; {plain} bytes of {of} as {transferred} bytes");
    say_of(record, &text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_outcomes_are_counted_once_and_never_go_back() {
        let activity = Activity::new();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let begin = Record { plain: 100, transferred: 10, ..Record::default() };
        // Found again: its bytes so far were another service's.
        activity.changed(None, &begin);
        assert_eq!(load(&activity.source.plain), 0);
        let later = Record { plain: 150, transferred: 20, phase: Phase::Active, ..begin.clone() };
        activity.changed(Some(&begin), &later);
        activity.changed(Some(&later), &begin);
        assert_eq!(
            (load(&activity.source.plain), load(&activity.source.transferred)),
            (50, 10),
            "a record that goes back counts nothing"
        );
        let end = Record { phase: Phase::Ended, status: Some(Status::Forwarded), ..later.clone() };
        activity.changed(Some(&later), &end);
        let ended = Status::ALL.map(|status| activity.source.ended(status));
        assert_eq!(ended, [0, 0, 1, 0]);
        assert_eq!(activity.destination.ended(Status::Forwarded), 0);
    }
}
