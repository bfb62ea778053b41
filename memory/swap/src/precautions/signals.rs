//! Signals that must not stop or end a process of a device, and signals that are read from a
//! descriptor.

use std::io;
use std::os::fd::OwnedFd;

use super::untaken::Untaken;

/// Ignores the signals with which a terminal or a service manager ends all processes at once: only
/// the supervisor knows the order in which they must end. For servers until they install a handler
/// of their own, and for helpers.
///
/// # Errors
///
/// The kernel's error.
pub fn ignore_signals() -> Result<(), Untaken> {
    crate::sys::ignore_signals().map_err(|source| Untaken { action: "ignore signals", source })
}

/// Ignores the signals with which a terminal stops or ends its processes (Ctrl-Z, Ctrl-\\, and
/// background output under `stty tostop`), also in processes started from here. The terminal sends
/// them to all processes of a device, and the shell that would have to continue them may be swapped
/// out to that very device.
///
/// # Errors
///
/// The kernel's error.
pub fn ignore_terminal() -> Result<(), Untaken> {
    let action = "ignore the terminal's signals";
    crate::sys::ignore_terminal().map_err(|source| Untaken { action, source })
}

/// Ignores SIGSEGV and SIGBUS, also in processes started from here. A fault ends a process all the
/// same: the kernel gives an ignored signal its default action before it delivers a fault.
///
/// Rust's runtime installs no handler of a signal that a process ignores from its start, and then
/// gives its threads no alternate stack for it: 12 KiB of locked memory for each thread, which a
/// stand-by server cannot prepare, because a thread frees that stack when it ends.
///
/// # Errors
///
/// The kernel's error.
pub fn ignore_faults() -> Result<(), Untaken> {
    let action = "ignore the signals of faults";
    crate::sys::ignore_faults().map_err(|source| Untaken { action, source })
}

/// Resets SIGCHLD to its default: the kernel then reports the end of child processes. A process
/// inherits an ignored SIGCHLD from its parent, and cannot wait for its children then. A supervisor
/// that cannot wait for a server ends, and the store with it.
///
/// # Errors
///
/// The kernel's error.
pub fn heed_children() -> Result<(), Untaken> {
    let action = "wait for child processes";
    crate::sys::heed_children().map_err(|source| Untaken { action, source })
}

/// Blocks SIGUSR1 in this thread and those that it starts from now on. Returns a descriptor that
/// becomes readable when the signal arrives.
///
/// # Errors
///
/// The kernel's error.
pub fn resume_signal() -> io::Result<OwnedFd> {
    crate::sys::signal_descriptor(&[libc::SIGUSR1])
}

/// Blocks SIGINT, SIGTERM and SIGHUP in this thread, in threads that it starts later, and in child
/// processes. Returns a descriptor that is readable when one is pending. A pending signal survives
/// `execve`.
///
/// # Errors
///
/// The kernel's error.
pub fn end_signals() -> io::Result<OwnedFd> {
    crate::sys::signal_descriptor(&crate::sys::END)
}

/// Unblocks, in this thread and those that it starts later, the signals that the parent process has
/// blocked by [`end_signals`].
///
/// # Errors
///
/// The kernel's error.
pub fn unblock_end_signals() -> Result<(), Untaken> {
    let action = "unblock signals";
    crate::sys::unblock(&crate::sys::END).map_err(|source| Untaken { action, source })
}

/// Makes a file that would exceed this process's file size limit (`ulimit -f`, `LimitFSIZE=`) an
/// error, EFBIG, instead of the end of the process: the store is such a file, and the backing
/// device may be one. Processes started from here inherit this.
///
/// # Errors
///
/// The kernel's error.
pub fn ignore_size_signal() -> Result<(), Untaken> {
    let action = "ignore the signal for files that are too long";
    crate::sys::ignore_size_signal().map_err(|source| Untaken { action, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Signal;

    #[test]
    fn terminal_signals_reach_no_child_process() {
        ignore_terminal().unwrap();
        let status = std::process::Command::new("cat").arg("/proc/self/status").output().unwrap();
        let status = String::from_utf8(status.stdout).unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        for signal in [Signal::QUIT, Signal::TSTP, Signal::TTIN, Signal::TTOU] {
            assert!(ignored & 1 << (signal.as_raw() - 1) != 0, "{signal:?} of {ignored:x}");
        }
    }
}
