//! `platen save` while QEMU sends: waits for the whole stream, an interrupt, or QEMU's end.

use crate::save::{Saving, ASK, STOP_NOW, VERDICT};
use crate::save_ending::ANSWERS;
use crate::save_intake::Intake;
use crate::save_limit::LiveLimit;
use crate::say::say;
use crate::settings::Before;
use anyhow::{ensure, Context};
use qmp::{MigrationInfo, QmpError};
use recorder::Recorded;
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time limit for the connection of a QEMU that has ended: it may have connected just before.
const CONNECTED: Duration = Duration::from_secs(5);

impl Saving<'_> {
    /// Asks QEMU for its migration; `None` while an earlier question has no answer. Waits for a
    /// second at most: an interrupt has to be heard during the switchover, too.
    pub(crate) fn migration(&mut self) -> Result<Option<MigrationInfo>, QmpError> {
        match self.qmp.unanswered() {
            0 => self.qmp.query_migrate_within(ANSWERS).map(Some),
            // Reports a monitor that was closed.
            _ => {
                let event = self.qmp.poll_event(Duration::ZERO)?;
                event.iter().for_each(|event| self.pause.note(event));
                Ok(None)
            }
        }
    }

    /// Waits until the whole stream is recorded.
    pub(crate) fn watch(
        &mut self,
        intake: &mut Intake,
        settings: &mut Before,
    ) -> anyhow::Result<Recorded> {
        let is_limited = !self.args.stop && !self.args.snapshot;
        let at = Instant::now() + Duration::from_secs(self.args.live_limit);
        let mut limit = LiveLimit::new(is_limited.then_some(at));
        loop {
            if let Some(recorded) = intake.recorded(ASK)? {
                return Ok(recorded);
            }
            ensure!(!self.interrupted.load(Ordering::Acquire), "interrupted");
            limit.heard(self.qmp.unanswered() == 0);
            let stop = || settings.set_parameter(self.qmp, "downtime-limit", json!(STOP_NOW));
            if limit.look(Instant::now(), stop)? {
                say(&format!(
                    "the VM writes faster than it is saved: stopped after {} s",
                    self.args.live_limit
                ));
            }
            // QEMU ended the migration: a device cannot migrate, or somebody called migrate_cancel.
            match self.migration() {
                // The bytes of a QEMU that has ended may still have to be recorded.
                Err(gone @ QmpError::Closed { .. }) if !intake.is_connected() => {
                    if let Some(recorded) = intake.recorded(CONNECTED)? {
                        return Ok(recorded);
                    }
                    if !intake.is_connected() {
                        return Err(gone.into());
                    }
                }
                Err(_) | Ok(None) => {}
                Ok(Some(info)) if !info.is_over() => {}
                Ok(Some(info)) => {
                    let why = info.error_desc.clone().unwrap_or_default();
                    let ended = format!("QEMU ended the migration ({}) {why}", info.status());
                    // The cause may lie here, such as a full disk: the intake closes its socket
                    // before its outcome arrives. QEMU has closed its own, so the intake ends.
                    let recorded = intake.recorded(VERDICT).context(ended.clone())?;
                    return recorded.context(ended);
                }
            }
        }
    }
}
