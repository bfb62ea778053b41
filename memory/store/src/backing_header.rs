//! The first block of a backing device, which identifies the device's owner, and the checks of a
//! device that is to become one.

use std::io;
use std::ops::Range;

use rustix::io::Errno;

use crate::disk::{Block, Disk};
use crate::entry::MAX_BLOCKS;
use crate::layout::PAGE;

/// "platenBK", little endian.
const MAGIC: u64 = u64::from_le_bytes(*b"platenBK");

/// Increases with any change that another version would misread.
const VERSION: u64 = 1;

/// 64-bit fields of the header before its checksum.
const WORDS: usize = 6;

/// Blocks checked for zeros at each end of a device that is not ours yet: the first ones (partition
/// tables, file systems, swap, LVM, arrays, btrfs at 64 KiB), and the last ones (the second copy of
/// a GPT, old kinds of arrays).
const EMPTY: u32 = 32;

/// 1 MiB, where the first partition and LVM's first volume usually begin: catches a device whose
/// first blocks were wiped.
const FIRST_PARTITION: u32 = 256;

/// Where btrfs has its second superblock, 64 MiB.
const SECOND_COPY: u32 = 16_384;

/// Why a backing device cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// The device has other data on it.
    #[error("{name} is no backing device and not empty: its block {block} has data; wipe it to give it to platen, all of it or with zeros wherever something begins")]
    Foreign {
        /// The device.
        name: String,
        /// The first block that is not zero.
        block: u32,
    },
    /// The file has data in it.
    #[error("{name} is no backing device and not empty: a file with data in it; name another one, or delete it")]
    ForeignFile {
        /// The file.
        name: String,
    },
    /// The device is no backing device, or was overwritten before this store's server was replaced.
    #[error("{name} is no backing device: its first word is {got:016x}")]
    Magic {
        /// The device.
        name: String,
        /// The value found.
        got: u64,
    },
    /// The device is of another version.
    #[error("{name}: backing device of format version {got}, this program has {VERSION}")]
    Version {
        /// The device.
        name: String,
        /// The version found.
        got: u64,
    },
    /// The device's header is damaged.
    #[error("{name}: checksum of its header is {got:08x}, its bytes have {expected:08x}")]
    Checksum {
        /// The device.
        name: String,
        /// The checksum in the header.
        got: u64,
        /// The checksum of the header's fields.
        expected: u64,
    },
    /// A field of the header has an impossible value.
    #[error("{name}: its header says {what} {got}, expected {expected}")]
    Header {
        /// The device.
        name: String,
        /// The field.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The required value, or the largest valid one.
        expected: u64,
    },
    /// The device belongs to another store.
    #[error("{name} belongs to the store {got:016x}, this one is {expected:016x}")]
    Store {
        /// The device.
        name: String,
        /// The store id in the header.
        got: u64,
        /// This store's id.
        expected: u64,
    },
    /// A later server than this one has used the device.
    #[error("{name} was last used by server {got} of its store, this is server {most}")]
    Generation {
        /// The device.
        name: String,
        /// The server number in the header.
        got: u64,
        /// This server's number.
        most: u64,
    },
    /// The device is shorter than its header says.
    #[error("{name} has {have} blocks of {PAGE} bytes, its header says {need}")]
    Truncated {
        /// The device.
        name: String,
        /// Blocks of the device.
        have: u64,
        /// Blocks that the header states.
        need: u64,
    },
    /// The device has no room for a page.
    #[error("{name} has {have} blocks of {PAGE} bytes, a header and one page need 2")]
    Small {
        /// The device.
        name: String,
        /// Blocks of the device.
        have: u64,
    },
    /// The store has workers already, or a backing device.
    #[error("{name}: a store takes its backing device before it has workers, and one only")]
    Late {
        /// The device.
        name: String,
    },
    /// The kernel refused.
    #[error("cannot {action} {name}")]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The device.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Whether a block is a header of this program with zeros behind it. A later owner of the device
/// may have left it there: see [`look_for_new_owners`].
pub(crate) fn was_ours(block: &Block) -> bool {
    let words = words(block);
    let rest = &block.0[(WORDS + 1) * 8..];
    words[0] == MAGIC && words[WORDS] == sum(&words[..WORDS]) && rest.iter().all(|&byte| byte == 0)
}

/// Signatures of formats that leave a device's first 4096 bytes unchanged: block, byte, signature.
/// Behind an intact header of a backing device, such a signature means that the disk has another
/// owner now.
const NEW_OWNERS: [(u32, usize, &[u8]); 3] = [
    // Linux's md, metadata 1.2: its magic number.
    (1, 0, &0xa92b_4efc_u32.to_le_bytes()),
    // bcachefs and bcache: their UUIDs.
    (1, 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    (1, 24, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
];

/// ZFS's uberblocks: in the second 128 KiB of a label, 1024 bytes apart or more.
const UBERBLOCKS: Range<u32> = 32..64;
const UBERBLOCK: u64 = 0x00ba_b10c;

/// Refuses a former backing device that has the signature of a later owner.
pub(crate) fn look_for_new_owners(disk: &dyn Disk, name: &str) -> Result<(), BackingError> {
    let have = blocks(disk, name)?;
    let mut block = Block::ZERO;
    for at in [1].into_iter().chain(UBERBLOCKS).filter(|&at| at < have) {
        disk.read(at, &mut block).map_err(io_error("read", name))?;
        let marked = NEW_OWNERS
            .iter()
            .any(|&(of, byte, mark)| of == at && block.0[byte..].starts_with(mark));
        let words = block.0.chunks(1024).map(|part| part.first_chunk::<8>());
        let zfs = UBERBLOCKS.contains(&at)
            && words.flatten().any(|&word| {
                u64::from_le_bytes(word) == UBERBLOCK || u64::from_be_bytes(word) == UBERBLOCK
            });
        if marked || zfs {
            return Err(BackingError::Foreign { name: name.to_owned(), block: at });
        }
    }
    Ok(())
}

/// Refuses a block device that has data where signatures lie.
pub(crate) fn look_for_others(disk: &dyn Disk, name: &str) -> Result<(), BackingError> {
    // The size is not capped here: the end of the disk may lie beyond the blocks that entries can
    // name.
    let have = disk.blocks().map_err(io_error("find the size of", name))?;
    let have = u32::try_from(have).map_err(|_| {
        let error = io::Error::new(io::ErrorKind::Unsupported, "it has 16 TiB or more");
        io_error("examine the end of", name)(error)
    })?;
    let mut block = Block::ZERO;
    let first = 0..EMPTY;
    let partition = FIRST_PARTITION..FIRST_PARTITION + EMPTY;
    let last = have.saturating_sub(EMPTY)..have;
    for at in first.chain(partition).chain([SECOND_COPY]).chain(last).filter(|&at| at < have) {
        disk.read(at, &mut block).map_err(io_error("read", name))?;
        if block.0.iter().any(|&byte| byte != 0) {
            return Err(BackingError::Foreign { name: name.to_owned(), block: at });
        }
    }
    Ok(())
}

/// Blocks of a device, capped at what entries can name.
pub(crate) fn blocks(disk: &dyn Disk, name: &str) -> Result<u32, BackingError> {
    let have = disk.blocks().map_err(io_error("find the size of", name))?;
    if have < 2 {
        return Err(BackingError::Small { name: name.to_owned(), have });
    }
    Ok(u32::try_from(have).unwrap_or(MAX_BLOCKS).min(MAX_BLOCKS))
}

pub(crate) fn io_error<'a>(
    action: &'static str,
    name: &'a str,
) -> impl FnOnce(io::Error) -> BackingError + use<'a> {
    move |source| {
        // The text of `UnexpectedEof` does not help a user.
        let eof = source.kind() == io::ErrorKind::UnexpectedEof;
        let source = if eof { Errno::IO.into() } else { source };
        BackingError::Io { action, name: name.to_owned(), source }
    }
}

fn words(block: &Block) -> [u64; WORDS + 1] {
    let mut words = [0; WORDS + 1];
    for (word, bytes) in words.iter_mut().zip(block.0.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    words
}

pub(crate) fn header(blocks: u32, store: u64, generation: u64) -> Block {
    let words = [MAGIC, VERSION, PAGE as u64, u64::from(blocks), store, generation];
    let mut block = Block::ZERO;
    for (word, bytes) in words.iter().chain([&sum(&words)]).zip(block.0.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    block
}

fn sum(words: &[u64]) -> u64 {
    let sum = words.iter().fold(0, |sum, word| crc32c::crc32c_append(sum, &word.to_le_bytes()));
    u64::from(sum)
}

/// The number of blocks, the header included, if `block` is a header of store `id`.
pub(crate) fn check(
    block: &Block,
    name: &str,
    id: u64,
    generation: u64,
    have: u32,
) -> Result<u32, BackingError> {
    let name = || name.to_owned();
    let got = words(block);
    let [magic, version, size, blocks, store, last, stated] = got;
    if magic != MAGIC {
        return Err(BackingError::Magic { name: name(), got: magic });
    }
    if version != VERSION {
        return Err(BackingError::Version { name: name(), got: version });
    }
    let expected = sum(&got[..WORDS]);
    if stated != expected {
        return Err(BackingError::Checksum { name: name(), got: stated, expected });
    }
    let wrong = |what, got, expected| BackingError::Header { name: name(), what, got, expected };
    if size != PAGE as u64 {
        return Err(wrong("blocks of", size, PAGE as u64));
    }
    if store != id {
        return Err(BackingError::Store { name: name(), got: store, expected: id });
    }
    if last > generation {
        return Err(BackingError::Generation { name: name(), got: last, most: generation });
    }
    let count = u32::try_from(blocks).ok().filter(|count| (2..=MAX_BLOCKS).contains(count));
    let count = count.ok_or_else(|| wrong("blocks:", blocks, MAX_BLOCKS.into()))?;
    if have < count {
        return Err(BackingError::Truncated { name: name(), have: have.into(), need: blocks });
    }
    Ok(count)
}
