//! Advice from figures: how to migrate a VM, and how to set up compressed memory.
//!
//! ```text
//!  /sys, /proc ─► Host ──────────────────────────────────┬─► rules, compressed_memory
//!  monitor ─► Vm, dirtying, Saved (pages) ─► measure ─┐   │
//!  the user, a peer ──────────────────────────────────┴─► Figures ─► answer ─► Answer
//! ```
//!
//! [`Host`] and [`vm`] only read; [`measure()`] runs the codecs. [`Figures::answer`] is a pure
//! function: it applies crate `forecast`'s model to each method, and chooses one.
//!
//! # What fails
//!
//! A device that the host does not show counts as absent. A monitor's impossible answer is an error
//! that names the command and the answer. Every read is bounded: 64 KiB of a file of /sys or /proc,
//! 8 MiB of a list of modules, 40 MiB of a guest's memory.
//!
//! # Limits
//!
//! The CPU time besides coding is a constant of the machine of docs/figures.md, scaled by the speed
//! of this host's cores. QAT's throughput is the figure of QEMU's document. Both are assumptions.

mod answer;
mod compressed_memory;
mod costs;
mod curve;
mod host;
mod measure;
mod pages;
mod rules;
pub mod vm;

pub use answer::{Alternative, Answer, Destination, Figures, Verdict};
pub use compressed_memory::{compressed_memory, MemoryAdvice};
pub use host::{Accelerators, Feature, Host, Iaa, Kernel, Memory, Nic, Qat};
pub use measure::{measure, Measured, Origin};
pub use rules::{rules, Rule};
