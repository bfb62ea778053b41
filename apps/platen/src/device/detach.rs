//! Detaches a disk of the kernel's NBD client when the device ends, in a process of its own.
//!
//! The kernel works on a netlink request inside of the call that sends it, and waits there for
//! locks and for the disk's connections. No time limit of the socket ends that wait, nor does a
//! signal.

use std::io;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// How long the kernel may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Detaches `disk` by `helper`, a process that does so. A disk that is not attached is no error.
///
/// # Errors
///
/// [`io::ErrorKind::TimedOut`]: the kernel does not answer.
pub(super) fn detach(helper: &mut Command, disk: &Path) -> io::Result<()> {
    detach_within(LIMIT, helper, disk)
}

fn detach_within(limit: Duration, helper: &mut Command, disk: &Path) -> io::Result<()> {
    let Ok(mut helper) = helper.spawn() else {
        // There may be no memory for a process.
        let _ = swap::nbd::detach(disk);
        return Ok(());
    };
    let deadline = Instant::now() + limit;
    while helper.try_wait()?.is_none() {
        if Instant::now() >= deadline {
            // In the kernel's call it ends with that call only.
            let _ = helper.kill();
            let (disk, limit) = (disk.display(), limit.as_secs());
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the kernel has not answered the request to detach {disk} for {limit} s"),
            ));
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
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
        assert!(error.to_string().contains("detach /dev/nbd_of_nobody"), "{error}");
        drop(end);
        for command in ["true", "false", "/no/such/program"] {
            detach_within(Duration::from_secs(600), &mut Command::new(command), disk).unwrap();
        }
    }
}
