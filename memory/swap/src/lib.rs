//! Swap on a disk that a process of ours serves: what that process must see to, and what goes
//! around it.
//!
//! ```text
//!  supervisor: precautions that children inherit; holds the store; starts and replaces
//!    ├─ server: precautions of its own; serves the disk (ublk, or the kernel's NBD client)
//!    └─ helpers: header and swapon once it is up, swapoff before it may end
//! ```
//!
//! * [`inherited`] and [`own`]: the precautions. [`check`](fn@check): what the kernel says of them.
//! * [`area`]: a swap area's header, on, off. Discards are on: what is freed is no longer stored.
//! * [`supervisor`]: a server that dies is replaced; swapping ends before it ends.
//! * [`nbd`]: the kernel's NBD client attached by netlink.
//!
//! Nothing here knows what is served. What fails is said by each module.
//!
//! # Limits
//!
//! Linux 5.6 on (I/O flushers; pidfds), root. A page that cannot be read back ends the process that
//! needs it with SIGBUS: that is the kernel's way, and why a server answers errors only where it
//! must.

pub mod area;
mod check;
mod memory;
pub mod nbd;
mod precautions;
pub mod supervisor;
mod sys;

pub use check::{all_required_met, check, Item, Memory, State, Subject, Weight};
pub use memory::memory_limit;
pub use precautions::{
    apart, close_inherited, end_signals, ignore_signals, ignore_size_signal, ignore_terminal,
    inherited, leave_cgroup, own, prefer, prefer_this, resume_signal, unblock_end_signals, warm,
    Untaken, KEEPING,
};
