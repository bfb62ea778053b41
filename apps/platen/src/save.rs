//! `platen save`: makes a QEMU migrate into an image.

use crate::interrupt;
use crate::lost_writes::warn_of_lost_writes;
use crate::monitor::open_monitor;
use crate::report_file::check_file;
use crate::report_text::summary as summary_of;
use crate::save_args::{SaveArgs, Then};
use crate::save_check;
use crate::save_intake::{Intake, Kind};
use crate::save_pause::Pause;
use crate::saved_vm::{bytes, write_json, SavedVm};
use crate::say::say;
use crate::settings::Before;
use crate::store_command::{begin_image, say_shared};
use anyhow::{ensure, Context};
use image::{State, Summary, WriteError, Writer};
use qmp::{Qmp, QmpError};
use recorder::RecordError;
use serde_json::json;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval of QMP queries.
pub(crate) const ASK: Duration = Duration::from_millis(100);
/// Time limit for QEMU to end a migration whose stream is complete.
pub(crate) const VERDICT: Duration = Duration::from_secs(120);
/// The remark about a save that does not know the state of its VM.
const HELPER: &str =
    "; if QEMU still runs, the helper process of this save (platen keep-settings) \
                      waits for its answer, and lets a VM continue that this save has stopped";
/// QEMU's maximum downtime-limit, milliseconds: QEMU then stops the VM at its first check.
pub(crate) const STOP_NOW: u64 = 2_000_000;

pub(crate) fn run(args: &SaveArgs) -> anyhow::Result<ExitCode> {
    let options = args.compression.options()?;
    check_file(args.json.as_deref())?;
    ensure!(
        args.json.as_ref() != Some(&args.image),
        "--json {}: this is the image: name another file",
        args.image.display()
    );
    let mut settings = Before::with_keeper(&args.qmp)?;
    let mut qmp = open_monitor(&args.qmp)?;
    let monitor = || format!("monitor {}", args.qmp);
    let before = save_check::vm(&mut qmp).with_context(monitor)?;
    if args.snapshot {
        save_check::snapshot(args.then == Then::Continue, &before).with_context(monitor)?;
    }
    if before.running && !args.snapshot {
        warn_of_lost_writes(&mut qmp);
    }
    let uuid = Some(qmp.query_uuid().with_context(monitor)?);
    let vm = SavedVm { uuid, name: qmp.query_name().with_context(monitor)? };
    let writer = begin_image(&args.image, options, &vm)?;
    let accelerators = writer.accelerators().to_vec();
    let interrupted = interrupt::noticed()?;
    let begin = Instant::now();
    let was_running = before.running;
    let mut saving = Saving::new(args, &mut qmp, interrupted, was_running);
    let result = saving.save(writer, &mut settings);
    let (stopped, is_linked, is_stuck) = (saving.stopped, saving.is_linked, saving.is_stuck);
    let result = result.map_err(|error| match is_unwritten(&error) && !is_stuck {
        true => error,
        false => error.context(monitor()),
    });
    let put_back = match &result {
        Ok(_) if args.then == Then::Quit => {
            settings.discard();
            Ok(())
        }
        _ => put_back_unless(is_stuck, settings, &mut qmp).with_context(monitor),
    };
    let report = match &result {
        Ok((summary, vm)) => json!({
            "status": "completed", "vm": vm, "total-ms": millis(begin.elapsed()),
            "image-bytes": summary.file_bytes, "pages": summary.slots,
            "superseded": summary.superseded, "zero": summary.zero, "filled": summary.filled,
            "unsent": summary.unsent, "shared": summary.shared,
            "differences": summary.differences, "damaged": summary.damaged,
            "stopped-ms": stopped,
            "accelerators": accelerators.iter().map(|of| of.snapshot()).collect::<Vec<_>>(),
        }),
        Err(error) => json!({ "status": "failed", "error": format!("{error:#}") }),
    };
    write_json(args.json.as_deref(), &report);
    let (summary, vm) = result.map_err(|error| {
        let vm = qmp.query_status().map_or("unknown".into(), |vm| vm.status);
        let image = image_left(&error, is_linked, args.then);
        let helper = if is_stuck { HELPER } else { "" };
        error.context(format!("{image}; the VM is '{vm}'{helper}"))
    })?;
    say(&format!(
        "saved in {:.2} s: {} pages in {} ({} of them superseded), {} zero, {} filled; the VM is {vm}",
        begin.elapsed().as_secs_f64(),
        summary.slots,
        bytes(summary.file_bytes),
        summary.superseded,
        summary.zero,
        summary.filled,
    ));
    if let Some(stopped) = stopped {
        say(&format!("the VM was stopped for {stopped} ms"));
    }
    for (number, accelerator) in accelerators.iter().enumerate() {
        say(&format!("accelerator of thread {number}: {}", summary_of(&accelerator.snapshot())));
    }
    say_shared(&summary);
    put_back?;
    Ok(ExitCode::SUCCESS)
}

/// Restores QEMU's settings at the end of a save, unless QEMU may still stop its VM for this save.
/// Then the helper process looks at both as soon as QEMU answers, and lets the VM continue.
pub(crate) fn put_back_unless(
    is_stuck: bool,
    settings: Before,
    qmp: &mut Qmp,
) -> anyhow::Result<()> {
    if is_stuck {
        drop(settings);
        return Ok(());
    }
    settings.put_back(qmp)
}

/// Whether the image's disk is at fault, and no QEMU.
fn is_unwritten(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let by_sink = matches!(cause.downcast_ref(), Some(RecordError::<WriteError>::Sink(_)));
        by_sink || cause.is::<WriteError>()
    })
}

/// The image of a save that has failed.
fn image_left(error: &anyhow::Error, is_linked: bool, then: Then) -> String {
    match error.downcast_ref() {
        Some(WriteError::Stays { path, .. }) if then == Then::Continue => {
            format!("the image {} stays, and is out of date: remove it", path.display())
        }
        // The VM must not go on beside it.
        Some(WriteError::Stays { path, .. }) => format!(
            "the image {0} is complete, and a loss of power may take its name: look at the disk, then keep the image \
             (platen image verify {0}) and end this QEMU, or remove it and let the VM go on (cont)",
            path.display()
        ),
        _ if is_linked => "the image is complete".into(),
        _ => "no image was made".into(),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) struct Saving<'a> {
    pub(crate) args: &'a SaveArgs,
    pub(crate) qmp: &'a mut Qmp,
    pub(crate) interrupted: Arc<AtomicBool>,
    pub(crate) was_running: bool,
    /// Milliseconds for which the save has stopped a VM that runs again.
    pub(crate) stopped: Option<u64>,
    pub(crate) pause: Pause,
    /// The image has its name. Another process may have made a file of that name, too.
    pub(crate) is_linked: bool,
    /// It is not known that QEMU's migration is over and its VM as it was before.
    pub(crate) is_stuck: bool,
    /// How long QEMU may be silent until the save is given up that it was told to complete.
    pub(crate) patience: Duration,
}

impl<'a> Saving<'a> {
    /// A save that has not begun.
    pub(crate) fn new(
        args: &'a SaveArgs,
        qmp: &'a mut Qmp,
        interrupted: Arc<AtomicBool>,
        was_running: bool,
    ) -> Self {
        let (stopped, is_linked, is_stuck, patience) = (None, false, false, VERDICT);
        let pause = Pause::default();
        Self { args, qmp, interrupted, was_running, stopped, pause, is_linked, is_stuck, patience }
    }
}

impl Saving<'_> {
    /// Saves the VM; returns the image's counts and the VM's state. After an error there is no
    /// image, and the VM is as it was.
    fn save(
        &mut self,
        writer: Writer,
        settings: &mut Before,
    ) -> anyhow::Result<(Summary, &'static str)> {
        let mut facts = self.facts()?;
        let snapshot = self.args.snapshot;
        let channels = self.args.channels.count();
        if snapshot {
            settings.set(self.qmp, &save_check::snapshot_capabilities()).context(
                "this VM cannot be saved by --snapshot (background-snapshot): use --live or --stop",
            )?;
        } else {
            settings.set(self.qmp, &save_check::capabilities(channels))?;
        }
        settings.set_parameter(self.qmp, "max-bandwidth", json!(0))?;
        if self.args.stop {
            settings.set_parameter(self.qmp, "downtime-limit", json!(STOP_NOW))?;
        }
        if channels > 0 {
            settings.set_parameter(self.qmp, "multifd-channels", json!(channels))?;
            settings.set_parameter(self.qmp, "multifd-compression", json!("none"))?;
        }
        let kind = match channels {
            _ if snapshot => Kind::Snapshot,
            0 => Kind::Stream,
            _ => Kind::Multifd(channels),
        };
        let mut intake = Intake::listen(writer, kind)?;
        if channels > 0 {
            // Another process has QEMU's connections, too.
            settings.cancel_at_death()?;
        }
        if let Err(refused) = self.qmp.migrate(intake.uri()) {
            if matches!(refused, QmpError::Refused { .. }) {
                intake.call_off();
            }
            return Err(refused.into());
        }
        let result = self.watch(&mut intake, settings);
        let recorded = match result {
            Ok(recorded) => recorded,
            Err(error) => return Err(self.undo(intake, error)),
        };
        // Another client may have stopped the VM since the beginning, or let it continue.
        if let Some(state) = recorded.state.run_state() {
            // QEMU puts the VM back into this state at the end, and not into the earlier one.
            self.was_running = state == "running";
            facts["running"] = json!(self.was_running);
        }
        let state = State { facts: facts.to_string().into_bytes(), ..recorded.state };
        match self.args.then {
            _ if snapshot => self.finish_snapshot(intake, state),
            Then::Continue => self.go_on(intake, state),
            Then::Pause | Then::Quit => self.leave(intake, state, settings),
        }
    }

    /// The facts for `image info`.
    fn facts(&mut self) -> anyhow::Result<serde_json::Value> {
        let saved = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Ok(json!({
            "platen": env!("CARGO_PKG_VERSION"),
            "qemu": self.qmp.version().to_string(),
            "name": self.qmp.query_name()?,
            "uuid": self.qmp.query_uuid()?,
            "saved": saved,
            "running": self.was_running,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_save_names_the_image_that_stays() {
        let stays = || WriteError::Stays {
            path: "/srv/vm".into(),
            source: std::io::Error::other("the disk fails"),
        };
        let error = anyhow::Error::new(stays()).context("QEMU stays").context("monitor");
        let left = |error: &anyhow::Error, is_linked| image_left(error, is_linked, Then::Continue);
        assert!(left(&error, false).starts_with("the image /srv/vm stays, and is out of date"));
        // The VM has not gone on.
        for then in [Then::Pause, Then::Quit] {
            let said = image_left(&error, false, then);
            assert!(said.starts_with("the image /srv/vm is complete"), "{said}");
        }
        let other = || anyhow::anyhow!("other").context("monitor");
        assert_eq!(left(&other(), false), "no image was made");
        assert_eq!(left(&other(), true), "the image is complete");
    }
}
