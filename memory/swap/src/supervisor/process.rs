//! A child process, addressed by its pidfd. This program started it, or a program that ran in this
//! process before `execve` did.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use rustix::process::{
    pidfd_open, pidfd_send_signal, waitid, Pid, PidfdFlags, Signal, WaitId, WaitIdOptions,
};

#[derive(Debug)]
pub(super) struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

impl Process {
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let mut child = command.spawn()?;
        Self::adopt(child.id()).inspect_err(|_| {
            // Without a pidfd the supervisor could not wait for it.
            let _ = child.kill();
        })
    }

    /// Adopts a child of this process. Nothing has waited for it yet, so the number is still its
    /// own.
    pub(super) fn adopt(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { pid, pidfd: pidfd_open(number, PidfdFlags::empty())? })
    }

    pub(super) fn id(&self) -> u32 {
        self.pid
    }

    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Kills the process without waiting for its end.
    pub(super) fn kill(&self) {
        #[cfg(test)]
        if tests::SPARES.get() {
            return;
        }
        // A process that has exited needs no signal.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Reaps the child if it has exited, and returns its status.
    pub(super) fn try_wait(&self) -> io::Result<Option<ExitStatus>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let ended = waitid(WaitId::PidFd(self.pidfd.as_fd()), options)?;
        // Encoded as by wait(2): the signal in the low bits, or the exit status in the second byte.
        const DUMPED: i32 = 0x80;
        Ok(ended.map(|ended| {
            let signal = ended.terminating_signal();
            let signal = signal.map(|signal| signal | if ended.dumped() { DUMPED } else { 0 });
            ExitStatus::from_raw(signal.unwrap_or(ended.exit_status().unwrap_or(0) << 8))
        }))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    thread_local! {
        /// Whether no process that this thread kills gets the signal, as one that hangs in a call
        /// of the kernel.
        pub(in crate::supervisor) static SPARES: std::cell::Cell<bool> =
            const { std::cell::Cell::new(false) };
    }

    fn status_of(script: &str) -> ExitStatus {
        let process = Process::spawn(Command::new("sh").args(["-c", script])).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(120);
        loop {
            if let Some(status) = process.try_wait().unwrap() {
                assert!(process.try_wait().is_err(), "it was waited for");
                process.kill();
                return status;
            }
            assert!(std::time::Instant::now() < deadline);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn a_status_equals_that_of_the_standard_library() {
        for script in ["exit 0", "exit 3", "kill -KILL $$", "kill -TERM $$"] {
            let expected = Command::new("sh").args(["-c", script]).status().unwrap();
            assert_eq!(status_of(script), expected, "{script}");
        }
    }
}
