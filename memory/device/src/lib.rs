//! A block device of compressed pages, without a transport: requests in, completions out.
//!
//! Blocks are pages of 4096 bytes. A transport opens one [`Queue`] for each of its threads and
//! submits
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
//! A thread has its own encoder, decoder, buffers and access to the store, all made beforehand: a
//! page costs no allocation, no lock, no system call and no line of a log. A debug build can see to
//! the first ([`guard`]).
//!
//! # What is stored
//!
//! A page that is one word over and over is kept in its table entry. Any other page is compressed
//! by the device's codec, whose number is the object's tag; it is stored as it is when that saves
//! less than a 32nd, since a decoder would then cost more than the memory. The store keeps a
//! checksum of each object and names the page in it. What somebody else recompressed, alone or in
//! groups of neighbours ([`RECOMPRESSED`]), is read in the same way: [`PageReader`] keeps the last
//! group, so that its next page costs a copy. A page that is written leaves its group.
//!
//! # A QAT device
//!
//! With codec `qatzip` and [`Device::offload`] writes of any size go to threads that have an
//! instance of a QAT device each, and nobody else compresses:
//!
//! ```text
//!  submit(tag, write) ═ ring ═► device-qat-n: page to a slot ─► device ─► poll: stream, CRC-32 ─► store
//!                                │ keeps many in flight, goes on taking pages meanwhile
//!                                └ refused, failed, late: the driver's own software, from the slot's copy
//! ```
//!
//! These threads sleep while there is nothing to do, and for a quarter of what the device has yet to
//! do while there is.
//!
//! While no instance is well, writes are done as if there were none: by all threads, in software. A
//! page that a device has made is stored with the CRC-32 of what the device was given, and a read
//! that decodes to something else is an error. Reads are software's: a page is decoded before a
//! device has answered.
//!
//! With a dictionary in the store ([`Dictionaries`]) pages are compressed with it, and their tags
//! name it. Its memory is there from the beginning ([`DeviceOptions::dictionaries`]); who installs
//! one is `memory/policy`.
//!
//! # What is promised
//!
//! - A page is written as a whole or not at all. Two writes of a page at once leave one of them.
//! - A request is over when its last page is. Pages of one request are done in no particular order,
//!   and a failure of one leaves the others done, or, of a write that finds no memory, not tried.
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
//! # Signs of life
//!
//! Each thread that does requests writes what it does to a slot of a [`pulse::Pulse`]
//! ([`Device::with_pulse`]): a supervisor sees by it when a server hangs.
//!
//! # Processes that fork
//!
//! A device is of the process that made it. In a child that was forked, with requests in flight or
//! without, there are no workers: it may use neither device nor queues, and leaves by `exec` or
//! `_exit`, as dropping them waits for what is in flight. It also has the store, and the lock that
//! keeps a second server from it, until then. The parent goes on: the store is shared memory, and
//! so are ublk's buffers; private buffers, as NBD's, and all else that is written are copied page
//! by page when the parent first writes them, which takes memory that a server of swap may not wait
//! for. So `platen device serve` starts processes in its supervisor only, which has no requests,
//! and by `vfork` and `exec`.
//!
//! # Proof
//!
//! `tests/oracle.rs`: several queues against plain memory. `src/models.rs` with `scripts/loom`: how
//! a split request is finished and its queue woken, in every interleaving, and again with each
//! ordering made weaker.
//!
//! # Limits
//!
//! Workers, queues, threads with an instance of a QAT device and, with a backing device, the four
//! that wait for it take one of the store's 64 workers each. A queue has
//! [`DeviceOptions::depth`] split requests under way at a time; one more is done by its own thread.

#![cfg_attr(loom, expect(dead_code, reason = "the models use a part"))]

#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod dictionaries;
#[cfg(not(loom))]
mod dispatch;
mod flight;
#[cfg(not(loom))]
pub mod guard;
#[cfg(all(test, loom))]
mod models;
#[cfg(not(loom))]
mod page_io;
#[cfg(not(loom))]
mod pages;
#[cfg(not(loom))]
mod qat_threads;
#[cfg(not(loom))]
mod queue;
#[cfg(not(loom))]
mod records;
mod request;
mod station;
mod sync;
#[cfg(not(loom))]
mod threads;

pub use request::{Backend, Buffer, Errno, Extent, Op, Queue, Request, PAGE};
#[cfg(not(loom))]
pub use {
    counters::IoStats,
    device::{Device, DeviceOptions, OpenError},
    dictionaries::Dictionaries,
    page_io::thread_heap,
    pages::{codec_of, Damage, PageReader, ALONE, RECOMPRESSED},
    qat_threads::{OffloadOptions, OffloadStats},
    queue::DeviceQueue,
    records::FETCHERS,
    threads::FETCH_THREAD,
};
