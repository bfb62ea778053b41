//! The outcome of `platen migrate`: QEMU's verdict, and the report that follows from it.

use crate::report::Report;
use crate::settings_keeper::{is_cancel_lost, is_of_command, wake_lost_cancel, LOST_CANCEL};
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::{RelayError, SourceEnd};
use session::SessionError;
use std::time::{Duration, Instant};

/// How long QEMU may take, after the end of the stream, to report its migration as completed,
/// failed or cancelled.
const VERDICT: Duration = Duration::from_secs(15);

/// QEMU's status of a migration that was interrupted in postcopy: it is not over, and only the user
/// can resume it.
const PAUSED: &str = "postcopy-paused";

/// QEMU's status of a migration with pause-before-switchover whose VM has stopped.
pub(crate) const HELD: &str = "pre-switchover";

/// QEMU's result of the migration, if it reports one in time. `failed`: when the relay has ended
/// without success. A QEMU that has stopped its VM and writes nothing does not notice that end.
pub(crate) fn verdict(qmp: &mut Qmp, failed: Option<Instant>) -> Option<MigrationInfo> {
    let until = Instant::now() + VERDICT;
    let mut lost = None;
    loop {
        let info = qmp.query_migrate().ok()?;
        if info.is_over() || info.status() == PAUSED || Instant::now() > until {
            return Some(info);
        }
        if failed.is_some_and(|failed| is_of_command(&info, failed)) {
            // The next answer shows the effect.
            let _ = let_vm_go_on(qmp, &info, &mut lost);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends the migration of a QEMU that holds its VM, whose relay has ended: it has written no device
/// state, so that the destination cannot have the VM. `lost`: since when QEMU has lost a cancel.
fn let_vm_go_on(
    qmp: &mut Qmp,
    info: &MigrationInfo,
    lost: &mut Option<Instant>,
) -> Result<(), QmpError> {
    if info.status() == HELD {
        return qmp.migrate_cancel();
    }
    if info.status() != "cancelling" || !is_cancel_lost(info, &qmp.query_status()?.status) {
        *lost = None;
    } else if lost.get_or_insert_with(Instant::now).elapsed() >= LOST_CANCEL {
        *lost = None;
        return wake_lost_cancel(qmp);
    }
    Ok(())
}

/// Fills in the figures that QEMU reports, and otherwise the relay's.
pub(crate) fn fill(
    report: &mut Report,
    info: Option<&MigrationInfo>,
    result: &Result<SourceEnd, RelayError>,
    interrupted: bool,
) {
    if let Ok(end) = result {
        report.set_end(end);
    }
    // A QEMU that was ended as soon as its VM had moved reports nothing. The destination has.
    let without = match result {
        Ok(end) if end.return_path => "completed",
        _ => "failed",
    };
    let status = info.map_or(without, MigrationInfo::status);
    report.may_run_there = match result {
        Ok(_) => (status != "completed").then_some(true),
        Err(error) => Some(error.may_run_there()),
    };
    report.status = match (result, status) {
        // Another client of the monitor has switched return-path off.
        (Ok(end), "completed") if !end.return_path => "unconfirmed".into(),
        (Ok(_), "completed") => "completed".into(),
        // The destination has the whole stream. Another client has cancelled just before QEMU
        // counted the migration as completed, and the source's VM runs, too.
        (Ok(_), _) => "failed".into(),
        (Err(_), PAUSED) => PAUSED.into(),
        // The user has to see the error, whatever QEMU calls its end.
        (Err(error), _) if error.may_run_there() => "failed".into(),
        (Err(_), "cancelled") => "cancelled".into(),
        (Err(RelayError::SourceEnded | RelayError::Session(SessionError::Local { .. })), _)
            if interrupted =>
        {
            "cancelled".into()
        }
        (Err(_), _) => "failed".into(),
    };
    if report.status != "completed" {
        report.hidden_downtime = None;
    }
    if let Some(info) = info {
        if let Some(total) = info.total_time {
            report.set_total(Duration::from_millis(total));
        }
        report.downtime = info.downtime;
        report.setup_time = info.setup_time;
        report.dirty_sync_count = info.ram.as_ref().and_then(|ram| ram.dirty_sync_count);
        report.error.clone_from(&info.error_desc);
    }
    let error = match result {
        Err(error) => error.to_string(),
        Ok(end) if report.status == "failed" => {
            let heard = if end.return_path { "confirmed" } else { "has the whole stream" };
            let status = info.map_or("gone", MigrationInfo::status);
            format!("the destination {heard}, but the source QEMU ends as '{status}'")
        }
        Ok(_) => return,
    };
    report.error = Some(match &report.error {
        Some(desc) => format!("{error} (QEMU: {desc})"),
        None => error,
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(return_path: bool) -> SourceEnd {
        SourceEnd {
            total: Duration::from_secs(1),
            peer_report: Vec::new(),
            return_path,
            hidden_downtime: None,
        }
    }

    /// Another client of the monitor ends the source QEMU at the event that it has completed.
    #[test]
    fn a_source_that_is_gone_when_the_destination_has_confirmed_has_migrated() {
        let status = |result: Result<SourceEnd, RelayError>| {
            let mut report = Report::default();
            fill(&mut report, None, &result, false);
            report.status
        };
        assert_eq!(status(Ok(end(true))), "completed");
        assert_eq!(status(Ok(end(false))), "failed");
        assert_eq!(status(Err(RelayError::SourceEnded)), "failed");
    }

    /// Another client cancels when the end of the stream has gone out, or has switched return-path
    /// off.
    #[test]
    fn a_migration_whose_vm_may_run_there_is_not_called_cancelled() {
        let filled = |status: &str, result: Result<SourceEnd, RelayError>| {
            let status = Some(status.to_owned());
            let info = MigrationInfo { status, ..MigrationInfo::default() };
            let mut report = Report::default();
            fill(&mut report, Some(&info), &result, true);
            (report.status, report.may_run_there)
        };
        for error in [RelayError::SourceGone, RelayError::LeftInDoubt] {
            assert_eq!(filled("cancelled", Err(error)), ("failed".into(), Some(true)));
        }
        let ended = filled("cancelled", Err(RelayError::SourceEnded));
        assert_eq!(ended, ("cancelled".into(), Some(false)));
        assert_eq!(filled("completed", Ok(end(false))), ("unconfirmed".into(), None));
        for (qemu, confirmed) in [("cancelled", true), ("failed", true), ("cancelled", false)] {
            assert_eq!(filled(qemu, Ok(end(confirmed))), ("failed".into(), Some(true)), "{qemu}");
        }
    }
}
