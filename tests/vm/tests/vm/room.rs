//! Room in the sockets of other processes, where a test needs more than the system gives.

use anyhow::{Context, Result};
use rustix::net::{sockopt, AddressFamily};
use rustix::process::{pidfd_getfd, pidfd_open, Pid, PidfdFlags, PidfdGetfdFlags};

/// Bytes that fit a socket afterwards: more than any guest of the tests writes to its memory while
/// QEMU stops it.
const ROOM: usize = 8 << 20;

/// Lets the Unix sockets of a process hold [`ROOM`] bytes that their other end has not read. The
/// system's 208 KiB do not hold what a guest writes to its memory on a busy machine between QEMU's
/// last look at the dirty pages and the stop of its CPUs.
///
/// # Errors
/// The process has ended, or the system refuses its descriptors.
pub(crate) fn widen(process: u32) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(process)?).context("a process's number")?;
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))? {
        let entry = entry?;
        // A descriptor may have been closed meanwhile.
        let is_socket = std::fs::read_link(entry.path())
            .is_ok_and(|target| target.to_string_lossy().starts_with("socket:"));
        if !is_socket {
            continue;
        }
        let number = entry.file_name().to_string_lossy().parse()?;
        let Ok(socket) = pidfd_getfd(&handle, number, PidfdGetfdFlags::empty()) else { continue };
        if sockopt::socket_domain(&socket)? != AddressFamily::UNIX {
            continue;
        }
        // Beyond the system's limit if the test may; up to the limit if not.
        sockopt::set_socket_send_buffer_size_force(&socket, ROOM)
            .or_else(|_| sockopt::set_socket_send_buffer_size(&socket, ROOM))?;
    }
    Ok(())
}
