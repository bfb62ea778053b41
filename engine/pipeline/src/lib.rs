//! Worker threads with a request ring each, and a ring of results for each submitter.
//!
//! The design is that of Xiao Guangrong's lockless threads for QEMU (2018). A submitter looks for
//! room in *all* workers' rings. A worker takes its next job as soon as it has finished one, and
//! pushes the output into the submitter's own ring of results.
//!
//! ```text
//!   Submitter ──► ring(4) ─► worker 0 { Context } ─┐
//!       │    ───► ring(4) ─► worker 1 { Context } ─┼─► Results ─► pop ─► Reorder ─► in sequence
//!       │    ───► ring(4) ─► worker n { Context } ─┘   (one per submitter)
//!       └─ no room: wait (compress-wait-thread on), or Busy(job): the caller sends it as it is
//! ```
//!
//! This crate knows neither pages nor codecs: a [`Job`] runs once, with its worker's own context,
//! and returns an output. A context may own an accelerator and keep several jobs in flight on it:
//! its worker then accepts jobs while there is room ([`Job::start`]) and collects finished ones
//! ([`Job::poll`]). While both sides are busy a job costs no allocation, no lock and no system
//! call; a side with nothing to do spins briefly and then sleeps on a futex.
//!
//! # What fails
//!
//! A closed [`Pool`] gives a submitted job back. A job that panics ends the process: its
//! output would never arrive, and a thread that waits for it would wait for ever.
//!
//! # Limits
//!
//! Results arrive in the order in which jobs finish; [`Reorder`] restores the sequence within a
//! window. A worker waits while a ring of results is full, and so do all jobs queued behind it.
//! Give [`Results`] room for everything that its submitter may have in flight, or pop the results
//! on another thread.
//!
//! # Proof
//!
//! `tests/pool.rs` runs the threads. `src/models.rs` with `scripts/loom` explores each interleaving
//! of idle workers, of closing and of results, and requires a failure with each ordering weakened.

mod job;
#[cfg(all(test, loom))]
mod models;
mod pool;
mod reorder;
mod results;
mod submitter;
mod sync;
mod workers;

pub use job::{Job, Ticket};
pub use pool::{Pool, PoolConfig};
pub use reorder::{Reorder, ReorderError};
pub use results::{Popped, Results};
pub use submitter::{Counters, Submitted, Submitter};
