//! A driver of Intel QAT data compression that never loses a page.
//!
//! # Overview
//!
//! ```text
//! Libraries::load ─► Qat::start ─► instances ──claim──► Engine (one per worker thread)
//!   dlopen            event thread     │                  take a slot ─► fill it ─► submit ─► poll ─► deliver
//!                        └─ Fatal, Restarting, Running ─►   │              │ refused, failed, late,  ▲
//!                           (mailbox, one per instance)     │              ▼ device down             │
//!                                                           └─ no device ─► libdeflate, same thread ─┘
//! ```
//!
//! An [`Engine`] compresses and decompresses pieces of at most 64 KiB as raw deflate streams. It
//! has many requests in flight on one instance, submits and polls in its own thread, and delivers
//! every piece exactly once: the device's result, or software's with the [`Reason`]. Without a
//! device it works in software.
//!
//! # Failures
//!
//! | the device | the engine |
//! |---|---|
//! | is full (RETRY) | polls; shares the load with the CPU where that is faster |
//! | refuses, answers with an error, a wrong checksum or a wrong length | redoes that piece in software |
//! | does not answer | redoes the piece by its deadline; with no answers at all, everything in flight |
//! | dies or is reset | redoes everything in flight at once, uses software until it is back |
//! | fails repeatedly | suspects it: works in software, and sends probes of made-up data at growing intervals |
//!
//! A call of the library that never returns keeps its thread. [`Watchdog`] detects it, and names it
//! ([`Hang`]), also while engines are opened ([`watched()`]); the pieces of that engine are not
//! delivered any more. All memory of the call stays with the thread: it is neither freed nor used
//! again. Nothing waits for such a thread, or for the library's shut-down, for more than some
//! seconds ([`Qat`], [`is_stuck`], [`end_process`]).
//!
//! A slot belongs to the device until *its* callback. Software writes to another buffer, and the
//! slot is not reused until the callback comes. A late or second callback has another generation
//! and is ignored.
//!
//! # Limits
//!
//! Deflate only. x86-64 and AArch64 Linux. `qatlib` 22 or later (checked against 24.02 and 26.08).
//! Instances must do both directions, so with the split instances of a 6xxx its compression
//! instances must decompress as well. One `Qat` a process. An engine has one instance: engines
//! beyond the number of instances work in software and look for a free one now and then. A bit flip
//! in the device's output after the device's own check is detected only where the output is
//! verified ([`EngineOptions::verify_every`]) or by the checksum of the layer above. Data for
//! decompression may have bytes after the final deflate block; they are ignored. Requests that
//! never come back occupy their pinned memory until the process ends.
//!
//! Sources: `cpa.h`, `cpa_dc.h`, `icp_sal_poll.h`, `icp_sal_user.h` of qatlib 24.02.0, and the
//! behaviour of that version's access layer.

#![cfg_attr(loom, expect(dead_code, reason = "the models use a part"))]

#[cfg(not(loom))]
mod calls;
#[cfg(not(loom))]
mod channel;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod delivery;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod engine;
#[cfg(not(loom))]
mod instance;
#[cfg(not(loom))]
mod load;
mod mailbox;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod options;
#[cfg(not(loom))]
mod piece;
#[cfg(not(loom))]
mod process;
#[cfg(not(loom))]
mod required;
#[cfg(not(loom))]
mod software;
#[cfg(not(loom))]
mod start;
#[cfg(not(loom))]
pub mod status;
mod sync;
#[cfg(not(loom))]
mod watchdog;
#[cfg(not(loom))]
mod watched;

#[cfg(not(loom))]
pub use calls::is_stuck;
#[cfg(not(loom))]
pub use counters::{Counters, Reason, Snapshot};
#[cfg(not(loom))]
pub use engine::{Engine, Lease};
#[cfg(not(loom))]
pub use instance::{InstanceInfo, Unfit};
#[cfg(not(loom))]
pub use load::{Libraries, LoadError, Location, QAT, USDM};
pub use mailbox::State;
#[cfg(not(loom))]
pub use options::{Direction, EngineOptions};
#[cfg(not(loom))]
pub use piece::{BadData, By, Finished, Op, MAX_PIECE};
#[cfg(not(loom))]
pub use process::{end_process, Qat};
#[cfg(not(loom))]
pub use required::NoEngine;
#[cfg(not(loom))]
pub use start::{StartError, StartOptions};
#[cfg(not(loom))]
pub use watchdog::{Hang, Watchdog};
#[cfg(not(loom))]
pub use watched::{watched, Unfinished};
