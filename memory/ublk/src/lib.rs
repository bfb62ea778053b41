//! A ublk server: the kernel has the disk `/dev/ublkbN`, and this process does its requests.
//!
//! ```text
//!  kernel: disk /dev/ublkbN          queue's thread (one for each queue)           backend
//!  request of a tag ── completion ─► Tags: is it sane? ── Request in its buffer ─► Queue::submit
//!  copied to the tag's buffer            │                                           │ now, or
//!                                        ▼                                           ▼ by its eventfd
//!  copied from it  ◄── COMMIT_AND_FETCH ═ ring ◄── Tags: what to answer ◄──── result, reap
//! ```
//!
//! [`Server::create`] makes a device by control commands, starts a thread for each queue and shows the
//! disk; [`Server::recover`] takes one over whose server has died: its disk has stayed, requests
//! have waited, and those the dead one had are given out again (user recovery with reissue, Linux
//! 6.1 on). What those requests do must be safe to do twice; whole pages are.
//!
//! The kernel copies a request's bytes to and from the tag's buffer, which is locked in memory.
//! Other ways that the driver offers give the server no bytes to compress, or cost a system call a
//! request. A thread sleeps in its ring only; the backend's completions come there through its
//! eventfd. It neither allocates nor logs while requests flow.
//!
//! # What fails
//!
//! [`ServeError`] when a device cannot be made or taken over, [`QueueError`] when a queue's thread has to
//! give up: then the process should end, and its successor recover the device. Whatever the kernel
//! says is checked: a request that makes no sense is answered with an error and counted, a
//! completion that cannot be is a [`Violation`]. A control command that the driver does not answer
//! in time is given up.
//!
//! # Limits
//!
//! Root (or rights on `/dev/ublk-control`). Blocks of 4096 bytes. Linux 6.0 has no user recovery
//! and is refused. Fewer queues than asked for are granted where there are fewer CPUs. Not used:
//! zero copy, zones, unprivileged devices, batches (7.0).
//!
//! # Proof
//!
//! Layouts against the kernel's header, the state of tags and the thread's loop against a kernel
//! that plays a script, here; everything else in guests (`tests/swap`), for the machine that builds
//! this needs no such driver.

/// The tests' queues end the process when they allocate, as a debug build's do.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

mod buffers;
mod control;
mod queue;
mod ring;
mod server;
mod sys;
mod tags;

pub use buffers::Buffers;
pub use control::{Control, ControlError, DiskState, Geometry, Info};
pub use queue::QueueError;
pub use server::{abandon, disk, Counters, Options, ServeError, Server};
pub use tags::Violation;
