//! swapoff of all areas of a disk, beside other processes that take areas off.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::{areas_of, on};
use crate::partition;
use crate::sys;

/// Pause between two attempts to take off an area that another process is taking off.
const LOOK: Duration = Duration::from_millis(100);

const EINVAL: i32 = rustix::io::Errno::INVAL.raw_os_error();

/// Stops swapping to a disk. The kernel first reads all pages of its areas back into memory, which
/// may take minutes. If one area cannot be emptied, or not by the deadline, the kernel swaps to all
/// of them again, except to those that another process has taken off. An area that another process
/// is taking off is waited for.
///
/// A child process calls swapoff(2) for each area, because the OOM killer kills the process in
/// `swapoff` before any other.
///
/// # Errors
///
/// An error of the kernel; [`io::ErrorKind::OutOfMemory`] if memory did not suffice,
/// [`io::ErrorKind::TimedOut`] at the deadline.
pub fn off(disk: &Path, deadline: Instant) -> io::Result<()> {
    let mut areas = areas_of(disk)?;
    // The area of highest priority comes last: pages that the kernel swaps out meanwhile find free
    // slots there.
    areas.sort_by_key(|(_, used)| used.priority);
    let is_listed = |area: &Path| Ok(areas_of(disk)?.iter().any(|(node, _)| node == area));
    let mut ours = Vec::with_capacity(areas.len());
    for (area, used) in &areas {
        let swapoff = || sys::swapoff_in_child(area, deadline);
        match off_one(deadline, swapoff, || is_listed(area)) {
            Ok(Off::ByUs) => ours.push((area, used.priority)),
            Ok(Off::ByAnother) => {}
            Err(error) => {
                for (area, priority) in ours {
                    // The header of the area is still there.
                    let _ = on(area, priority);
                }
                return Err(error);
            }
        }
    }
    if let Ok(file) = File::open(disk) {
        partition::remove_all(&file);
    }
    Ok(())
}

/// The process that has taken an area off.
#[derive(Debug, PartialEq, Eq)]
enum Off {
    ByUs,
    ByAnother,
}

/// Takes an area off. The kernel has EINVAL for an area that another swapoff works on, which
/// `/proc/swaps` lists until that one ends. If that one fails, the area is ours to take off.
fn off_one(
    deadline: Instant,
    mut swapoff: impl FnMut() -> io::Result<()>,
    is_listed: impl Fn() -> io::Result<bool>,
) -> io::Result<Off> {
    loop {
        match swapoff() {
            Ok(()) => return Ok(Off::ByUs),
            Err(error) if error.raw_os_error() != Some(EINVAL) => return Err(error),
            Err(_) if !is_listed()? => return Ok(Off::ByAnother),
            Err(_) if Instant::now() >= deadline => return Err(io::ErrorKind::TimedOut.into()),
            Err(_) => thread::sleep(LOOK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_that_another_process_is_taking_off_is_waited_for() {
        let error = |number| Err(io::Error::from_raw_os_error(number));
        let late = Instant::now() + Duration::from_secs(300);
        // The other process ends while this one waits, and succeeds or fails.
        let listed = std::cell::Cell::new(3);
        let is_listed = || {
            listed.set(listed.get() - 1);
            Ok(listed.get() > 0)
        };
        assert_eq!(off_one(late, || error(EINVAL), is_listed).unwrap(), Off::ByAnother);
        let mut answers = [Ok(()), error(EINVAL), error(EINVAL)].into_iter().rev();
        assert_eq!(off_one(late, || answers.next().unwrap(), || Ok(true)).unwrap(), Off::ByUs);
        // It does not end, and any other error is one of the area.
        let over = off_one(Instant::now(), || error(EINVAL), || Ok(true)).unwrap_err();
        assert_eq!(over.kind(), io::ErrorKind::TimedOut);
        let full = off_one(late, || error(12), || Ok(true)).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(12));
    }
}
