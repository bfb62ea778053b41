//! Compressed pages in one memfd: a slot table, size-class slabs, compaction, and a server that may
//! be killed at any instruction.
//!
//! The store does not compress. A thread's [`Worker`] takes an object (1 to 4096 bytes and a tag)
//! for a page and gives it back; a page that is one word over and over is kept in its table entry.
//! Recompression swaps one form of a page for another ([`Worker::replace`]) without racing a write,
//! and a write of a part of a page reads, edits and stores it as one ([`Worker::modify`]).
//!
//! Pages that were compressed as one are a *group* ([`Worker::put_group`]): its bytes lie in up to
//! seven objects, which the group's record names, and each page's entry says which group it is in.
//! A page that is written leaves; with the last one goes the group.
//!
//! Pages may be *written back* ([`Worker::write_back`]): a file or a block device, given to the
//! store before it has workers ([`Store::set_backing`]), takes them in batches, and their entries
//! then name a block and a checksum.
//! [`Worker::read_back`] waits for the device and holds nothing meanwhile.
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
//! `layout.rs` draws the file, `slot.rs` the 64 bits of an entry: kind, where the object lies, its
//! exact length and tag, who reads it just now, how old it is; `record.rs` the record of a group.
//! `class.rs` has the 158 classes: places 16 bytes apart up to 1 KiB and 32 above, in slabs of 1 to
//! 32 pages across whose pages objects may straddle; a page stored as it is takes exactly a page.
//! An object's CRC-32C begins with its page number, length, tag and bump, so that an object of
//! another page, or of another time, is not taken for it.
//!
//! # Who may touch what
//!
//! A place belongs to the thread that claimed it, then to those who pin its slot, then to the
//! thread whose compare-and-swap took it out of the table: a writer waits for pins, so no reader is
//! ever in a place that is freed, and none has to try again. Slabs belong to a worker or to their
//! class's lock, which decides who may claim; anybody may free (`slab.rs`). Waiting for a pin is
//! waiting for one copy of 4 KiB; waiting for a class's lock is waiting for a list operation, once
//! in a slab or so.
//!
//! # Dictionaries
//!
//! What compresses may need more than an object to read it: up to [`DICTIONARIES`] dictionaries lie
//! in the file, each for good, and an object's tag may name one ([`dictionary_of`]). See
//! `dictionary.rs`.
//!
//! # A server killed at any instruction
//!
//! What a killed process has stored in shared memory stays, in the order of its instructions. The
//! table is the only truth, and only whole words of it are ever stored:
//!
//! | killed | what the next server finds |
//! |---|---|
//! | before the claim, or between claim and publishing | no entry names the place: it is free; the old object is there |
//! | after publishing, before the old object is freed | the new object; no entry names the old place: it is free |
//! | reading (pinned) | pins are no part of what an entry means, and are taken off |
//! | moving an object (compaction) | as for a write: the entry names one of two whole copies |
//! | making a group, before a page is in it | objects of a group that no page is in: freed |
//! | making a group, later; leaving one | each page is in it, or what it was; a group without pages is freed |
//! | writing back, while blocks are written | the page in memory; the blocks are noted, and not used any more |
//! | writing back, before a page's entry says so | the page in memory; the block is named by nobody: it is free |
//! | writing back, later; bringing back | as for a write: the entry names the block, or memory |
//! | discarding a range | each page is there or not |
//! | getting memory, or giving it back | memory where nothing is stored: given back |
//! | taking over | the same table: taking over begins again |
//! | installing a dictionary | before it is counted: memory that is given back; later: it is there |
//! | making the store | a file without its magic number: refused |
//!
//! [`Store::attach`] makes everything else anew from the table. It refuses a file that another server has
//! (a lock on an opening of its own), of another version or geometry, of a length that its
//! superblock does not say, or that could be cut short under it. Damage is another matter than a
//! crash: an entry that cannot be right is *lost*, an object whose checksum is wrong fails to be
//! read; either costs that one page, or all of a group, and is over when the page is written.
//!
//! # Memory
//!
//! [`Options::mem_limit`] bounds all memory of the file: table, slabs, and those ready ahead of need. At
//! the limit a write fails as [`PutError::Full`] and what was stored stays. Memory comes from the
//! kernel on the [`Keeper`]'s thread; a store without one (a cache in a process that is not under
//! pressure) asks on the writing thread. `examples/churn.rs` measures memory used, table included
//! and slabs that are ready left out, over bytes stored. With the corpus's pages at zstd level 1
//! (objects of 1.6 KB) after three random overwrites of each page and compaction: 1.035 at 106 MiB,
//! 1.026 at 1.5 GiB; without any compaction 1.083 and 1.040. A keeper compacts when that frees a
//! 256th.
//!
//! # What fails
//!
//! [`StoreError`] when a store is made or taken over, [`PutError`] and [`GetError`] for one page. Nothing
//! in the file makes the store panic or reach outside of its mapping. [`BackingError`] for a
//! backing device that is not this store's, or not as long as it was; [`WriteBackError`] when a
//! write to it fails: the pages are in memory still, and nothing more is written until somebody
//! [says so](Store::resume_backing). A read of it that fails is that page's error.
//!
//! # Limits
//!
//! Pages of 4096 bytes; 512 GiB of objects (a device of 400 GiB); 64 workers; 62 tags; groups of 32
//! pages and 28 KiB, one for every 8 pages. Backing devices of 512 GiB; one that is killed with its
//! host is not recovered, like the store itself. The checksum finds accidents, not forgery. Memory
//! of a memfd can be swapped out: a server of swap runs under `mlockall` (its mapping is made so
//! that this does not fill the holes) in a cgroup without swap, the supervisor too. The file's
//! memory is charged to the cgroup of whoever touched it first.
//!
//! # Proof
//!
//! `tests/oracle.rs`: operation lists, takeovers among them, against a map. `tests/concurrent.rs`:
//! several threads' lists at once. `tests/loom.rs` with `scripts/loom`: slots and slabs in every
//! interleaving, and again with each ordering made weaker. `src/crash_tests.rs`: killed at every
//! step; `tests/kill.rs`: killed under load. `tests/writeback.rs`: real, full, failing and foreign
//! backing devices. `tests/attach.rs`: refusals and damage; fuzz targets `store_ops`,
//! `store_attach`.
#![cfg_attr(loom, expect(dead_code, unreachable_pub, reason = "the models use a part"))]

#[cfg(not(loom))]
mod account;
#[cfg(not(loom))]
mod ahead;
#[cfg(not(loom))]
mod available;
#[cfg(not(loom))]
mod backing;
#[cfg(not(loom))]
mod backing_device;
#[cfg(not(loom))]
mod backing_header;
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
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod group;
#[cfg(not(loom))]
mod groups;
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
mod page;
mod record;
#[cfg(not(loom))]
mod recover;
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
    ahead::Ahead,
    backing::format_backing,
    backing_device::{BackingStats, Stopped},
    backing_header::BackingError,
    check::Checked,
    compact::Compacted,
    dictionary::{stored_len, DictionaryError, Installed, MAX_DICTIONARY},
    disk::{Block, Disk, DiskError, FileDisk},
    error::{max_pages, StoreError},
    group::{GroupBuffer, GroupError, Grouped, Seen, MAX_GAP, MAX_PAYLOAD},
    keeper::Keeper,
    layout::DICTIONARIES,
    modify::{Change, ModifyError},
    object::{dictionary_of, DICTIONARY_TAG},
    page::{GetError, Page, PutError},
    slot::{MAX_AGE, MAX_MEMBERS, MAX_OBJECT, TAGS},
    stats::Stats,
    store::{Options, Store, MAX_WORKERS},
    superblock::Foreign,
    worker::Worker,
    writeback::{Added, BackBuffer, Batch, WriteBackError, WrittenBack, WHOLE_TAG},
};

#[cfg(loom)]
pub use {
    blocks::Blocks,
    record::{Record, PIECES},
    slab::{Freed, Role, Slab},
    slot::{Backed, Member, Object, Slot, State, Word},
    sync::{fence_read, fence_write, Site},
};
