//! The supervisor: keeps a server running, and what must outlive it.
//!
//! ```text
//!              starts, watches (pidfd)            a line each: "device 0", "ready"
//!  supervisor ─────────────────────────► server ───────────────────────────────► supervisor
//!     │  holds the descriptors of store        ◄──── "end" ─────────────────────
//!     │  and buffers, hands them on
//!     ├─ one that stands by: has its memory, waits for "go ..."
//!     └─ helpers: processes that do what may take long or be killed (swapon, swapoff), or need memory (a trainer, when
//!        the server says "train", with the socket by which the two will talk; until it says "enough")
//! ```
//!
//! A server that dies is replaced at once; one that dies again and again after a growing pause, of
//! 10 s at most ([`Backoff`]). There is always another one, since the store is intact: only the end
//! of the supervisor gives contents up. A server that hangs is killed, and replaced like one that has
//! died: `watchdog.rs` says what counts as that. Whoever asks the supervisor to end (a descriptor that becomes
//! readable) has the down helper run first: swapping must be over before the disk goes. Should that
//! fail, the server goes on.
//!
//! A server that dies takes with it the way to get memory back: its successor must not need any. So
//! one
//! [stands by](Service::standby), started while there was memory, and goes when it is told to.
//!
//! Servers do not follow signals while they have a supervisor: one that a service manager or a
//! terminal sends to all processes at once must not take a disk away that is swapped to.
//!
//! A server that is to replace another one and does not say that it is ready is killed after some
//! time ([`Service::ready_limit`]), and counts as one that has died: whoever has the disk waits. So
//! is one that does not end when it is told to ([`Service::end_limit`]): what keeps it may be a
//! disk that answers nobody.
//!
//! Nothing that the supervisor does for a disk in use may end it or make it wait: a process that
//! cannot be started is tried again, and one that is killed is not waited for, since what it is
//! stuck in may be the very disk.
//!
//! There is one trainer at most: another one is started when the former has been seen to end,
//! however long that takes. It ends with the server that asked for it. Its socket goes from the
//! server to it and is nobody else's: the next server has nothing to do with what it may still say.
//!
//! Limits: the supervisor is one thread; it allocates little, when it starts something. Should it
//! be killed itself, the server goes on without one.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

mod backoff;
mod child;
mod error;
mod notify;
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

/// The status that a server ends with because the kernel's NBD client has given up a connection,
/// which it does when a request takes long. That is a disk's or a host's trouble and ends some
/// time: however often it comes, another server is started.
pub const CLIENT_LOST: u8 = 75;

/// A copy of a descriptor that whoever started this process has left to it, by its number. For what
/// has no path that it could be opened by once more: a socket.
///
/// # Errors
///
/// There is none of this number.
pub fn descriptor(number: i32) -> io::Result<OwnedFd> {
    crate::sys::copy_of(number)
}

/// As [`descriptor`], but the number itself is closed. For a program that takes over from the one
/// that its process was before, at its start: the number is in use nowhere in it.
///
/// # Errors
///
/// There is none of this number.
pub fn take_descriptor(number: i32) -> io::Result<OwnedFd> {
    crate::sys::take(number)
}

/// Runs `service` until `stop` becomes readable and all is down, or it cannot be kept up.
///
/// # Errors
///
/// [`SuperviseError`]; nothing that was started is left then, except a server that holds swapped-out
/// pages, and one that cannot be killed.
pub fn supervise(service: &mut dyn Service, stop: BorrowedFd<'_>) -> Result<(), SuperviseError> {
    run::Supervisor::new(service).run(stop)
}

/// As [`supervise`], for the program that a supervisor's process has become: the hand-over goes on
/// where [`Service::hand_over`] has left it.
///
/// # Errors
///
/// Those of [`supervise`].
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
