//! The end of `platen save`: the image gets its name, and the VM continues, stays stopped or ends.

use crate::save::{Saving, ASK, VERDICT};
use crate::save_args::Then;
use crate::save_intake::{Intake, MORE};
use crate::save_name::named;
use crate::say::say;
use crate::settings::Before;
use anyhow::{bail, ensure, Context};
use image::{Finished, State, Summary, WriteError, Writer};
use qmp::QmpError;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

#[cfg(test)]
mod tests;

/// Time limit for QEMU to answer a question, and to cancel a migration before its connection is
/// closed. During the switchover QEMU answers nothing.
pub(crate) const ANSWERS: Duration = Duration::from_secs(1);

impl Saving<'_> {
    /// Finishes the image of a snapshot, whose VM runs.
    pub(crate) fn finish_snapshot(
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
    pub(crate) fn go_on(
        &mut self,
        intake: Intake,
        state: State,
    ) -> anyhow::Result<(Summary, &'static str)> {
        // After a cancel QEMU itself starts the VM again, even if this process ends now.
        match self.qmp.migrate_cancel() {
            // QEMU may answer nothing while it flushes the VM's disks. It hears of the cancel
            // later, or of the end of its connection, and starts the VM in either case.
            Ok(()) | Err(QmpError::TimedOut { .. }) => {}
            // QEMU waits for SHUT with its VM stopped, until its connection ends.
            Err(error) => return Err(self.undo(intake, error.into())),
        }
        let more = intake.close()?;
        self.settle(false)?;
        self.stopped = self.paused();
        let writer = intake_writer(more)?;
        let finished = self.finish(writer, state)?;
        let summary = self.link(finished)?;
        Ok((summary, if self.was_running { "running" } else { "paused" }))
    }

    /// Writes the image, sends QEMU SHUT, which completes the migration, and then gives the image
    /// its name. Without SHUT QEMU lets the VM run when this process ends, and a VM must not run
    /// beside a complete image: both would write to its disks. Between SHUT and the name the VM is
    /// stopped and has no image; if this process dies there, its keeper lets the VM continue.
    pub(crate) fn leave(
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
            if self.is_gone() {
                // This image may be all that is left of the VM.
                let error = match self.link(finished) {
                    Ok(_) => error,
                    Err(stays) if has_name(&stays) => stays,
                    Err(error) => return Err(error),
                };
                return Err(error.context(
                    "QEMU has closed its monitor: if it has ended, its VM is in the image; if the \
                     VM runs there, the image is out of date, so remove it",
                ));
            }
            return Err(self.undo(intake, error));
        }
        let summary = match self.link(finished) {
            Ok(summary) => summary,
            // The image is complete: the VM must not run beside it.
            Err(error) if has_name(&error) => {
                intake.wait_for_channels();
                return Err(error);
            }
            Err(error) => return Err(self.undo(intake, error)),
        };
        intake.wait_for_channels();
        if self.args.then == Then::Quit {
            self.qmp.execute("quit", None).context("QEMU does not end")?;
            return Ok((summary, "gone: its QEMU has ended"));
        }
        Ok((summary, "paused"))
    }

    /// Milliseconds for which the VM was stopped, by the events that QEMU has sent so far.
    fn paused(&mut self) -> Option<u64> {
        while let Ok(Some(event)) = self.qmp.poll_event(Duration::ZERO) {
            self.pause.note(&event);
        }
        self.pause.millis().filter(|_| self.was_running)
    }

    /// Whether QEMU has ended. One that is silent may have lost this save and let its VM run later,
    /// or the kernel still frees its memory, and closes its monitor after that.
    fn is_gone(&mut self) -> bool {
        let status = self.qmp.execute_within("query-status", None, self.patience);
        matches!(status, Err(QmpError::Closed { .. }))
    }

    /// Gives the image its name.
    fn link(&mut self, finished: Finished) -> anyhow::Result<Summary> {
        let image = self.args.image.display();
        let summary = named(move || finished.link(), &self.interrupted, &image, &mut say)??;
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
    pub(crate) fn undo(&mut self, mut intake: Intake, error: anyhow::Error) -> anyhow::Error {
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

    /// Waits until QEMU reports the migration as completed, and behind that its VM as stopped for
    /// good.
    fn left(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + VERDICT;
        loop {
            let info = self.qmp.query_migrate()?;
            match info.status() {
                "completed" if self.qmp.query_status()?.status != "finish-migrate" => return Ok(()),
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
        let settled = self.wait_until_settled(failed);
        self.is_stuck = settled.is_err();
        settled
    }

    fn wait_until_settled(&mut self, failed: bool) -> anyhow::Result<()> {
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

/// Whether the image has its name after this error.
fn has_name(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(WriteError::Stays { .. }))
}

fn intake_writer((writer, more): (Writer, bool)) -> anyhow::Result<Writer> {
    ensure!(!more, "{MORE}");
    Ok(writer)
}
