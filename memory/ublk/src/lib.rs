//! A ublk server: the kernel has the disk `/dev/ublkbN`, and this process handles its requests.
//!
//! ```text
//!  kernel: disk /dev/ublkbN          queue's thread (one for each queue)           backend
//!  request of a tag ── completion ─► Tags: is it valid? ── Request in its buffer ─► Queue::submit
//!  copied to the tag's buffer            │                                           │ at once, or
//!                                        ▼                                           ▼ by its eventfd
//!  copied from it  ◄── COMMIT_AND_FETCH ═ ring ◄── Tags: the answer ◄───────── result, reap
//! ```
//!
//! [`Server::create`] creates a device by control commands, starts a thread for each queue and
//! starts the disk. [`Server::recover`] takes over a device whose server has died: the disk has
//! stayed, requests have waited, and those that the dead server had are issued again (user recovery
//! with reissue, Linux 6.1 or later). So requests must be safe to do twice; those of whole pages
//! are. The driver of Linux 6.7 to 6.14 may still work for the dead server when it lets the next
//! begin; recovery waits for that work. With a larger backend, [`Server::grow`] makes the disk as
//! large (Linux 6.16 or later).
//!
//! The kernel copies a request's bytes to and from the tag's buffer, which is locked in memory. The
//! driver's other modes give the server no bytes to compress, or cost a system call a request. A
//! queue's thread sleeps only in its ring, where the backend's eventfd wakes it too. It neither
//! allocates nor logs while requests flow.
//!
//! # Errors
//!
//! [`ServeError`] when a device cannot be created or taken over; [`QueueError`] when a queue's
//! thread has to end: then the process should exit, and the next server recover the device.
//! Everything from the kernel is checked: an invalid request gets an error and is counted, an
//! impossible completion is a [`Violation`]. A control command that the driver does not answer in
//! time is abandoned.
//!
//! # Limits
//!
//! Root (or access to `/dev/ublk-control`). Blocks of 4096 bytes. Linux 6.0 has no user recovery
//! and is refused. The driver grants at most one queue a CPU. Not used: zero copy, zones,
//! unprivileged devices, batches (7.0).
//!
//! # Proof
//!
//! Here: layouts against the kernel's header, the state of tags, and the thread's loop against a
//! scripted kernel. Everything else runs in guests (`tests/swap`), because a build machine need not
//! have the driver.

/// The tests' queues abort when they allocate, as in a debug build.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: device::guard::Allocator = device::guard::Allocator;

mod buffers;
mod control;
mod error;
mod geometry;
mod options;
mod owned;
mod payload;
mod queue;
mod queues;
mod ring;
mod server;
mod sys;
mod tags;

pub use buffers::Buffers;
pub use control::{Control, ControlError};
pub use error::ServeError;
pub use geometry::{DiskState, Geometry, Info};
pub use options::Options;
pub use owned::{abandon, remains, Owner};
pub use queue::QueueError;
pub use server::{disk, Server};
pub use tags::Violation;
