//! The lanes: worker threads with a request ring each, results by ring, wait or busy.
//!
//! The model is that of Xiao Guangrong's lockless threads for QEMU (2018). A submitter looks for
//! room in *all* workers' rings; a worker takes its next job the moment it has finished one, and
//! pushes what came out into the submitter's own ring of results.
//!
//! ```text
//!   Submitter ──► ring(4) ─► worker 0 { Context } ─┐
//!       │    ───► ring(4) ─► worker 1 { Context } ─┼─► Results ─► pop ─► Reorder ─► in sequence
//!       │    ───► ring(4) ─► worker n { Context } ─┘   (one per submitter)
//!       └─ no room: wait (compress-wait-thread on), or Busy(job): the caller sends it as it is
//! ```
//!
//! Nothing here knows pages or codecs: a [`Job`] runs once, with its worker's own context, and
//! gives an output. A context may own an accelerator and keep several jobs in flight on it: its
//! worker then goes on taking jobs while there is room ([`Job::start`]) and collects what is
//! finished ([`Job::poll`]). While both sides are busy a job costs no allocation, no lock and no
//! system call; a side with nothing to do spins briefly and then sleeps on a futex.
//!
//! # What fails
//!
//! Submitting to closed [`Lanes`] gives the job back. A job that panics ends the process: its
//! output would never come, and whoever waits for it would wait for ever.
//!
//! # Limits
//!
//! Results come as they finish; [`Reorder`] restores a sequence within a window. A worker waits
//! while a ring of results is full, and with it everyone whose jobs are queued behind: give
//! [`Results`] room for all that its submitter lets be in flight, or have another thread pop them.

mod job;
mod lanes;
mod reorder;
mod results;
mod submitter;
mod sync;

pub use job::{Job, Ticket};
pub use lanes::{Lanes, LanesConfig};
pub use reorder::{Reorder, ReorderError};
pub use results::{Popped, Results};
pub use submitter::{Counters, Submitted, Submitter};
