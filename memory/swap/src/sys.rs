//! System calls without a wrapper in the libraries used here.
#![expect(unsafe_code, reason = "system calls by their numbers")]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Gives this process, which has one thread, a mount namespace of its own.
pub(crate) fn unshare_mounts() -> io::Result<()> {
    // SAFETY: takes no pointer; changes the meaning of paths for this process, which has one
    // thread.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) })
}

/// swapon(2), with the kernel's `flags`.
pub(crate) fn swapon(path: &Path, flags: i32) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: a NUL-terminated string that outlives the call.
    checked(unsafe { libc::swapon(path.as_ptr(), flags) })
}

/// swapoff(2): returns when all pages are in memory again.
pub(crate) fn swapoff(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: as above.
    checked(unsafe { libc::swapoff(path.as_ptr()) })
}

/// swapoff(2) in a child process, which the OOM killer kills if memory runs out.
///
/// # Errors
///
/// The errors of [`in_child`].
pub(crate) fn swapoff_in_child(path: &Path, deadline: Instant) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    in_child(deadline, || {
        // SAFETY: a string that ends with a zero and outlives the call.
        checked(unsafe { libc::swapoff(path.as_ptr()) })
    })
}

/// Runs `work` in a child process, which ends with this thread. `work` may only make system calls:
/// a lock of another thread, the allocator's above all, stays locked in the child.
///
/// # Errors
///
/// That of `work`; [`io::ErrorKind::TimedOut`] at the deadline, after the child was killed and has
/// ended; [`io::ErrorKind::OutOfMemory`] if another process killed the child.
fn in_child(deadline: Instant, work: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let own = std::process::id();
    // SAFETY: the child makes system calls and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = match end_with_parent(own).and_then(|()| work()) {
            Ok(()) => 0,
            Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
        };
        // SAFETY: takes a number.
        unsafe { libc::_exit(code) }
    }
    checked(child.min(0))?;
    let mut status = 0;
    let mut late = false;
    loop {
        let flags = if late { 0 } else { libc::WNOHANG };
        // SAFETY: a status that outlives the call.
        match unsafe { libc::waitpid(child, &raw mut status, flags) } {
            0 if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            0 => {
                // SAFETY: the child is not reaped, so the number is still its own.
                checked(unsafe { libc::kill(child, libc::SIGKILL) })?;
                late = true;
            }
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            _ => break,
        }
    }
    match (libc::WIFEXITED(status), libc::WEXITSTATUS(status)) {
        (true, 0) => Ok(()),
        (true, code) => Err(io::Error::from_raw_os_error(code)),
        (false, _) if late => Err(io::ErrorKind::TimedOut.into()),
        (false, _) => Err(io::Error::new(
            io::ErrorKind::OutOfMemory,
            "the process in swapoff was killed: memory ran out",
        )),
    }
}

/// Makes all threads of this process allocate from one heap, where the C library has others. Does
/// what `MALLOC_ARENA_MAX=1` does, in a process that was started without it.
pub(crate) fn one_heap() {
    // SAFETY: takes numbers. There is no other outcome than more memory.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Makes the kernel kill this process when the parent's thread ends. `parent` is the parent's
/// number.
fn end_with_parent(parent: u32) -> io::Result<()> {
    // SAFETY: takes numbers.
    checked(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) })?;
    // The parent may have ended before this call.
    // SAFETY: takes nothing.
    let now = unsafe { libc::getppid() };
    if u32::try_from(now) == Ok(parent) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ESRCH))
    }
}

/// `struct blkpg_partition` of `linux/blkpg.h`.
#[repr(C)]
struct Partition {
    start: i64,
    length: i64,
    number: libc::c_int,
    names: [u8; 128],
}

/// `struct blkpg_ioctl_arg`.
#[repr(C)]
struct PartitionRequest {
    op: libc::c_int,
    flags: libc::c_int,
    datalen: libc::c_int,
    data: *mut Partition,
}

const ADD_PARTITION: libc::c_int = 1;
const DEL_PARTITION: libc::c_int = 2;

/// Adds a partition in the kernel only; `start` and `len` in bytes.
pub(crate) fn add_partition(disk: &File, number: u32, start: u64, len: u64) -> io::Result<()> {
    partition(disk, ADD_PARTITION, number, start, len)
}

/// Removes a partition in the kernel only.
pub(crate) fn remove_partition(disk: &File, number: u32) -> io::Result<()> {
    partition(disk, DEL_PARTITION, number, 0, 0)
}

fn partition(disk: &File, op: libc::c_int, number: u32, start: u64, len: u64) -> io::Result<()> {
    // `_IO(0x12, 105)`.
    const BLKPG: libc::c_ulong = 0x1269;
    let start = i64::try_from(start).map_err(io::Error::other)?;
    let length = i64::try_from(len).map_err(io::Error::other)?;
    let number = libc::c_int::try_from(number).map_err(io::Error::other)?;
    let mut data = Partition { start, length, number, names: [0; 128] };
    let datalen = libc::c_int::try_from(size_of::<Partition>()).map_err(io::Error::other)?;
    let request = PartitionRequest { op, flags: 0, datalen, data: &raw mut data };
    // SAFETY: both structs are laid out as the kernel has them and live as long as the call.
    checked(unsafe { libc::ioctl(disk.as_raw_fd(), BLKPG as _, &raw const request) })
}

/// The signals by which a terminal or a service manager ends a process.
pub(crate) const END: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Ignores the signals by which a terminal or a service manager ends processes.
pub(crate) fn ignore_signals() -> io::Result<()> {
    ignore(&END)
}

/// Ignores the signals by which a terminal stops processes or quits them, here and in children.
pub(crate) fn ignore_terminal() -> io::Result<()> {
    ignore(&[libc::SIGQUIT, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU])
}

/// Ignores SIGXFSZ, so that exceeding the file size limit is an error.
pub(crate) fn ignore_size_signal() -> io::Result<()> {
    ignore(&[libc::SIGXFSZ])
}

pub(crate) fn ignore_faults() -> io::Result<()> {
    ignore(&[libc::SIGSEGV, libc::SIGBUS])
}

/// Resets SIGCHLD, so that the kernel reports the end of children.
pub(crate) fn heed_children() -> io::Result<()> {
    // SAFETY: installs no handler, so no code of ours runs in one.
    if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn ignore(signals: &[libc::c_int]) -> io::Result<()> {
    for &signal in signals {
        // SAFETY: installs no handler, so no code of ours runs in one.
        if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Blocks signals in this thread, and returns a descriptor that becomes readable when one arrives.
pub(crate) fn signal_descriptor(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = mask(libc::SIG_BLOCK, signals)?;
    // SAFETY: a set that lives as long as the call; -1 asks for a new descriptor.
    let number =
        unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    checked(number.min(0))?;
    // SAFETY: the kernel has just returned this descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Unblocks signals in this thread. A process inherits the blocked mask of its parent.
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

/// Makes a thread (0: this one) a round-robin real-time thread of the lowest priority. Threads and
/// processes that it starts later are such too if they `inherit` this.
pub(crate) fn real_time(thread: i32, inherit: bool) -> io::Result<()> {
    let lowest = libc::sched_param { sched_priority: 1 };
    let policy = libc::SCHED_RR | if inherit { 0 } else { libc::SCHED_RESET_ON_FORK };
    // SAFETY: a struct that outlives the call.
    checked(unsafe { libc::sched_setscheduler(thread, policy, &raw const lowest) })
}

/// Closes all descriptors but 0 to 2. Only for a process that has just started and has opened none.
pub(crate) fn close_inherited() -> io::Result<()> {
    // SAFETY: takes numbers. By the caller's promise no descriptor from 3 on belongs to anything in
    // this process.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    checked(i32::from(result != 0))
}

/// Duplicates the descriptor `number`.
pub(crate) fn copy_of(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers; closes nothing, and does not change `number`'s file.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    checked(copy.min(0))?;
    // SAFETY: the kernel has just returned this descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Bytes sent on a unix socket that its peer has not read (SIOCOUTQ), as the kernel accounts them.
pub(crate) fn unread(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes an int, which lives as long as the call.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) })?;
    u32::try_from(bytes).map_err(io::Error::other)
}

/// memfd_secret(2). The kernel does not hibernate while such a descriptor is open, even without
/// pages.
pub(crate) fn secret_memory() -> io::Result<OwnedFd> {
    // SAFETY: takes a number.
    let number = unsafe { libc::syscall(libc::SYS_memfd_secret, libc::O_CLOEXEC) };
    let number = i32::try_from(number).map_err(io::Error::other)?;
    checked(number.min(0))?;
    // SAFETY: the kernel has just returned this descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Moves the descriptor `number` to a new number. Only for a process that has just started, in
/// which nothing owns the descriptor.
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

#[cfg(test)]
mod tests;
