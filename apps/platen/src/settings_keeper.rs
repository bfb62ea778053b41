//! The helper process of `save`, `migrate` and `rehearse` that restores QEMU's migration settings
//! if the command is killed. It also cancels a migration whose VM waits to be handed over, and a
//! save by multifd, whose connections another helper keeps open. It lets a VM continue that was
//! stopped for an image that has no name.
//!
//! The command sends the helper the former settings through a pipe before it changes any. If the
//! pipe ends without the line [`DONE`], the command has died. The helper then connects to the
//! monitor, which is free, waits until QEMU's migration has ended, and restores the settings. After
//! five minutes it prints what it waits for, with the commands that restore the settings, and waits
//! on until QEMU ends.

use crate::save_leave::Leave;
use crate::say::say;
use crate::settings_claim::{socket_of, SocketId};
use crate::settings_former::Former;
use crate::settings_inherited::Inherited;
use anyhow::{ensure, Context};
use clap::Args;
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::UnixAddress;
use serde_json::json;
use std::io::{BufRead, ErrorKind};
use std::time::{Duration, Instant};

/// Arguments of the helper's process.
#[derive(Args, Debug)]
pub(crate) struct KeepSettingsArgs {
    /// Monitor socket
    qmp: UnixAddress,
    /// Seconds until the helper prints what it waits for
    #[arg(long, default_value_t = 300)]
    patience: u64,
    /// Seconds that the monitor may take for an answer
    #[arg(long, default_value_t = 10)]
    answer: u64,
}

/// The line that makes the helper end without touching QEMU.
pub(crate) const DONE: &str = "done";
/// The pause after the first attempt; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The pause of a helper that has printed what it waits for.
const LATER_PAUSE: Duration = Duration::from_secs(5);

/// Runs as the helper.
pub(crate) fn run(args: &KeepSettingsArgs) -> anyhow::Result<()> {
    let _ = rustix::thread::set_name(c"platen");
    let (socket, mut last) = (socket_of(&args.qmp), None);
    for line in std::io::stdin().lock().lines() {
        let line = line.context("standard input")?;
        if line == DONE {
            return Ok(());
        }
        last = Some(line);
    }
    // The last line is whole: a write of so few bytes to a pipe is not cut.
    let Some(last) = last else { return Ok(()) };
    let died = Instant::now();
    let former: Former =
        serde_json::from_str(&last).context("this command is for platen itself")?;
    let left = restore(args, &former, died, socket).with_context(|| {
        format!(
            "monitor {}: platen has died, and QEMU's migration settings are not as they were before. \
             When its migration is over, restore them there by {}",
            args.qmp,
            former.commands()
        )
    })?;
    if left == Left::Restored {
        say(&format!(
            "monitor {}: platen has died; QEMU's migration settings are as they were before",
            args.qmp
        ));
    }
    Ok(())
}

/// The result of an attempt to restore.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    Restored,
    /// QEMU has ended: nothing is left to restore.
    Gone,
    /// QEMU accepts no settings yet, for this reason.
    Later(String),
    /// QEMU has stopped the VM for an image, which has to be looked for first.
    Look,
}

/// Restores the settings as soon as QEMU accepts them, which it does not while a migration is in
/// progress. Between two attempts the monitor, which serves one client at a time, is free for
/// others.
fn restore(
    args: &KeepSettingsArgs,
    former: &Former,
    died: Instant,
    socket: Option<SocketId>,
) -> anyhow::Result<Left> {
    let until = Instant::now() + Duration::from_secs(args.patience);
    let (mut pause, mut longest) = (FIRST_PAUSE, LONGEST_PAUSE);
    let (mut is_missing, mut inherited) = (None, Inherited::default());
    loop {
        if socket_of(&args.qmp) != socket {
            return Ok(Left::Gone);
        }
        let reason = match attempt(args, former, died, (is_missing.take(), &mut inherited))? {
            Left::Look => match former.leave.as_ref().map(Leave::is_missing).transpose() {
                Ok(found) => {
                    is_missing = found;
                    continue;
                }
                Err(error) => format!("{error:#}"),
            },
            Left::Later(reason) => reason,
            left => return Ok(left),
        };
        if Instant::now() >= until && longest == LONGEST_PAUSE {
            longest = LATER_PAUSE;
            say(&format!(
                "monitor {}: platen has died, and QEMU's migration settings are not as they were \
                 before: {reason}. They are restored as soon as QEMU takes them; by hand, when its \
                 migration is over: {}",
                args.qmp,
                former.commands()
            ));
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(longest);
    }
}

/// Whether QEMU has stopped the VM for the migration in which the command died. A migration that
/// began after its death is another client's.
fn waits_for_command(info: &MigrationInfo, died: Instant) -> bool {
    let age = info.total_time.map(Duration::from_millis);
    info.status() == "pre-switchover" && age.is_some_and(|age| age >= died.elapsed())
}

/// Whether the migration that is in progress began before the command died. QEMU reports no age
/// while it sets a migration up; another client can only begin one once that of the command is
/// over, and then the settings are restored.
pub(crate) fn is_of_command(info: &MigrationInfo, died: Instant) -> bool {
    let age = info.total_time.map(Duration::from_millis);
    age.is_none_or(|age| age >= died.elapsed())
}

/// How long a cancel may take before it counts as lost.
pub(crate) const LOST_CANCEL: Duration = Duration::from_secs(2);

/// Whether QEMU has lost a cancel, or is carrying it out. A cancel in the instant between STOP and
/// `pre-switchover` leaves QEMU 7.2 waiting in `cancelling` for ever, with its VM stopped.
pub(crate) fn is_cancel_lost(info: &MigrationInfo, vm: &str) -> bool {
    info.status() == "cancelling" && vm == "finish-migrate"
}

/// Wakes a QEMU that has lost a cancel. QEMU finds that its migration is cancelled, and resumes the
/// VM. In this state it cannot hand the VM over.
pub(crate) fn wake_lost_cancel(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.execute("migrate-continue", Some(json!({ "state": "cancelling" }))).map(drop)
}

/// `is_missing`: whether the image of [`Former::leave`] is missing, if it was looked for.
fn attempt(
    args: &KeepSettingsArgs,
    former: &Former,
    died: Instant,
    (is_missing, inherited): (Option<bool>, &mut Inherited),
) -> anyhow::Result<Left> {
    let later = |error: QmpError| Ok(Left::Later(error.to_string()));
    let mut qmp = match Qmp::connect(args.qmp.path(), Duration::from_secs(args.answer)) {
        Ok(qmp) => qmp,
        Err(QmpError::Missing { .. }) => return Ok(Left::Gone),
        Err(QmpError::Connect { source, .. }) if source.kind() == ErrorKind::ConnectionRefused => {
            return Ok(Left::Gone)
        }
        // Another client is connected, QEMU is about to end, or this process lacks a resource.
        Err(error) => return later(error),
    };
    let info = match qmp.query_migrate() {
        Ok(info) => info,
        Err(error) => return later(error),
    };
    let status = info.status();
    ensure!(
        status != "postcopy-paused",
        "its migration is paused in postcopy, and accepts no settings before it is over"
    );
    if former.cancel_held && waits_for_command(&info, died) {
        // QEMU does not notice the end of a socket that it does not use, and would wait for ever.
        let cancelled = qmp.migrate_cancel();
        // After the command: the disk of the log may hang, and the VM is stopped.
        say(&format!(
            "monitor {}: platen has died, and QEMU waits to hand the VM over: cancelling its migration",
            args.qmp
        ));
        return Ok(Left::Later(match cancelled {
            Ok(()) => "QEMU's migration is being cancelled".into(),
            Err(error) => error.to_string(),
        }));
    }
    if former.cancel_held && status == "cancelling" && died.elapsed() >= LOST_CANCEL {
        let vm = qmp.query_status().map(|vm| vm.status).unwrap_or_default();
        if is_cancel_lost(&info, &vm) {
            let woken = wake_lost_cancel(&mut qmp);
            say(&format!("monitor {}: QEMU has lost the cancel: waking it", args.qmp));
            if let Err(error) = woken {
                return later(error);
            }
        }
    }
    if former.cancel
        && !info.is_over()
        && !["none", "cancelling"].contains(&status)
        && is_of_command(&info, died)
    {
        if let Err(error) = qmp.migrate_cancel() {
            return later(error);
        }
    }
    if info.is_in_progress() && (former.over || !is_of_command(&info, died)) {
        let looked = inherited.look((&mut qmp, &args.qmp), former, status);
        return Ok(Left::Later(looked.unwrap_or_else(|error| format!("{error:#}"))));
    }
    if info.is_in_progress() {
        return Ok(Left::Later(format!("QEMU's migration stays '{status}'")));
    }
    if let Some(leave) = &former.leave {
        let resumed = match (leave.has_stopped(&mut qmp, &info), is_missing) {
            (Ok(true), None) => return Ok(Left::Look),
            (Ok(true), Some(true)) => Leave::resume(&mut qmp).map(|()| true),
            (stopped, _) => stopped.map(|_| false),
        };
        match resumed {
            Ok(false) => {}
            Ok(true) => say(&format!(
                "monitor {}: platen has died before the image was complete: the VM continues",
                args.qmp
            )),
            Err(error) => return Ok(Left::Later(format!("{error:#}"))),
        }
    }
    if former.is_empty() {
        return Ok(Left::Restored);
    }
    // QEMU may hold the channels until it ends: the monitor is free while they are waited for.
    match qmp.unreleased() {
        Ok(None) => {}
        Ok(Some(status)) => {
            return Ok(Left::Later(format!(
                "QEMU holds the channels of the migration that has {status}"
            )))
        }
        Err(error) => return later(error),
    }
    // Another migration may have begun meanwhile, or QEMU does not answer for a while.
    former
        .restore_released(&mut qmp)
        .map_or_else(|error| Ok(Left::Later(format!("{error:#}"))), |()| Ok(Left::Restored))
}
