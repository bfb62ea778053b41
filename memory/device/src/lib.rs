//! A block device of compressed pages, without a transport: requests in, completions out.
//!
//! Blocks are pages of 4096 bytes. A transport opens one [`Queue`] for each of its threads and
//! submits [`Request`]s. The transports ublk, NBD and FUSE all use the two traits [`Backend`] and
//! [`Queue`].
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
//! Each thread has its own encoder, decoder, buffers and access to the store, all made beforehand:
//! a page takes no allocation, lock, system call or log message. A debug build checks for
//! allocations ([`guard`]).
//!
//! # What is stored
//!
//! A page that repeats one 64-bit value is stored in its table entry. Any other page is compressed
//! by the device's codec, whose number is the object's tag. It is stored uncompressed if
//! compression saves less than 1/32, because decompression would then cost more than the memory is
//! worth. The store has a checksum of each object, which covers the page number. Pages that the
//! policy recompressed, alone or in groups of neighbours ([`RECOMPRESSED`]), are read in the same
//! way: [`PageReader`] caches the last group, so that its next page costs a copy. A written page
//! leaves its group.
//!
//! # A QAT device
//!
//! With codec `qatzip` and [`Device::offload`], writes of any size go to QAT threads, which have an
//! instance of a QAT device each, and no other thread compresses:
//!
//! ```text
//!  submit(tag, write) ═ ring ═► device-qat-n: page to a slot ─► device ─► poll: stream, CRC-32 ─► store
//!                                │ has many in flight, and takes more pages meanwhile
//!                                └ refused, failed, late: the driver's own software
//! ```
//!
//! Software works on the slot's copy of the page. A QAT thread without work sleeps. With pages in
//! flight, it sleeps for a quarter of the expected rest of their time.
//!
//! While no instance works, all threads do writes in software. A page compressed by a device is
//! stored with the CRC-32 of the device's input, and a read that decodes to other bytes is an
//! error. Reads are done in software: decoding a page is faster than an answer of the device.
//!
//! If the store has a dictionary ([`Dictionaries`]), pages are compressed with it, and their tags
//! name it. The memory for dictionaries is allocated with the device
//! ([`DeviceOptions::dictionaries`]); `memory/policy` installs them.
//!
//! # Guarantees
//!
//! - A page is written entirely or not at all. Of two concurrent writes of a page, one remains.
//! - A request is complete when its last page is. Its pages are done in no particular order. If one
//!   fails, the others are done nevertheless; but a write that finds no memory may skip the rest.
//! - A read submitted after a write has completed sees that write, on any queue.
//! - Nothing is buffered: a flush has nothing to do.
//!
//! # Errors
//!
//! One [`Errno`] a request: `ENOSPC` when a write finds no memory (the old data stays), `EIO` when
//! a page cannot be read (a wrong checksum, a damaged entry, or a decoding error), `EINVAL` for a
//! request beyond the end or with a buffer of another length. The first damage is recorded
//! ([`Device::damage`]), for another thread to print, and each is counted.
//!
//! # Heartbeats
//!
//! Each I/O thread writes its progress to a slot of a [`pulse::Pulse`] ([`Device::with_pulse`]), by
//! which a supervisor detects a server that hangs.
//!
//! # Processes that fork
//!
//! A device belongs to the process that made it. A forked child has no workers, with requests in
//! flight or without: it must not use the device or its queues, and has to leave by `exec` or
//! `_exit`, because dropping them waits for requests in flight. Until then the child also holds the
//! store and its lock, which excludes a second server. The parent can continue: the store and
//! ublk's buffers are shared memory. Private memory, such as NBD's buffers, is copied when the
//! parent first writes it, and a swap server must not wait for the memory that this takes. So
//! `platen device serve` starts processes only in its supervisor, which has no requests, and by
//! `vfork` and `exec`.
//!
//! # Proof
//!
//! `tests/oracle.rs`: several queues against plain memory. `src/models.rs` with `scripts/loom`: the
//! completion of a split request and the wake-up of its queue, in every interleaving, and again
//! with each ordering weakened.
//!
//! # Limits
//!
//! Each worker, queue, QAT thread and, with a backing device, each of the four fetch threads takes
//! one of the store's 64 workers. A queue has up to [`DeviceOptions::depth`] split requests in
//! flight; the queue's own thread does any more.

#![cfg_attr(loom, expect(dead_code, reason = "the models use a part"))]

#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod device;
#[cfg(not(loom))]
mod dictionaries;
#[cfg(not(loom))]
mod dispatch;
#[cfg(not(loom))]
mod fetcher;
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
    records::{FETCHERS, QAT_SLOTS},
    threads::FETCH_THREAD,
};
