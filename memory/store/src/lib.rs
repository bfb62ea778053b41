//! Compressed pages in one memfd: a slot table, size-class slabs, compaction, and a server that may
//! be killed at any instruction.
//!
//! The store does not compress. The caller compresses a page into an object (1 to 4096 bytes and a
//! tag), and a [`Worker`] stores and reads it. A page that repeats one 64-bit value is stored in
//! its table entry. [`Worker::replace`] exchanges a page's object for another form of the same
//! bytes (recompression) unless a write got there first; [`Worker::modify`] reads, edits and stores
//! a page as one step.
//!
//! Pages that were compressed together are a *group* ([`Worker::put_group`]): its bytes lie in up
//! to seven objects, which the group's record names, and each page's entry names the group. A write
//! of a page removes it from its group; removing the last page frees the group.
//!
//! Pages may be *written back* ([`Worker::write_back`]) to a backing device: a file or a block
//! device that the store gets before it has workers ([`Store::set_backing`]). It is written in
//! batches. A written-back page's entry has a block number and a checksum. [`Worker::read_back`]
//! waits for the device and holds no pin or lock meanwhile.
//!
//! ```text
//!  put(page, tag, bytes)                               get(page, out)
//!    │ claim a place: current slab, no lock              │ pin the slot (one compare-and-swap)
//!    │ write checksum and bytes                          │ copy checksum and bytes
//!    │ publish: swap the slot's 64 bits                  │ unpin, compare the checksum
//!    ▼ free the old object's place (one fetch_and)       ▼
//!  ┌─ memfd, held by the supervisor too ─────────────────────────────────────────────────┐
//!  │ superblock │ slot table: 8 bytes a page │ records of groups │ regions: heads, slabs   │
//!  └────────────────────────────────────────────────────────────────────────────────────┘
//!    ▲ slabs ahead of need, empty ones back            ▲ objects out of the emptiest slabs
//!  keeper thread                                     compaction, in steps
//! ```
//!
//! # Layout
//!
//! `layout.rs` draws the file. `entry.rs` has the 64 bits of an entry: kind, place, exact length
//! and tag of the object, the number of pins, the age. `record.rs` has the record of a group.
//! `class.rs` has the 158 size classes: places 16 bytes apart up to 1 KiB and 32 above, in slabs of
//! 1 to 32 pages; an object may cross a page boundary in its slab, and an uncompressed page takes
//! exactly a page. An object's CRC-32C also covers its page number, length, tag and bump, so that
//! an object of another page, or an older one, does not pass for it.
//!
//! # Ownership
//!
//! A place belongs to the thread that claimed it, then to the threads that pin its slot, then to
//! the thread whose compare-and-swap removed it from the table. A writer waits for pins, so no
//! reader is ever in a freed place, and no reader has to retry. A slab belongs to a worker or to
//! its class's lock; the owner decides who may claim, and any thread may free (`slab.rs`). A wait
//! for a pin lasts one copy of 4 KiB; a wait for a class's lock lasts one list operation, about
//! once a slab.
//!
//! # Dictionaries
//!
//! An object may need a dictionary to be decompressed. Up to [`DICTIONARIES`] dictionaries are in
//! the file and are never removed; an object's tag may name one ([`dictionary_of`]). See
//! `dictionary.rs`.
//!
//! # A server killed at any instruction
//!
//! Stores of a killed process to shared memory survive it, in program order. The table is the only
//! source of truth, and each of its entries changes by one atomic 64-bit store:
//!
//! | killed | what the next server finds |
//! |---|---|
//! | before the claim, or between claim and publishing | no entry names the place: it is free; the old object is there |
//! | after publishing, before the old object is freed | the new object; no entry names the old place: it is free |
//! | reading (pinned) | pin counts are no part of an entry's meaning; they are cleared |
//! | moving an object (compaction) | as for a write: the entry names one of two complete copies |
//! | making a group, before a page is in it | objects of a group that no page is in: freed |
//! | making a group, later; removing a page from one | each page is in it, or what it was; a group without pages is freed |
//! | writing back, while blocks are written | the page in memory; the blocks are on record, and not used any more |
//! | writing back, before a page's entry says so | the page in memory; no entry names the block: it is free |
//! | writing back, later; bringing back | as for a write: the entry names the block, or memory |
//! | discarding a range | each page is there or not |
//! | allocating or freeing memory | memory in which nothing is stored: freed |
//! | taking over | the same table: taking over starts again |
//! | installing a dictionary | before it is counted: memory that is freed; later: it is there |
//! | growing | before the number of pages is stored: memory that is freed; later: the new pages |
//! | making the store | a file without its magic number: refused |
//!
//! [`Store::attach`] rebuilds everything else from the table. It refuses a file that another server
//! has (a lock on an open file description of its own), one of another version or geometry, one
//! whose length is not what its superblock says, and one that could be truncated under the mapping.
//! Damage is not a crash: a page whose entry cannot be right is *lost*, and an object with a wrong
//! checksum fails to be read. Either costs that one page, or all of a group, until the page is
//! written again.
//!
//! # Growing
//!
//! A store can grow to 16 times the pages that it was created with ([`Ahead::capacity`]), when a
//! server takes it over ([`Options::grow_to`]). The file and its mapping have room for the largest
//! table, whose other parts are holes. The order is: memory for the new part of the table; the
//! number of pages in the superblock, by one store; then the caller tells clients. A server whose
//! predecessor lives gets the memory first ([`Ahead::grow`]), because no server serves while it
//! takes over. A store does not shrink, and one of format version 5 does not grow.
//!
//! # Memory
//!
//! [`Options::mem_limit`] bounds all memory of the file: table, slabs, and the reserve of ready
//! slabs. At the limit a write fails with [`PutError::Full`] and the page's old data stays. The
//! [`Keeper`]'s thread allocates memory from the kernel; in a store without one (a cache in a
//! process that is not under memory pressure) the writing thread does. `examples/churn.rs` measures
//! overhead: memory used (the table included, ready slabs not) over bytes stored. With the corpus's
//! pages at zstd level 1 (objects of 1.6 KB), after three random overwrites of each page and
//! compaction: 1.035 at 106 MiB, 1.026 at 1.5 GiB; without compaction 1.083 and 1.040. A keeper
//! compacts when that frees at least 1/256 of the memory used; 4 MiB suffice, or 1/4096 of more
//! than 16 GiB.
//!
//! # What fails
//!
//! [`StoreError`] when a store is made or taken over; [`PutError`] and [`GetError`] for one page.
//! Nothing in the file makes the store panic or access memory outside of its mapping.
//! [`BackingError`] for a backing device that is not this store's, or is shorter than it was.
//! [`WriteBackError`] when a write to the device fails: the pages are still in memory, and nothing
//! more is written until a call of [`Store::resume_backing`]. A failed read of the device is that
//! page's error.
//!
//! # Limits
//!
//! Pages of 4096 bytes; 512 GiB of objects (a device of 400 GiB); 64 workers; 62 tags; groups of 32
//! pages and 28 KiB, one for every 8 pages; backing devices of 512 GiB. Neither the store nor its
//! backing device survives a crash of the host. The checksum finds accidents, not forgery. A
//! memfd's memory can be swapped out: a swap server runs under `mlockall` (the mapping is made so
//! that `mlockall` does not fill the holes) in a cgroup without swap, and so does its supervisor.
//! The kernel charges the file's memory to the cgroup that touched it first.
//!
//! # Proof
//!
//! `tests/oracle.rs`: operation lists, with takeovers, against a map. `tests/concurrent.rs`: the
//! same on several threads. `tests/loom.rs` with `scripts/loom`: slots and slabs in every
//! interleaving, and again with each ordering weakened. `src/crash_tests.rs`: killed at every step;
//! `tests/kill.rs`: killed under load. `tests/writeback`: real, full, failing and foreign backing
//! devices. `tests/attach.rs`: refusals and damage; `tests/grow.rs`: stores that grow; fuzz targets
//! `store_ops`, `store_attach` and `backing_header`.
#![cfg_attr(loom, expect(dead_code, unreachable_pub, reason = "the models use a part"))]

#[cfg(not(loom))]
mod account;
#[cfg(not(loom))]
mod ahead;
#[cfg(not(loom))]
mod asks;
#[cfg(not(loom))]
mod available;
#[cfg(not(loom))]
mod backing;
#[cfg(not(loom))]
mod backing_device;
#[cfg(not(loom))]
mod backing_header;
#[cfg(not(loom))]
mod batch;
mod blocks;
#[cfg(not(loom))]
mod check;
#[cfg(not(loom))]
mod class;
#[cfg(not(loom))]
mod compact;
#[cfg(all(test, not(loom)))]
mod crash_tests;
#[cfg(not(loom))]
mod dictionary;
#[cfg(not(loom))]
mod disk;
#[cfg(not(loom))]
mod editing;
mod entry;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod file_disk;
#[cfg(not(loom))]
mod group;
#[cfg(not(loom))]
mod group_buffer;
#[cfg(not(loom))]
mod groups;
#[cfg(not(loom))]
mod grow;
#[cfg(not(loom))]
mod heap;
#[cfg(not(loom))]
mod inject;
#[cfg(not(loom))]
mod keeper;
#[cfg(not(loom))]
mod layout;
#[cfg(not(loom))]
mod map;
#[cfg(not(loom))]
mod modify;
#[cfg(not(loom))]
mod object;
#[cfg(not(loom))]
mod options;
#[cfg(not(loom))]
mod page;
mod record;
#[cfg(not(loom))]
mod recover;
#[cfg(not(loom))]
mod refusals;
#[cfg(not(loom))]
mod regions;
#[cfg(not(loom))]
mod rings;
mod slab;
mod slot;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod store;
#[cfg(not(loom))]
mod superblock;
#[cfg(not(loom))]
mod sweep;
mod sync;
#[cfg(not(loom))]
mod worker;
#[cfg(not(loom))]
mod writeback;

#[cfg(not(loom))]
pub use {
    ahead::{sizes, Ahead},
    backing::format_backing,
    backing_device::{BackingStats, Stopped},
    backing_header::BackingError,
    batch::{Added, Batch, WHOLE_TAG},
    check::Checked,
    compact::Compacted,
    dictionary::{stored_len, DictionaryError, Installed, MAX_DICTIONARY},
    disk::{Block, Disk, DiskError},
    entry::{MAX_AGE, MAX_MEMBERS, MAX_OBJECT, TAGS},
    error::StoreError,
    file_disk::FileDisk,
    group::{GroupError, Grouped},
    group_buffer::{GroupBuffer, Seen, MAX_GAP, MAX_PAYLOAD},
    grow::GrowError,
    keeper::Keeper,
    layout::{max_pages, DICTIONARIES},
    modify::{Change, ModifyError},
    object::{dictionary_of, DICTIONARY_TAG},
    options::Options,
    page::{GetError, Page, PutError},
    stats::Stats,
    store::{Store, MAX_WORKERS},
    superblock::Foreign,
    worker::Worker,
    writeback::{BackBuffer, WriteBackError, WrittenBack},
};

#[cfg(loom)]
pub use {
    blocks::Blocks,
    entry::{Backed, Member, Object, State, Word},
    record::{Record, PIECES},
    slab::{Freed, Role, Slab},
    slot::Slot,
    sync::{fence_read, fence_write},
};
