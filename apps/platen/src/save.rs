//! `platen save`: makes a QEMU migrate into an image.

use crate::args::Channels;
use crate::compression::CompressionArgs;
use crate::interrupt;
use crate::lost_writes::warn_of_lost_writes;
use crate::monitor::open_monitor;
use crate::report::summary as summary_of;
use crate::report_file::check_file;
use crate::save_check;
use crate::save_intake::{Intake, Kind, MORE};
use crate::saved_vm::{bytes, write_json};
use crate::say::say;
use crate::settings::Before;
use crate::store_command::{begin_image, say_shared};
use anyhow::{bail, ensure, Context};
use clap::{Args, ValueEnum};
use image::{Finished, State, Summary, Writer};
use qmp::{Qmp, QmpError};
use recorder::Recorded;
use relay::UnixAddress;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Arguments of `platen save`.
#[derive(Args, Debug)]
pub(crate) struct SaveArgs {
    /// Image to write. A file of this name must not exist. In a store (`platen image init`), it
    /// shares pages with the other images there
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Monitor socket of the QEMU; start QEMU with -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "unix:PATH")]
    qmp: UnixAddress,
    /// Stop the VM at the beginning, and save each page once
    #[arg(long, conflicts_with = "live")]
    stop: bool,
    /// Let the VM run while its RAM is saved, and stop it for the rest. This is the default
    #[arg(long)]
    live: bool,
    /// Save the VM as it is at the beginning, and let it run meanwhile (QEMU's
    /// background-snapshot): each page is saved once, before the VM changes it
    #[arg(long, conflicts_with_all = ["live", "stop"])]
    snapshot: bool,
    /// Number of QEMU's multifd channels, 0 to 255; 0 is a single stream. auto is 0
    #[arg(
        long,
        default_value = "auto",
        visible_alias = "multifd-channels",
        conflicts_with = "snapshot"
    )]
    channels: Channels,
    /// Seconds after which a VM that dirties pages faster than they are saved is stopped, 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=3600))]
    live_limit: u64,
    /// State of the VM after the save
    #[arg(long, value_enum, default_value = "continue")]
    then: Then,
    #[command(flatten)]
    compression: CompressionArgs,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The state of a VM after it is saved.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It continues. A VM that was paused stays paused.
    Continue,
    /// It stays paused, as after a migration: `cont` resumes it.
    Pause,
    /// Its QEMU exits once the image is complete and on disk.
    Quit,
}

/// Interval of QMP queries.
const ASK: Duration = Duration::from_millis(100);
/// Time limit for QEMU to end a migration whose stream is complete.
const VERDICT: Duration = Duration::from_secs(120);
/// Time limit for QEMU to cancel a migration before its connection is closed.
const ANSWERS: Duration = Duration::from_secs(1);
/// Time limit for the connection of a QEMU that has ended: it may have connected just before.
const CONNECTED: Duration = Duration::from_secs(5);
/// QEMU's maximum downtime-limit, milliseconds: QEMU then stops the VM at its first check.
const STOP_NOW: u64 = 2_000_000;

pub(crate) fn run(args: &SaveArgs) -> anyhow::Result<ExitCode> {
    let options = args.compression.options()?;
    check_file(args.json.as_deref())?;
    ensure!(
        args.json.as_ref() != Some(&args.image),
        "--json {}: this is the image: name another file",
        args.image.display()
    );
    let mut qmp = open_monitor(&args.qmp)?;
    let monitor = || format!("monitor {}", args.qmp);
    let before = save_check::vm(&mut qmp).with_context(monitor)?;
    if args.snapshot {
        save_check::snapshot(args.then == Then::Continue, &before).with_context(monitor)?;
    }
    if before.running && !args.snapshot {
        warn_of_lost_writes(&mut qmp);
    }
    let uuid = qmp.query_uuid().with_context(monitor)?;
    let writer = begin_image(&args.image, options, Some(&uuid))?;
    let accelerators = writer.accelerators().to_vec();
    let interrupted = interrupt::noticed()?;
    let mut settings = Before::with_keeper(&args.qmp)?;
    let begin = Instant::now();
    let was_running = before.running;
    let (stopped, is_linked) = (None, false);
    let mut saving = Saving { args, qmp: &mut qmp, interrupted, was_running, stopped, is_linked };
    let result = saving.save(writer, &mut settings).with_context(monitor);
    let (stopped, is_linked) = (saving.stopped, saving.is_linked);
    let put_back = match &result {
        Ok(_) if args.then == Then::Quit => {
            settings.discard();
            Ok(())
        }
        _ => settings.put_back(&mut qmp).with_context(monitor),
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
        let image = if is_linked { "the image is complete" } else { "no image was made" };
        error.context(format!("{image}; the VM is '{vm}'"))
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

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

struct Saving<'a> {
    args: &'a SaveArgs,
    qmp: &'a mut Qmp,
    interrupted: Arc<AtomicBool>,
    was_running: bool,
    /// Milliseconds for which the snapshot has stopped the VM.
    stopped: Option<u64>,
    /// The image has its name. Another process may have made a file of that name, too.
    is_linked: bool,
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
            facts["running"] = json!(state == "running");
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

    /// Waits until the whole stream is recorded.
    fn watch(&mut self, intake: &mut Intake, settings: &mut Before) -> anyhow::Result<Recorded> {
        let limit = Instant::now() + Duration::from_secs(self.args.live_limit);
        let mut limited = !self.args.stop && !self.args.snapshot;
        loop {
            if let Some(recorded) = intake.recorded(ASK)? {
                return Ok(recorded);
            }
            ensure!(!self.interrupted.load(Ordering::Acquire), "interrupted");
            if limited && Instant::now() >= limit {
                limited = false;
                // During the switchover QEMU answers nothing, and needs no larger limit.
                let value = json!(STOP_NOW);
                let pushed = settings.set_parameter(self.qmp, "downtime-limit", value);
                if pushed.is_ok() {
                    say(&format!(
                        "the VM writes faster than it is saved: stopped after {} s",
                        self.args.live_limit
                    ));
                }
            }
            // QEMU ended the migration: a device cannot migrate, or somebody called migrate_cancel.
            match self.qmp.query_migrate() {
                // The bytes of a QEMU that has ended may still have to be recorded.
                Err(gone @ QmpError::Closed { .. }) if !intake.is_connected() => {
                    if let Some(recorded) = intake.recorded(CONNECTED)? {
                        return Ok(recorded);
                    }
                    if !intake.is_connected() {
                        return Err(gone.into());
                    }
                }
                Err(_) => {}
                Ok(info) if !info.is_over() => {}
                Ok(info) => {
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

    /// Finishes the image of a snapshot, whose VM runs.
    fn finish_snapshot(
        &mut self,
        mut intake: Intake,
        state: State,
    ) -> anyhow::Result<(Summary, &'static str)> {
        let made = self.left().and_then(|()| {
            intake.dismiss_keeper();
            self.stopped = self.qmp.query_migrate()?.downtime;
            let finished = self.finish(intake.take_writer()?, state)?;
            self.link(finished)
        });
        match made {
            Ok(summary) => Ok((summary, "running")),
            Err(error) => Err(self.undo(intake, error)),
        }
    }

    /// Lets the VM continue, then finishes the image.
    fn go_on(&mut self, intake: Intake, state: State) -> anyhow::Result<(Summary, &'static str)> {
        // After a cancel QEMU itself starts the VM again, even if this process ends now.
        let cancelled = self.qmp.migrate_cancel();
        let more = intake.close()?;
        let settled = cancelled.map_err(Into::into).and_then(|()| self.settle(false));
        settled?;
        let writer = intake_writer(more)?;
        let finished = self.finish(writer, state)?;
        let summary = self.link(finished)?;
        Ok((summary, if self.was_running { "running" } else { "paused" }))
    }

    /// Writes the image, sends QEMU SHUT, which completes the migration, and then gives the image
    /// its name. Without SHUT QEMU lets the VM run when this process ends, and a VM must not run
    /// beside a complete image: both would write to its disks. Between SHUT and the name the VM is
    /// stopped and has no image; if this process dies there, its keeper lets the VM continue.
    fn leave(
        &mut self,
        mut intake: Intake,
        state: State,
        settings: &mut Before,
    ) -> anyhow::Result<(Summary, &'static str)> {
        let finished = match self.finish_to_leave(&mut intake, state, settings) {
            Ok(finished) => finished,
            Err(error) => return Err(self.undo(intake, error)),
        };
        if let Err(error) = intake.say_loaded().and_then(|()| self.left()) {
            if self.qmp.query_status().is_err() {
                // This image may be all that is left of the VM.
                self.link(finished)?;
                return Err(error.context(
                    "QEMU does not answer: if it has ended, its VM is in the image; if the VM runs \
                     there, the image is out of date, so remove it",
                ));
            }
            return Err(self.undo(intake, error));
        }
        let summary = match self.link(finished) {
            Ok(summary) => summary,
            Err(error) => return Err(self.undo(intake, error)),
        };
        intake.wait_for_channels();
        if self.args.then == Then::Quit {
            self.qmp.execute("quit", None).context("QEMU does not end")?;
            return Ok((summary, "gone: its QEMU has ended"));
        }
        Ok((summary, "paused"))
    }

    /// Gives the image its name.
    fn link(&mut self, finished: Finished) -> anyhow::Result<Summary> {
        let summary = finished.link()?;
        self.is_linked = true;
        Ok(summary)
    }

    /// Writes the rest of the image, which gets no name yet, and prepares for SHUT.
    fn finish_to_leave(
        &mut self,
        intake: &mut Intake,
        state: State,
        settings: &mut Before,
    ) -> anyhow::Result<Finished> {
        let finished = self.finish(intake.take_writer()?, state)?;
        if self.was_running {
            settings.resume_at_death(&self.args.image, &self.qmp.query_migrate()?)?;
        }
        intake.is_over()?;
        Ok(finished)
    }

    /// Writes the rest of the image, on a thread of its own: a disk may hang, the VM may be stopped
    /// meanwhile, and an interrupt has to make it continue.
    fn finish(&self, writer: Writer, state: State) -> anyhow::Result<Finished> {
        let (sender, outcome) = channel();
        let work = move || {
            // Nobody waits for it after an interrupt, and it leaves no file then.
            let _ = sender.send(writer.finish(&state));
        };
        let thread = thread::Builder::new().name("finish".into()).spawn(work);
        thread.context("cannot start a thread")?;
        loop {
            match outcome.recv_timeout(ASK) {
                Ok(finished) => return Ok(finished?),
                Err(RecvTimeoutError::Timeout) => {
                    ensure!(!self.interrupted.load(Ordering::Acquire), "interrupted");
                }
                Err(RecvTimeoutError::Disconnected) => bail!("the thread that writes has ended"),
            }
        }
    }

    /// Ends the save, and makes QEMU continue its VM. A snapshot is not cancelled: that could leave
    /// a thread of QEMU waiting for ever (see `stream_keeper`). Multifd channels stay open until
    /// QEMU's migration is over, for the same reason.
    fn undo(&mut self, mut intake: Intake, error: anyhow::Error) -> anyhow::Error {
        if !self.args.snapshot {
            // First: QEMU then starts the VM again, whatever keeps the intake from its end. During
            // the switchover QEMU answers nothing while it writes to the intake, which may wait for
            // a disk that hangs.
            let _ = self.qmp.execute_within("migrate_cancel", None, ANSWERS);
        }
        let by_channels = self.args.channels.count() > 0;
        if !by_channels {
            intake.end();
        }
        intake.stop_recording();
        let settled = self.settle(!self.args.snapshot);
        if by_channels {
            let _ = self.qmp.wait_released();
            intake.end();
        }
        match settled {
            Ok(()) => error,
            Err(stuck) => error.context(format!("{stuck:#}")),
        }
    }

    /// Waits until QEMU reports the migration as completed.
    fn left(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + VERDICT;
        loop {
            let info = self.qmp.query_migrate()?;
            match info.status() {
                "completed" => return Ok(()),
                "failed" | "cancelled" => {
                    let why = info.error_desc.clone().unwrap_or_default();
                    bail!("QEMU ended the migration at its end ({}) {why}", info.status());
                }
                status => ensure!(Instant::now() < until, "QEMU's migration stays '{status}'"),
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the migration is over and the VM is as it was. With `failed` this cancels the
    /// migration first.
    fn settle(&mut self, failed: bool) -> anyhow::Result<()> {
        if failed {
            // A migration that is over accepts a cancel without effect.
            let _ = self.qmp.migrate_cancel();
        }
        let until = Instant::now() + VERDICT;
        loop {
            let info = self.qmp.query_migrate()?;
            let vm = self.qmp.query_status()?;
            let over = info.is_over() || info.status() == "none";
            if over && (vm.running || !self.was_running) && vm.status != "finish-migrate" {
                return Ok(());
            }
            if over && vm.status == "postmigrate" && self.was_running {
                self.qmp.execute("cont", None)?;
            }
            ensure!(
                Instant::now() < until,
                "QEMU's migration stays '{}' and its VM '{}': look at it (query-status, cont)",
                info.status(),
                vm.status
            );
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn intake_writer((writer, more): (Writer, bool)) -> anyhow::Result<Writer> {
    ensure!(!more, "{MORE}");
    Ok(writer)
}
