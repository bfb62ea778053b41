//! The supervisor: runs a server, and holds what must outlive it.
//!
//! ```text
//!              starts, watches (pidfd)            a line each: "device 0", "ready"
//!  supervisor ─────────────────────────► server ───────────────────────────────► supervisor
//!     │  holds the descriptors of store        ◄──── "end" ─────────────────────
//!     │  and buffers, hands them on
//!     ├─ a stand-by server: has its memory, waits for "go ..."
//!     └─ helpers: processes that may take long, be killed, or need memory: swapon, swapoff, a
//!        trainer (from the server's "train", with the socket by which the two will talk, until
//!        its "enough")
//! ```
//!
//! A server that dies is replaced at once. After repeated deaths there is a growing pause before
//! the next one, of 10 s at most ([`Backoff`]). There is always a next one: the store is intact,
//! and its contents are lost only when the supervisor ends. A server that hangs is killed and
//! replaced like one that has died; `watchdog.rs` defines a hang. A request to end the supervisor
//! (a descriptor that becomes readable) first runs the down helper: swapping must stop before the
//! disk goes. If that fails, the server keeps running.
//!
//! While no server runs, no memory can be swapped out or back, so the next server must not need
//! any. So one [stands by](Service::standby): it was started while there was memory, and waits for
//! the order to serve.
//!
//! Servers ignore signals while they have a supervisor: a signal that a service manager or a
//! terminal sends to all processes at once must not take away a disk that is swapped to.
//!
//! A replacement server that is not ready after some time ([`Service::ready_limit`]) is killed and
//! counts as dead, because all users of the disk wait for it. So is a server that does not end when
//! it is told to ([`Service::end_limit`]): it may wait for a disk that does not answer. One that
//! works on its end, or gets no CPU for it, has more time.
//!
//! Nothing that the supervisor does for a disk in use may end it or block it. A process that cannot
//! be started is tried again. A killed process is not waited for, because it may be stuck in a
//! request to that very disk.
//!
//! There is at most one trainer. The next one starts after the last has exited, however long that
//! takes. A trainer ends with the server that asked for it, and its socket belongs to that server
//! alone: the next server cannot get the messages of an old trainer.
//!
//! Limits: the supervisor has one thread, and allocates little, when it starts a process. If the
//! supervisor itself is killed, the server keeps running.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

mod backoff;
mod child;
mod error;
pub(crate) mod notify;
mod oom;
mod process;
mod run;
mod service;
mod step;
mod watchdog;
pub mod words;

pub use backoff::Backoff;
pub use error::SuperviseError;
pub use service::{Adopted, HandOver, Handed, Service};
pub use step::step;

/// Exit status of a server whose connections the kernel's NBD client has dropped, which it does
/// when a request takes long. The cause is a slow disk or host and passes, so another server is
/// always started.
pub const CLIENT_LOST: u8 = 75;

/// Exit status of a helper after the first start that has begun nothing: there is nothing to take
/// down before the server ends. In particular, the disk may be another device's.
pub const NOT_BEGUN: u8 = 76;

/// Duplicates a descriptor, given by its number, that this process inherited. For a socket, which
/// has no path by which it could be opened again.
///
/// # Errors
///
/// There is no descriptor of this number.
pub fn descriptor(number: i32) -> io::Result<OwnedFd> {
    crate::sys::copy_of(number)
}

/// As [`descriptor`], but also closes `number`. For a program that was just executed (`execve`),
/// before anything in it uses the number.
///
/// # Errors
///
/// There is no descriptor of this number.
pub fn take_descriptor(number: i32) -> io::Result<OwnedFd> {
    crate::sys::take(number)
}

/// Bytes sent on a unix socket that its peer has not read, as the kernel accounts them: not 0 while
/// there are any, also before the peer has accepted the connection.
///
/// # Errors
///
/// The descriptor is no socket.
pub fn unread(socket: BorrowedFd<'_>) -> io::Result<u32> {
    crate::sys::unread(socket)
}

/// Runs `service` until `stop` becomes readable and everything is down, or the service cannot be
/// kept running.
///
/// # Errors
///
/// [`SuperviseError`]. Then no process is left running, except a server that holds swapped-out
/// pages and one that cannot be killed.
pub fn supervise(service: &mut dyn Service, stop: BorrowedFd<'_>) -> Result<(), SuperviseError> {
    run::Supervisor::new(service).run(stop)
}

/// As [`supervise`], for the program that a supervisor's process has executed. Continues the
/// hand-over that [`Service::hand_over`] started.
///
/// # Errors
///
/// The errors of [`supervise`].
pub fn resume_hand_over(
    service: &mut dyn Service,
    stop: BorrowedFd<'_>,
    adopted: Adopted,
) -> Result<(), SuperviseError> {
    let mut supervisor = run::Supervisor::new(service);
    supervisor.adopt(adopted)?;
    supervisor.run(stop)
}

#[cfg(test)]
mod tests;
