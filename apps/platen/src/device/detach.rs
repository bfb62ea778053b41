//! Detaches a disk of the kernel's NBD client when the device ends, in a process of its own.
//!
//! The kernel works on a netlink request inside of the call that sends it, and waits there for
//! locks and for the disk's connections. No time limit of the socket ends that wait, nor does a
//! signal.

use super::args::SwapTask;
use super::serving::myself;
use crate::say::say;
use std::io;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// How long the kernel may take.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// Detaches `disk`. A disk that is not attached is no error.
///
/// # Errors
///
/// [`io::ErrorKind::TimedOut`]: the kernel does not answer. Any other error: the kernel refuses;
/// the process has reported why.
pub(super) fn detach(disk: &Path) -> io::Result<()> {
    let mut helper = myself();
    helper.args(["device", "swap-helper", SwapTask::Detach.word(), "--disk"]).arg(disk);
    detach_within(LIMIT, &mut helper, disk)
}

/// Detaches `disk`, to which nothing swaps any more, so that its device can end. A kernel that does
/// not answer is reported, and does not hold up the end: nothing needs the disk, and the kernel
/// detaches it once it goes on.
///
/// # Errors
///
/// The kernel refuses.
pub(super) fn detach_at_end(disk: &Path) -> io::Result<()> {
    settled(detach(disk))
}

fn settled(detached: io::Result<()>) -> io::Result<()> {
    match detached {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            say(&error.to_string());
            Ok(())
        }
        detached => detached,
    }
}

fn detach_within(limit: Duration, helper: &mut Command, disk: &Path) -> io::Result<()> {
    let Ok(mut helper) = helper.spawn() else {
        // There may be no memory for a process.
        return swap::nbd::detach(disk);
    };
    let deadline = Instant::now() + limit;
    let status = loop {
        if let Some(status) = helper.try_wait()? {
            break status;
        }
        if Instant::now() >= deadline {
            // In the kernel's call it ends with that call only.
            let _ = helper.kill();
            let (disk, limit) = (disk.display(), limit.as_secs());
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "the kernel has not answered the request to detach {disk} for {limit} s: look \
                     at its log (dmesg). If {disk} stays attached, detach it by `nbd-client -d \
                     {disk}`, or restart the machine"
                ),
            ));
        }
        thread::sleep(Duration::from_millis(20));
    };
    if status.success() {
        return Ok(());
    }
    let disk = disk.display();
    Err(io::Error::other(format!("the request to detach {disk} has failed ({status})")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_kernel_that_does_not_detach_a_disk_holds_up_nobody() {
        let disk = Path::new("/dev/nbd_of_nobody");
        let (input, end) = rustix::pipe::pipe().unwrap();
        // It ends when the other end of the pipe closes.
        let mut waits = Command::new("cat");
        waits.stdin(Stdio::from(input));
        let error = detach_within(Duration::ZERO, &mut waits, disk).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let said = error.to_string();
        assert!(said.contains("request to detach /dev/nbd_of_nobody for 0 s"), "{said}");
        assert!(said.contains("`nbd-client -d /dev/nbd_of_nobody`"), "{said}");
        // Regression: the orderly end of a device waited for the kernel without a limit.
        settled(Err(error)).unwrap();
        drop(end);
        let by = |command| {
            let long = Duration::from_secs(600);
            settled(detach_within(long, &mut Command::new(command), disk))
        };
        by("true").unwrap();
        let refused = by("false").unwrap_err().to_string();
        assert!(refused.contains("/dev/nbd_of_nobody has failed (exit status: 1)"), "{refused}");
        // This process asks the kernel itself, which has no such disk.
        by("/no/such/program").unwrap_err();
    }
}
