//! The system calls that no library of ours has.
#![expect(unsafe_code, reason = "system calls by their numbers")]

use std::ffi::CString;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;

/// Gives this thread, the only one, a mount namespace of its own.
pub(crate) fn unshare_mounts() -> io::Result<()> {
    // SAFETY: takes no pointer; changes what paths mean to this process, which has one thread.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) })
}

/// Swap on. `flags` as the kernel has them.
pub(crate) fn swapon(path: &Path, flags: i32) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a string that ends with a zero and lives as long as the call.
    checked(unsafe { libc::swapon(path.as_ptr(), flags) })
}

/// Swap off: returns when all of it is back in memory.
pub(crate) fn swapoff(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: as above.
    checked(unsafe { libc::swapoff(path.as_ptr()) })
}

/// The signals by which a terminal or a service manager ends a process.
pub(crate) const END: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// This process does not follow a terminal's or a service manager's signals, until it says
/// otherwise.
pub(crate) fn ignore_signals() -> io::Result<()> {
    ignore(&END)
}

/// Nobody who types stops this process, or ends it at once, nor whatever it starts.
pub(crate) fn ignore_terminal() -> io::Result<()> {
    ignore(&[libc::SIGQUIT, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU])
}

/// A file that would be longer than this process may make one is an error, and not the process's
/// end.
pub(crate) fn ignore_size_signal() -> io::Result<()> {
    ignore(&[libc::SIGXFSZ])
}

fn ignore(signals: &[libc::c_int]) -> io::Result<()> {
    for &signal in signals {
        // SAFETY: no handler is named, so nothing of ours runs in one.
        if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Blocks signals in this thread, and gives a descriptor that is readable when one has come.
pub(crate) fn signal_descriptor(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = mask(libc::SIG_BLOCK, signals)?;
    // SAFETY: a set that lives as long as the call; -1 asks for a new descriptor.
    let number =
        unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    checked(number.min(0))?;
    // SAFETY: the kernel has just given it to us.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Lets this thread have signals that its parent process has blocked.
pub(crate) fn unblock(signals: &[libc::c_int]) -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, signals).map(drop)
}

fn mask(how: libc::c_int, signals: &[libc::c_int]) -> io::Result<libc::sigset_t> {
    // SAFETY: a set of signals is plain bytes, which the next call makes an empty set.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a set that lives as long as the call.
    checked(unsafe { libc::sigemptyset(&raw mut set) })?;
    for &signal in signals {
        // SAFETY: as above.
        checked(unsafe { libc::sigaddset(&raw mut set, signal) })?;
    }
    // SAFETY: as above; the mask as it was is not asked for.
    match unsafe { libc::pthread_sigmask(how, &raw const set, null_mut()) } {
        0 => Ok(set),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Has a thread (0: this one) run before all that are not of real time, and take its turn with
/// those that are.
pub(crate) fn real_time(thread: i32) -> io::Result<()> {
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: a struct that lives as long as the call.
    checked(unsafe { libc::sched_setscheduler(thread, libc::SCHED_RR, &raw const lowest) })
}

/// Closes every descriptor but the first three. Only for a process that has just begun and has
/// opened none.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: takes numbers. By the caller's promise no descriptor from 3 on belongs to anything in
    // this process.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    checked(i32::from(result != 0))
}

/// A copy of the descriptor `number`.
pub(crate) fn copy_of(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers; closes nothing, and changes nothing of what `number` is.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    checked(copy.min(0))?;
    // SAFETY: the kernel has just given it to us.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Memory that is in no image of the system. The kernel does not hibernate while there is a
/// descriptor of such memory, with pages or without.
pub(crate) fn secret_memory() -> io::Result<OwnedFd> {
    // SAFETY: takes a number.
    let number = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
    let number = i32::try_from(number).map_err(io::Error::other)?;
    checked(number.min(0))?;
    // SAFETY: the kernel has just given it to us.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The descriptor `number` under another number. Only for a process that has just begun, in which
/// nothing owns it.
pub(crate) fn take(number: i32) -> io::Result<OwnedFd> {
    let copy = copy_of(number)?;
    // SAFETY: takes a number. By the caller's promise nothing in this process relies on it.
    checked(unsafe { libc::close(number) })?;
    Ok(copy)
}

fn checked(result: i32) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
