//! Swap on a disk that a process of platen serves: the precautions of that process, its supervisor
//! and its helpers.
//!
//! ```text
//!  supervisor: precautions that children inherit; holds the store; starts and replaces
//!    ├─ server: precautions of its own; serves the disk (ublk, or the kernel's NBD client)
//!    └─ helpers: header and swapon after the server is up, swapoff before it may end
//! ```
//!
//! * [`inherited`] and [`own`]: the precautions. [`check`](fn@check): their state as the kernel
//!   reports it.
//! * [`heap`]: memory that a server leaves to its successor.
//! * [`area`]: a disk's swap areas: header, swapon, swapoff. Discards are on, so freed pages leave
//!   the store.
//! * [`supervisor`]: replaces a server that dies; stops swapping before the server ends.
//! * [`nbd`]: attaches the kernel's NBD client by netlink.
//!
//! The crate does not know what the server serves. Each module documents its failures.
//!
//! # Limits
//!
//! Linux 5.6 or later (I/O flushers, pidfds), root. If a page cannot be read back, the kernel ends
//! the process that needs it with SIGBUS; so a server returns an error only if it must.

pub mod area;
mod check;
pub mod heap;
mod memory;
pub mod nbd;
mod partition;
mod precautions;
pub mod supervisor;
mod sys;

pub use check::{all_required_met, check, Item, Memory, State, Subject, Weight};
pub use memory::memory_limit;
pub use precautions::{
    apart, close_inherited, end_signals, heed_children, ignore_faults, ignore_signals,
    ignore_size_signal, ignore_terminal, inherited, leave_cgroup, own, prefer, prefer_alone,
    prefer_this, resume_signal, unblock_end_signals, warm, Untaken, KEEPING,
};
pub use supervisor::notify::Notify;
