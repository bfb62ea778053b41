//! A block device of compressed pages, without a transport: requests in, completions out.
//!
//! Blocks are pages of 4096 bytes. A transport opens one [`Queue`] for each of its threads and submits
//! [`Request`]s; ublk, NBD and FUSE stand behind the same two traits, [`Backend`] and [`Queue`].
//!
//! ```text
//!  transport's thread                                     worker threads, shared by all queues
//!  submit(tag, request) ── few pages ──► done at once
//!        │ many pages
//!        ├── invitations ═ ring ═══════════════════════►  take pages off the same flight,
//!        │   takes pages off the flight itself            one by one, until none is left
//!        │                                                        │ the last page's thread
//!  reap(tag, result) ◄════════════════ ring, eventfd ═════════════╯
//! ```
//!
//! A thread has its own encoder, decoder, buffers and access to the store, all made beforehand:
//! a page costs no allocation, no lock, no system call and no line of a log. A debug build can see to
//! the first ([`guard`]).
//!
//! # What is stored
//!
//! A page that is one word over and over is kept in its table entry. Any other page is compressed by
//! the device's codec, whose number is the object's tag; it is stored as it is when that saves less than
//! a 32nd, since a decoder would then cost more than the memory. The store keeps a checksum of each
//! object and names the page in it. What somebody else recompressed, alone or in groups of neighbours
//! ([`RECOMPRESSED`]), is read in the same way: [`PageReader`] keeps the last group, so that its next page
//! costs a copy. A page that is written leaves its group.
//!
//! # What is promised
//!
//! - A page is written as a whole or not at all. Two writes of a page at once leave one of them.
//! - A request is over when its last page is. Pages of one request are done in no particular order, and a
//!   failure of one leaves the others done, or, of a write that finds no memory, not tried.
//! - What a completed write stored is there for every read submitted after it, on any queue.
//! - Nothing is buffered: a flush has nothing to do.
//!
//! # What fails
//!
//! [`Errno`], one for a request: `ENOSPC` when a write finds no memory (what was stored stays), `EIO` when a
//! page cannot be read (its checksum or its entry is wrong, or it does not decode), `EINVAL` for a
//! request beyond the end or with a buffer of another length. The first damage found is kept
//! ([`Device::damage`]) for somebody else's thread to print, and each is counted.
//!
//! # Limits
//!
//! Workers and queues together take one of the store's 64 workers each. A queue has
//! [`DeviceOptions::depth`] split requests under way at a time; one more is done by its own thread.

mod device;
mod engine;
mod flight;
pub mod guard;
mod pages;
mod queue;
mod request;
mod stats;

pub use device::{Device, DeviceOptions, OpenError};
pub use pages::{codec_of, Damage, PageReader, ALONE, RECOMPRESSED};
pub use queue::DeviceQueue;
pub use request::{Backend, Buffer, Errno, Extent, Op, Queue, Request, PAGE};
pub use stats::IoStats;
