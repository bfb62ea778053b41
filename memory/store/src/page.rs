//! What is stored for a page, and why it could not be stored or read.

use crate::slot::{MAX_OBJECT, TAGS};

/// What is stored for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Nothing: it reads as zeros.
    Absent,
    /// This word, over and over.
    Same(u64),
    /// An object.
    Object {
        /// What the caller said of it.
        tag: u8,
        /// Its bytes.
        len: usize,
    },
    /// A part of a group: [`Worker::get_group`] has its bytes.
    Grouped,
    /// On the backing device: [`Worker::read_back`] has its bytes, and waits for them.
    Backed,
}

/// Why nothing was stored. What was there before still is.
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
        /// Pages there are.
        pages: u64,
    },
    /// An object of no bytes or more than a page has, or a tag that is too large.
    #[error("object of {len} bytes with tag {tag}, expected 1 to {MAX_OBJECT} bytes, a tag below {TAGS}")]
    Object {
        /// Its length.
        len: usize,
        /// Its tag.
        tag: u8,
    },
}

/// Why a page cannot be read. Only this one: EIO.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// There is no such page.
    #[error("page {index} of a store of {pages} pages")]
    Index {
        /// The page.
        index: u64,
        /// Pages there are.
        pages: u64,
    },
    /// The bytes are not those that were stored.
    #[error(
        "page {index}: object of {len} bytes has checksum {got:08x}, stored with {expected:08x}"
    )]
    Checksum {
        /// The page.
        index: u64,
        /// Bytes of its object.
        len: usize,
        /// The checksum it was stored with.
        expected: u32,
        /// The one its bytes have.
        got: u32,
    },
    /// It is on the backing device, and this server has none.
    #[error("page {index} is on a backing device that is not there")]
    NoBacking {
        /// The page.
        index: u64,
    },
    /// The backing device did not give its block.
    #[error("page {index}: cannot read block {block} of the backing device: {source}", source = crate::disk::name_of(*.errno))]
    Backing {
        /// The page.
        index: u64,
        /// The block.
        block: u32,
        /// The kernel's number; 0 for a device that ends before the block.
        errno: i32,
    },
    /// The block on the backing device is not the one that was written.
    #[error(
        "page {index}: block {block} of the backing device has an object with checksum {got:08x}, stored with {expected:08x}"
    )]
    BackedChecksum {
        /// The page.
        index: u64,
        /// The block.
        block: u32,
        /// The checksum it was stored with.
        expected: u32,
        /// The one its bytes have; 0 if the block has no object of this page.
        got: u32,
    },
    /// Its entry is not one that was ever written.
    #[error("page {index}: its entry in the slot table is damaged")]
    Lost {
        /// The page.
        index: u64,
    },
}
