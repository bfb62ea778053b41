//! The command's end of its helper process, which restores QEMU's migration settings if the command
//! is killed (`settings_keeper`).

use crate::settings_claim::SettingsClaim;
use crate::settings_former::Former;
use crate::settings_keeper::DONE;
use anyhow::{ensure, Context};
use relay::UnixAddress;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a line may wait for the helper, which only reads.
const READS: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// How long the helper may take to end.
const ENDS: Duration = Duration::from_secs(1);
const ASK: Duration = Duration::from_millis(2);

/// A running helper.
#[derive(Debug)]
pub(crate) struct SettingsKeeper {
    child: Child,
    pipe: ChildStdin,
    _claim: Option<SettingsClaim>,
}

impl SettingsKeeper {
    /// Starts the helper from this executable. The helper has the claim, too.
    pub(crate) fn start(qmp: &UnixAddress, claim: Option<SettingsClaim>) -> anyhow::Result<Self> {
        let output = claim.as_ref().map_or_else(|| Ok(Stdio::null()), SettingsClaim::as_output);
        let output = output.context("cannot start the process that keeps settings")?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("platen").arg("keep-settings").arg(qmp.to_string());
        // A signal to the terminal's processes, or to the command's group, is not for the helper.
        command.process_group(0).stdin(Stdio::piped()).stdout(output);
        let mut child = command.spawn().context("cannot start the process that keeps settings")?;
        let pipe = child.stdin.take().context("it has no standard input")?;
        Ok(Self { child, pipe, _claim: claim })
    }

    /// Sends the helper the former settings, which replace those sent before.
    ///
    /// # Errors
    /// The helper has ended, or has not read for 10 s.
    pub(crate) fn tell(&mut self, former: &Former) -> anyhow::Result<()> {
        let line = format!("{}\n", serde_json::to_string(former)?);
        ensure!(self.reads(&READS), "the process that keeps settings does not read");
        self.pipe.write_all(line.as_bytes()).context("the process that keeps settings has ended")
    }

    /// The same, unless the helper has ended or does not read.
    pub(crate) fn tell_if_it_reads(&mut self, former: &Former) {
        if self.reads(&Timespec::default()) {
            let _ = self.tell(former);
        }
    }

    /// Whether the pipe takes the largest line whose write is not cut, within this time. A helper
    /// that is stopped (SIGSTOP, a frozen cgroup) reads nothing.
    fn reads(&self, within: &Timespec) -> bool {
        let mut pipe = [PollFd::new(&self.pipe, PollFlags::OUT)];
        let ready = rustix::io::retry_on_intr(|| rustix::event::poll(&mut pipe, Some(within)));
        ready.is_ok_and(|ready| ready > 0)
    }

    /// Ends the helper, because the settings are restored or QEMU ends.
    pub(crate) fn dismiss(mut self) {
        // If the helper has died already, nothing is left to do.
        if self.reads(&Timespec::default()) {
            let _ = self.pipe.write_all(format!("{DONE}\n").as_bytes());
        }
        drop(self.pipe);
        if !has_ended(&mut self.child) {
            // It is stopped. Nothing is left to restore, and it has the claim.
            let _ = self.child.kill();
            // One that the kernel does not end yet holds up nobody.
            has_ended(&mut self.child);
        }
    }
}

/// Whether a process has ended, or ends within a second.
fn has_ended(child: &mut Child) -> bool {
    let until = Instant::now() + ENDS;
    while child.try_wait().is_ok_and(|status| status.is_none()) {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(ASK);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{kill_process, Pid, Signal};
    use std::sync::mpsc;

    /// Nothing here takes this long unless it hangs.
    const WATCHDOG: Duration = Duration::from_secs(60);

    /// The command has restored everything. Others wait for its end.
    #[test]
    fn a_helper_that_is_stopped_holds_no_command_up() {
        for is_full in [false, true] {
            let mut command = Command::new("cat");
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            let mut child = command.spawn().unwrap();
            let pipe = child.stdin.take().unwrap();
            let id = Pid::from_child(&child);
            kill_process(id, Signal::STOP).unwrap();
            let mut keeper = SettingsKeeper { child, pipe, _claim: None };
            if is_full {
                let full = rustix::pipe::fcntl_getpipe_size(&keeper.pipe).unwrap();
                (0..full).for_each(|_| keeper.tell_if_it_reads(&Former::default()));
            }
            let (told, dismissed) = mpsc::channel();
            std::thread::spawn(move || {
                keeper.dismiss();
                let _ = told.send(());
            });
            let dismissed = dismissed.recv_timeout(WATCHDOG);
            let is_gone = kill_process(id, Signal::KILL).is_err();
            dismissed.expect("it has to return");
            assert!(is_gone, "it holds the claim");
        }
    }
}
