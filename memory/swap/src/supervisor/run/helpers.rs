//! Helper processes: after a start, before the end, and trainers.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::{Supervisor, AGAIN, GONE};
use crate::supervisor::child::{Helper, Task};
use crate::supervisor::error::{failed, with_cause, SuperviseError};
use crate::supervisor::process::Process;
use crate::supervisor::NOT_BEGUN;

/// The status of a process that SIGKILL has ended.
pub(super) const KILLED: i32 = 9;

impl Supervisor<'_> {
    /// Runs the helper that follows the current server's start, if the server is ready.
    pub(super) fn up(&mut self) -> Result<(), SuperviseError> {
        self.up_again = None;
        let ready = self.server.as_ref().filter(|server| server.ready.is_some());
        let Some(pid) = ready.map(|server| server.child.id()) else { return Ok(()) };
        let first = !self.up_begun;
        if !first && self.is_set_up_or_taken_down() {
            self.up_later = true;
            // Requests reach the server all the same.
            self.renewal_served();
            return Ok(());
        }
        self.up_begun = true;
        let Some(command) = self.service.up(!first, pid) else {
            self.up_ended(first);
            return Ok(());
        };
        let limit = self.service.ready_limit();
        match self.help(command, Task::Up { first }, Some(limit)) {
            Ok(()) => {
                if let Some(helper) = self.helpers.last().filter(|_| first) {
                    self.set_up = true;
                    self.service.up_runs(helper.child.id());
                }
                Ok(())
            }
            Err(error) if first => {
                self.end_server();
                Err(error)
            }
            Err(error) => {
                self.service.say(&format!("{}: trying again", with_cause(&error)));
                self.up_again = Some(Instant::now() + AGAIN);
                Ok(())
            }
        }
    }

    /// Whether the disk has a helper beside which no other may work on it. Swapping must not start
    /// again on a disk that is being taken down.
    fn is_set_up_or_taken_down(&self) -> bool {
        let has_the_disk = |task| matches!(task, Task::Up { first: true } | Task::Down);
        self.stopping || self.helpers.iter().any(|helper| has_the_disk(helper.task))
    }

    /// Runs the helper that has waited for another one's end.
    pub(super) fn up_now(&mut self) {
        if std::mem::take(&mut self.up_later) {
            self.up_again = Some(Instant::now());
        }
    }

    /// Records that the helper after a server's start has succeeded.
    pub(super) fn up_ended(&mut self, first: bool) {
        if first && !self.been_up {
            self.notify.say("READY=1");
        }
        self.been_up |= first;
        self.service.is_up();
        self.notify.say("STATUS=serving");
        self.renewal_served();
        self.up_now();
    }

    /// Starts the trainer that the server asked for, if none runs. If it cannot be started, its
    /// socket is closed, which tells the server.
    pub(super) fn train(&mut self) {
        if self.ending || self.stopping || self.down_again.is_some() {
            self.to_train = None;
        }
        if self.to_train.is_none() {
            return;
        }
        if let Some(former) = self.trainer() {
            // The server no longer waits for the former trainer. The next one starts when it has
            // exited.
            former.dismiss();
            return;
        }
        let channel = self.to_train.take();
        if let Some((command, limit)) = channel.and_then(|channel| self.service.train(channel)) {
            if let Err(error) = self.help(command, Task::Train, Some(limit)) {
                self.service.say(&with_cause(&error));
            }
        }
    }

    pub(super) fn trainer(&mut self) -> Option<&mut Helper> {
        self.helpers.iter_mut().find(|helper| helper.task == Task::Train)
    }

    /// Ends training: no server waits for a trainer any more.
    pub(super) fn end_training(&mut self) {
        self.to_train = None;
        if let Some(trainer) = self.trainer() {
            trainer.dismiss();
        }
    }

    pub(super) fn help(
        &mut self,
        mut command: Command,
        task: Task,
        limit: Option<Duration>,
    ) -> Result<(), SuperviseError> {
        if let Some(nth) = self.helpers.iter().position(|helper| helper.task == task) {
            // The older helper's task is out of date.
            let other = self.helpers.swap_remove(nth);
            self.dismiss(other.child);
        }
        let child = Process::spawn(command.stdin(Stdio::null()));
        let child = child.map_err(failed("start a helper"))?;
        let deadline = limit.map(|limit| Instant::now() + limit);
        self.helpers.push(Helper { child, task, deadline, killed: false });
        Ok(())
    }

    pub(super) fn helpers_ended(&mut self) -> Result<(), SuperviseError> {
        let mut nth = 0;
        while let Some(helper) = self.helpers.get_mut(nth) {
            match helper.child.try_wait().map_err(failed("wait for a helper"))? {
                Some(status) => {
                    let helper = self.helpers.swap_remove(nth);
                    // One that the supervisor has killed has none, or is marked.
                    let by_itself = helper.deadline.is_some() && !helper.killed;
                    if by_itself {
                        self.note_kill(Some(status));
                    }
                    if helper.task == Task::Train && !status.success() && by_itself {
                        self.service.say(&format!("a trainer has ended with {status}"));
                    }
                    self.helper_ended(helper.task, status)?;
                }
                None => nth += 1,
            }
        }
        Ok(())
    }

    /// Records the end of a process other than the server, which the supervisor has not killed. If
    /// the OOM killer has, that kill is not taken for the cause of a server's death.
    pub(super) fn note_kill(&mut self, status: Option<ExitStatus>) {
        if status.and_then(|status| status.signal()) == Some(KILLED) {
            self.oom.another_was_killed();
        }
    }

    /// Kills helpers that are late. Their exit is then handled as a failure, and so is that of one
    /// that is not gone in time after its kill: it hangs in a call of the kernel.
    pub(super) fn enforce_helpers(&mut self) -> Result<(), SuperviseError> {
        let late = |helper: &Helper| helper.deadline.is_some_and(|at| at <= Instant::now());
        while let Some(nth) = self.helpers.iter().position(late) {
            let helper = &mut self.helpers[nth];
            if helper.killed {
                let Helper { child, task, .. } = self.helpers.swap_remove(nth);
                self.service.say(&format!(
                    "helper process {} is not gone {GONE:?} after its kill: it hangs in the \
                     kernel, see the kernel's log (dmesg). It is no longer waited for",
                    child.id()
                ));
                self.dismiss(child);
                self.helper_ended(task, ExitStatus::from_raw(KILLED))?;
                continue;
            }
            helper.kill(GONE);
            if let Task::Up { .. } = helper.task {
                let limit = self.service.ready_limit();
                self.service.say(&format!(
                    "what follows the start of a server has not ended in {limit:?}: killed"
                ));
            }
        }
        Ok(())
    }

    pub(super) fn helper_ended(
        &mut self,
        task: Task,
        status: ExitStatus,
    ) -> Result<(), SuperviseError> {
        match (task, status.success()) {
            (Task::Train, _) => self.train(),
            (Task::Up { first }, true) => self.up_ended(first),
            (Task::Up { first: true }, false) => {
                // A helper that was killed may already have started swapping, so swapping must stop
                // before the server ends.
                self.service.say(&format!("what follows the start has failed ({status})"));
                self.up_failed = Some(status);
                self.been_up = status.code() != Some(NOT_BEGUN.into());
                self.set_up &= self.been_up;
                self.stopping = true;
            }
            (Task::Up { first: false }, false) => {
                self.service.say(&format!(
                    "what follows the start of a server has failed ({status}): trying again"
                ));
                self.up_again = Some(Instant::now() + AGAIN);
            }
            (Task::Down, true) => {
                self.set_up = false;
                self.tell_to_end();
            }
            (Task::Down, false) => {
                self.up_failed = None;
                self.cannot_end(&format!(
                    "cannot end, the disk is still in use ({status}): serving goes on"
                ));
            }
        }
        if matches!(task, Task::Up { .. }) && self.stopping {
            self.go_down();
        }
        Ok(())
    }
}
