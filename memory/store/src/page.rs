//! The stored form of a page, and errors of storing and reading it.

use crate::entry::{MAX_OBJECT, TAGS};

/// The stored form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Nothing is stored: the page reads as zeros.
    Absent,
    /// The page repeats this 64-bit value.
    Same(u64),
    /// The page is an object.
    Object {
        /// The caller's tag.
        tag: u8,
        /// The object's bytes.
        len: usize,
    },
    /// The page is in a group: [`Worker::get_group`](crate::Worker::get_group) reads it.
    Grouped,
    /// The page is on the backing device: [`Worker::read_back`](crate::Worker::read_back) reads it,
    /// and waits for the device.
    Backed,
}

/// Why nothing was stored. The page's old data is still there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PutError {
    /// The limit is reached or the kernel has no memory: ENOSPC.
    #[error("no room for {len} bytes of page {index}")]
    Full {
        /// The page.
        index: u64,
        /// Bytes of the object.
        len: usize,
    },
    /// There is no such page.
    #[error("page {index} of a store of {pages} pages")]
    Index {
        /// The page.
        index: u64,
        /// Pages of the store.
        pages: u64,
    },
    /// The object has no bytes or more than 4096, or its tag is too large.
    #[error("object of {len} bytes with tag {tag}, expected 1 to {MAX_OBJECT} bytes, a tag below {TAGS}")]
    Object {
        /// The object's length, bytes.
        len: usize,
        /// The object's tag.
        tag: u8,
    },
}

/// Why a page cannot be read (EIO). Other pages are not affected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// There is no such page.
    #[error("page {index} of a store of {pages} pages")]
    Index {
        /// The page.
        index: u64,
        /// Pages of the store.
        pages: u64,
    },
    /// The object's bytes are not those that were stored.
    #[error(
        "page {index}: object of {len} bytes has checksum {got:08x}, stored with {expected:08x}"
    )]
    Checksum {
        /// The page.
        index: u64,
        /// Bytes of its object.
        len: usize,
        /// The checksum with which the object was stored.
        expected: u32,
        /// The checksum of its bytes now.
        got: u32,
    },
    /// The page is on the backing device, and this server has none.
    #[error("page {index} is on a backing device that is not there")]
    NoBacking {
        /// The page.
        index: u64,
    },
    /// The read of the page's block failed.
    #[error("page {index}: cannot read block {block} of the backing device: {source}", source = crate::disk::name_of(*.errno))]
    Backing {
        /// The page.
        index: u64,
        /// The block.
        block: u32,
        /// The kernel's errno; 0 if the device ends before the block.
        errno: i32,
    },
    /// The page's block has other bytes than were written.
    #[error(
        "page {index}: block {block} of the backing device has an object with checksum {got:08x}, stored with {expected:08x}"
    )]
    BackedChecksum {
        /// The page.
        index: u64,
        /// The block.
        block: u32,
        /// The checksum with which the object was stored.
        expected: u32,
        /// The checksum of its bytes now; 0 if the block has no object of this page.
        got: u32,
    },
    /// The page's entry is damaged.
    #[error("page {index}: its entry in the slot table is damaged")]
    Lost {
        /// The page.
        index: u64,
    },
}
