//! A driver of Intel QAT data compression that never loses a page.
//!
//! # What it is
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
//! keeps many requests in flight on one instance, submits and polls in its own thread, and delivers
//! every piece exactly once: as the device made it, or made again in software with the [`Reason`].
//! It works the same without any device.
//!
//! # What fails, and what then
//!
//! | the device | the engine |
//! |---|---|
//! | is full (RETRY) | polls; shares the load with the CPU where that is done sooner |
//! | refuses, answers with an error, a wrong checksum or a wrong length | redoes that piece in software |
//! | does not answer | redoes the piece by its deadline; with no answers at all, everything in flight |
//! | dies or is reset | redoes everything in flight at once, uses software until it is back |
//! | fails in a row | is under suspicion: software, with probes of made-up data, further and further apart |
//!
//! A slot belongs to the device until *its* callback. Work that is redone goes into another buffer,
//! and the slot stays away from use until the callback comes. A late or second callback finds
//! another generation and changes nothing.
//!
//! # Limits
//!
//! Deflate only. x86-64 and AArch64 Linux. `qatlib` 22 or later (checked against 24.02 and 26.08);
//! instances must do both directions, so the split instances of a 6xxx need its compression
//! instances to decompress as well. One `Qat` per process. An engine has one instance: engines
//! beyond the number of instances work in software and look for a free one now and then. A bit that
//! flips in the device's output after the device checked it is found only where the output is
//! verified ([`EngineOptions::verify_every`]) or by the checksum of the layer above. Data for
//! decompression may have bytes after the final deflate block; they are ignored. Requests that
//! never come back keep their pinned memory for the life of the process.
//!
//! Sources: `cpa.h`, `cpa_dc.h`, `icp_sal_poll.h`, `icp_sal_user.h` of qatlib 24.02.0, and the
//! behaviour of that version's access layer.

mod channel;
mod counters;
mod delivery;
mod device;
mod engine;
mod instance;
mod load;
mod mailbox;
pub mod measure;
mod memory;
mod options;
mod piece;
mod process;
mod software;
pub mod status;
mod sync;

pub use counters::{Counters, Reason, Snapshot};
pub use engine::{Engine, Lease};
pub use instance::{InstanceInfo, Unfit};
pub use load::{Libraries, LoadError, Location, QAT, USDM};
pub use mailbox::State;
pub use options::{Direction, EngineOptions};
pub use piece::{BadData, By, Finished, Op, MAX_PIECE};
pub use process::{Qat, StartError, StartOptions};
