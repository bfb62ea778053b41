//! A rehearsal's course: it watches the migration until the time is over, and cancels it.

use crate::say::say;
use crate::settings_keeper::{is_cancel_lost, wake_lost_cancel, LOST_CANCEL};
use anyhow::{bail, ensure};
use qmp::{Event, MigrationInfo, Qmp, Timestamp};
use rehearse::{Allowed, Discard, Observation, Schedule};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The interval between queries of the monitor.
const ASK: Duration = Duration::from_millis(25);
/// How long an old QEMU may take, before a cancel, to report that it waits to hand the VM over.
const AT_REST: Duration = Duration::from_millis(50);
/// With fewer passes than this, the rehearsal takes one more, for which the guest stands still a
/// millisecond longer.
const ENOUGH: usize = 3;
/// Time limit for QEMU to end a migration that is cancelled.
const SETTLES: Duration = Duration::from_secs(120);
/// The page size if QEMU reported none.
pub(super) const PAGE: u16 = 4096;

/// A rehearsal under way.
pub(super) struct Course {
    pub(super) schedule: Schedule,
    length: Duration,
    pub(super) begun: Instant,
    /// End of the first pass.
    first_pass: Option<Instant>,
    pub(super) ram: u64,
    /// When the VM stopped; `None` while it runs.
    stopped: Option<Timestamp>,
    pub(super) pause: Duration,
    /// Whether QEMU waits to hand the VM over.
    waits: bool,
    /// Whether the rehearsed migration has ended. A migration that QEMU reports after that is
    /// another client's, and is not cancelled.
    pub(super) over: bool,
}

impl Course {
    pub(super) fn new(length: Duration) -> Self {
        Self {
            schedule: Schedule::new(length),
            length,
            begun: Instant::now(),
            first_pass: None,
            ram: 0,
            stopped: None,
            pause: Duration::ZERO,
            waits: false,
            over: false,
        }
    }

    /// Measures until the time is over or QEMU has stopped the VM.
    pub(super) fn watch(
        &mut self,
        qmp: &mut Qmp,
        discard: &Discard,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<()> {
        loop {
            self.listen(qmp, ASK)?;
            if self.waits {
                return Ok(());
            }
            ensure!(!self.over, "another client has ended the rehearsed migration");
            ensure!(!interrupted.load(Ordering::Acquire), "interrupted");
            let info = qmp.query_migrate()?;
            match info.status() {
                "pre-switchover" => {
                    self.listen(qmp, Duration::ZERO)?;
                    self.waits = !self.over;
                    continue;
                }
                // A rehearsal's capabilities exclude postcopy.
                status if status.starts_with("postcopy") => {
                    self.over = true;
                    continue;
                }
                "active" => self.observe(&info, discard),
                _ if info.is_over() => {
                    let why = info.error_desc.unwrap_or_else(|| "no reason given".into());
                    bail!("the source QEMU ended the migration: {why}")
                }
                _ => {}
            }
            self.ensure_progress()?;
            let further = self.length.saturating_sub(self.schedule.first_pass());
            if self.first_pass.is_some_and(|at| at.elapsed() >= further) {
                return Ok(());
            }
        }
    }

    /// Fails if the first pass takes too long: QEMU then waits for a device or for the guest.
    fn ensure_progress(&self) -> anyhow::Result<()> {
        /// Seconds, and bytes a second beyond that.
        const LONGEST: (u64, u64) = (120, 100_000_000);
        let limit = Duration::from_secs(LONGEST.0 + self.ram / LONGEST.1) + 4 * self.length;
        ensure!(
            self.first_pass.is_some() || self.begun.elapsed() < limit,
            "QEMU's first pass over the RAM is not over after {} s",
            limit.as_secs()
        );
        Ok(())
    }

    /// Handles QEMU's events, and waits up to `wait` for one.
    fn listen(&mut self, qmp: &mut Qmp, wait: Duration) -> anyhow::Result<()> {
        let mut wait = wait;
        while let Some(Event { name, data, timestamp }) = qmp.poll_event(wait)? {
            match name.as_str() {
                "STOP" => drop(self.stopped.get_or_insert(timestamp)),
                "RESUME" => {
                    let since = self.stopped.take();
                    self.pause += since.map_or(Duration::ZERO, |since| timestamp.since(since));
                }
                "MIGRATION" => match data["status"].as_str() {
                    Some("cancelled" | "failed" | "completed") => {
                        (self.over, self.waits) = (true, false);
                    }
                    // Every millisecond from here on is the guest's.
                    Some("pre-switchover") if !self.over => {
                        self.waits = true;
                        return Ok(());
                    }
                    _ => {}
                },
                _ => {}
            }
            wait = Duration::ZERO;
        }
        Ok(())
    }

    fn observe(&mut self, info: &MigrationInfo, discard: &Discard) {
        let ram = info.ram.clone().unwrap_or_default();
        let page = ram.page_size.unwrap_or(PAGE.into()).max(1);
        let Some(total) = ram.total.filter(|total| *total > 0) else { return };
        if self.ram == 0 {
            self.ram = total;
            discard.begin(total / page, self.schedule.first_pass());
        }
        let pages = ram.normal.unwrap_or(0).saturating_add(ram.duplicate.unwrap_or(0));
        let allowed = self.schedule.observe(Observation {
            at: self.begun.elapsed(),
            syncs: ram.dirty_sync_count.unwrap_or(0),
            remaining: ram.remaining.unwrap_or(0),
            sent: pages.saturating_mul(page),
        });
        if !self.schedule.passes().is_empty() {
            self.first_pass.get_or_insert_with(Instant::now);
            discard.allow(allowed);
        }
    }

    /// Cancels the migration, and waits until it is over and the VM runs.
    pub(super) fn end(&mut self, qmp: &mut Qmp, discard: &Discard) -> anyhow::Result<()> {
        if self.waits {
            // QEMU writes nothing now. If another client lets it continue, it must not wait in a
            // write with the monitor locked.
            discard.allow(Allowed::All);
            // For an idle guest, the only known pass is the one that made QEMU converge.
            if self.schedule.passes().len() < ENOUGH {
                if let Ok(info) = qmp.query_migrate() {
                    self.observe(&info, discard);
                    discard.allow(Allowed::All);
                }
            }
        } else {
            // QEMU loses a cancel that comes in the instant in which it stops the VM. So the cancel
            // comes while QEMU waits in a write, or after it has reported that it waits to hand the
            // VM over.
            discard.allow(Allowed::Nothing);
            self.listen(qmp, AT_REST)?;
        }
        self.listen(qmp, Duration::ZERO)?;
        if !self.over {
            qmp.migrate_cancel()?;
        }
        discard.allow(Allowed::All);
        self.waits = false;
        let mut lost = None;
        let until = Instant::now() + SETTLES;
        loop {
            self.listen(qmp, Duration::from_millis(5))?;
            let (info, vm) = (qmp.query_migrate()?, qmp.query_status()?);
            let is_over = self.over || info.is_over() || info.status() == "none";
            // QEMU resumes the VM a moment after it has reported the end. A VM in another state
            // than this was stopped by somebody else.
            if is_over && vm.status != "finish-migrate" {
                return self.listen(qmp, Duration::ZERO);
            }
            if Instant::now() >= until {
                let text = format!(
                    "QEMU's migration stays '{}' and its VM '{}': look at it (query-status); what wakes a QEMU that lost \
                     its cancel is migrate-continue with the state cancelling",
                    info.status(),
                    vm.status
                );
                say(&text);
                bail!(text);
            }
            // The migration has converged meanwhile, and QEMU waits.
            if info.status() == "pre-switchover" && !self.over {
                qmp.migrate_cancel()?;
            }
            if self.over || !is_cancel_lost(&info, &vm.status) {
                lost = None;
            } else if lost.get_or_insert_with(Instant::now).elapsed() >= LOST_CANCEL {
                wake_lost_cancel(qmp)?;
                lost = None;
            }
        }
    }
}
