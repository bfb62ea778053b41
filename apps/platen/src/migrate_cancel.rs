//! Cancels the migration of `migrate`, at the user's interrupt or at the deadline.

use crate::ending::Ending;
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::SourceHandle;
use std::sync::atomic::{AtomicU32, Ordering};

const UNANSWERED: &str =
    "the source QEMU's monitor does not answer: the source may be turning to postcopy. Asking again \
     (interrupt again to end all the same)";

const LOST: &str =
    "no connection to the source QEMU's monitor: the source may be turning to postcopy. Connecting \
     again (interrupt again to end all the same, which can leave the VM at neither host)";

/// The answer of a process of `evacuate` to its first interrupt, when it is too late to cancel.
const LEFT_TO_A_PERSON: &str =
    "the destination may have the VM, so this migration is not cancelled. If the peer is lost, look \
     there. Another interrupt of this process alone ends it, and the source VM may continue";

const UNDER_WAY: &str =
    "the source has turned to postcopy, and the destination does not have the VM yet: waiting until it \
     has (interrupt again to end all the same, which leaves the VM at neither host)";

/// The user's interrupts, and their way to QEMU and to the relay.
pub(crate) struct Stop<'a> {
    interrupts: &'a AtomicU32,
    /// `evacuate` sends them.
    is_fed: bool,
    /// How many are done with.
    passed_on: u32,
    /// How many had come when the user was first told what they do. Only a later one forces the
    /// end: the user may repeat an interrupt because a monitor that is silent delays that message.
    told_at: Option<u32>,
    told_to_wait: Option<&'static str>,
    /// The first one was answered, and the relay does not know of it.
    was_left: bool,
}

/// The state of the interrupts after a look.
pub(crate) enum Passed {
    /// None waits.
    On,
    /// One waits for QEMU, for this reason; the next look tries again.
    Later(Cancel),
}

impl<'a> Stop<'a> {
    pub(crate) fn new(interrupts: &'a AtomicU32, is_fed: bool) -> Self {
        let (passed_on, told_at, told_to_wait, was_left) = Default::default();
        Self { interrupts, is_fed, passed_on, told_at, told_to_wait, was_left }
    }

    fn count(&self) -> u32 {
        self.interrupts.load(Ordering::Acquire)
    }

    /// Whether the user has interrupted.
    pub(crate) fn is_asked(&self) -> bool {
        self.count() > 0
    }

    /// Passes a new interrupt on, and tells the user what it does.
    pub(crate) fn pass_on(
        &mut self,
        qmp: &mut Qmp,
        handle: &SourceHandle,
        mut note: impl FnMut(&str),
    ) -> Passed {
        let asked = self.count();
        if asked <= self.passed_on {
            return Passed::On;
        }
        let is_forced = self.told_at.is_some_and(|told_at| asked > told_at);
        let cancel = if is_forced { Cancel::TooLate } else { cancel(qmp, handle) };
        // Before the message: a user who has read it may interrupt at once.
        let so_far = self.count();
        self.told_at.get_or_insert(so_far);
        match cancel {
            Cancel::Told => note("cancelling (interrupt again to force)"),
            // `evacuate` interrupts all its VMs. That is no decision about one in doubt (W23).
            Cancel::TooLate if self.is_fed && !is_forced => {
                self.was_left = true;
                note(LEFT_TO_A_PERSON);
            }
            Cancel::TooLate => {
                if std::mem::take(&mut self.was_left) {
                    // While its peer is there, a relay only answers its first stop.
                    handle.stop();
                }
                handle.stop();
            }
            wait @ (Cancel::UnderWay | Cancel::Unanswered | Cancel::Lost) => {
                let why = match wait {
                    Cancel::UnderWay => UNDER_WAY,
                    Cancel::Lost => LOST,
                    _ => UNANSWERED,
                };
                if self.told_to_wait.replace(why) != Some(why) {
                    note(why);
                }
                return Passed::Later(wait);
            }
        }
        self.passed_on = so_far;
        Passed::On
    }
}

/// The result of an attempt to cancel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Cancel {
    /// QEMU cancels, or the relay ends.
    Told,
    /// The source turns to postcopy, and the destination does not have the VM yet. A relay that
    /// ended now would leave the VM at neither end.
    UnderWay,
    /// QEMU does not answer, as while it writes the packaged state of postcopy to a slow link. It
    /// may be in postcopy, and no order to cancel can reach it now.
    Unanswered,
    /// The connection to QEMU's monitor has ended. The source can turn to postcopy, so it may be
    /// there, and a relay that ended now could leave the VM at neither end.
    Lost,
    /// The destination may be starting the VM, or has it; the relay decides (W23).
    TooLate,
}

/// Makes QEMU cancel and close its socket, unless that would resume the source beside the
/// destination.
fn cancel(qmp: &mut Qmp, handle: &SourceHandle) -> Cancel {
    // Where the destination may have the VM, the relay decides.
    let may_turn = || handle.may_turn_to_postcopy() && !handle.in_doubt();
    match is_postcopy(&qmp.query_migrate(), may_turn) {
        Ok(true) => {
            // An order to cancel that was not answered in time has come too late.
            handle.allow_commit();
            return if handle.in_doubt() { Cancel::TooLate } else { Cancel::UnderWay };
        }
        Ok(false) => {}
        Err(unknown) => return unknown,
    }
    if !handle.forbid_commit() {
        return Cancel::TooLate;
    }
    let Err(error) = qmp.migrate_cancel() else { return Cancel::Told };
    // QEMU has turned to postcopy since the query of its status.
    if error.is_refusal() && is_postcopy(&qmp.query_migrate(), may_turn) != Ok(false) {
        handle.allow_commit();
        return Cancel::UnderWay;
    }
    // QEMU may have turned to postcopy since, and the next answer shows that. Until then no bytes
    // go out that start the destination's VM.
    if let Some(unknown) = unknown(&error, may_turn) {
        return unknown;
    }
    // No bytes that start the destination's VM go out any more, so the migration cannot go on.
    handle.stop();
    Cancel::Told
}

/// Cancels at the deadline. Returns whether QEMU has not answered: the next look tries again.
pub(crate) fn cancel_late(
    qmp: &mut Qmp,
    handle: &SourceHandle,
    ending: &mut Ending,
    note: impl Fn(&str),
) -> bool {
    match cancel(qmp, handle) {
        Cancel::Told => false,
        Cancel::Unanswered | Cancel::Lost => {
            ending.cancel_later();
            note("the source QEMU's monitor does not answer: cancelling later");
            true
        }
        Cancel::UnderWay | Cancel::TooLate => {
            ending.cancelled = None;
            note("too late to cancel: the VM has stopped, or the destination has it");
            false
        }
    }
}

/// Whether the source is in postcopy, or turns to it. The error: nobody knows that.
fn is_postcopy(
    answer: &Result<MigrationInfo, QmpError>,
    may_turn: impl Fn() -> bool,
) -> Result<bool, Cancel> {
    match answer {
        Ok(info) => Ok(info.status().starts_with("postcopy")),
        Err(error) => unknown(error, may_turn).map_or(Ok(false), Err),
    }
}

/// Why nobody knows whether the source is in postcopy, after this error of its monitor. `None` if
/// the source is not there: it cannot turn to postcopy, or QEMU has answered.
fn unknown(error: &QmpError, may_turn: impl Fn() -> bool) -> Option<Cancel> {
    match error {
        QmpError::TimedOut { .. } => Some(Cancel::Unanswered),
        error => (!error.is_refusal() && may_turn()).then_some(Cancel::Lost),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A QEMU that writes the packaged state of postcopy to a slow link answers nothing. A
    /// connection that has ended says nothing about QEMU.
    #[test]
    fn a_source_that_does_not_answer_may_be_in_postcopy() {
        let (ours, qemu) = std::os::unix::net::UnixStream::pair().unwrap();
        let greeting = r#"{"QMP":{"version":{"qemu":{"major":10,"minor":0,"micro":2},"package":""},"capabilities":[]}}"#;
        std::io::Write::write_all(
            &mut &qemu,
            format!("{greeting}\n{{\"return\":{{}},\"id\":1}}\n").as_bytes(),
        )
        .unwrap();
        let mut qmp = Qmp::over(ours, Duration::from_millis(300)).unwrap();
        assert_eq!(is_postcopy(&qmp.query_migrate(), || false), Err(Cancel::Unanswered));
        let says = |status: &str| {
            Ok(MigrationInfo { status: Some(status.into()), ..MigrationInfo::default() })
        };
        assert_eq!(is_postcopy(&says("active"), || true), Ok(false));
        for status in ["postcopy-active", "postcopy-device", "postcopy-paused"] {
            assert_eq!(is_postcopy(&says(status), || false), Ok(true), "{status}");
        }
        drop(qemu);
        assert_eq!(is_postcopy(&qmp.query_migrate(), || true), Err(Cancel::Lost));
        assert_eq!(is_postcopy(&qmp.query_migrate(), || false), Ok(false), "it cannot turn");
    }
}
