//! The superblock, the first page of the file: identity, version and sizes.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::class::fingerprint;
use crate::layout::{Layout, DICTIONARIES, PAGE};
use crate::sync::{AtomicU64, Ordering};

/// "platenST", little endian.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"platenST");

/// Increases with any change that another version would misread.
pub(crate) const VERSION: u64 = 6;

/// The oldest version that is read. Its stores have no room to grow: their fixed fields have the
/// number of pages where later ones have the capacity.
const OLDEST: u64 = 5;

/// 64-bit fields that never change after creation; their checksum follows them.
const FIXED: usize = 8;
/// Number of servers that the file has had.
const GENERATION: usize = 9;

/// Pages of group records that have memory, or are about to get it.
const RECORD_PAGES: usize = 10;

/// A day, and the number of blocks written to the backing device on it.
const DAY: usize = 11;
const WRITTEN: usize = 12;

/// The number of installed dictionaries, with its complement in the upper half: also for 0, so that
/// a lost value does not pass for 0.
const DICTIONARIES_AT: usize = 13;

/// The number of pages, with its complement in the upper half. A store of version 5 has none.
const PAGES_AT: usize = 14;

/// Runs of blocks of the backing device that are being written, or were when a server was killed:
/// first block, and length in the upper half; 0 for none. Each server uses the first free field.
const RUNS: Range<usize> = 16..272;

/// The longest run; a longer one in the file is damage.
pub(crate) const MAX_RUN: u32 = 1 << 16;

/// Writes a new superblock, the magic number last, so that an interrupted creation is recognized.
pub(crate) fn write(words: &[AtomicU64], layout: &Layout) {
    let fixed = fixed(layout, RandomState::new().build_hasher().finish());
    for (word, value) in words.iter().zip(fixed).skip(1) {
        word.store(value, Ordering::Relaxed);
    }
    words[FIXED].store(sum(&fixed), Ordering::Relaxed);
    words[GENERATION].store(1, Ordering::Relaxed);
    set_dictionaries(words, 0);
    set_pages(words, layout.pages);
    words[0].store(MAGIC, Ordering::Release);
}

/// Writes a superblock of format version 5, for tests of stores made by an earlier program.
#[cfg(test)]
pub(crate) fn write_version_5(words: &[AtomicU64], layout: &Layout) {
    write(words, layout);
    let mut fixed = fixed(layout, 5);
    (fixed[1], fixed[3]) = (OLDEST, layout.pages);
    for (word, value) in words.iter().zip(fixed) {
        word.store(value, Ordering::Relaxed);
    }
    words[FIXED].store(sum(&fixed), Ordering::Relaxed);
    words[PAGES_AT].store(0, Ordering::Relaxed);
}

/// Reads a superblock in a file of `file_len` bytes.
pub(crate) fn read(page: &[u8], file_len: u64) -> Result<Layout, Foreign> {
    let word = |at: usize| {
        page.get(at * 8..at * 8 + 8)
            .and_then(|bytes| bytes.try_into().ok())
            .map_or(0, u64::from_le_bytes)
    };
    if word(0) != MAGIC {
        return Err(Foreign::Magic { got: word(0) });
    }
    let version = word(1);
    if !(OLDEST..=VERSION).contains(&version) {
        return Err(Foreign::Version { got: version, oldest: OLDEST, expected: VERSION });
    }
    let got: [u64; FIXED] = std::array::from_fn(word);
    if sum(&got) != word(FIXED) {
        return Err(Foreign::Checksum { got: word(FIXED), expected: sum(&got) });
    }
    let capacity = word(3);
    let pages = match version {
        OLDEST => capacity,
        _ => once(word(PAGES_AT)).unwrap_or(0),
    };
    let layout = Layout::with_room(pages, capacity).ok_or(Foreign::Pages { pages, capacity })?;
    let expected = fixed(&layout, word(7));
    for (at, name) in [(2, "page size"), (4, "regions"), (5, "start of regions"), (6, "classes")] {
        if got[at] != expected[at] {
            return Err(Foreign::Geometry { name, got: got[at], expected: expected[at] });
        }
    }
    if file_len != layout.len as u64 {
        return Err(Foreign::Length { got: file_len, expected: layout.len as u64 });
    }
    Ok(layout)
}

/// Counts one more server, and returns its number.
pub(crate) fn next_generation(words: &[AtomicU64]) -> u64 {
    words[GENERATION].fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}

/// The number of the file's current server, and the file's random id.
pub(crate) fn identity(words: &[AtomicU64]) -> (u64, u64) {
    (words[GENERATION].load(Ordering::Relaxed), words[7].load(Ordering::Relaxed))
}

/// Pages of group records that have memory, at most as many as the layout has.
pub(crate) fn record_pages(words: &[AtomicU64], layout: &Layout) -> u64 {
    words[RECORD_PAGES].load(Ordering::Relaxed).min(layout.record_pages())
}

/// Changes the number of [`record_pages`]: before pages get memory, and after their memory is
/// freed.
pub(crate) fn set_record_pages(words: &[AtomicU64], pages: u64) {
    words[RECORD_PAGES].store(pages, Ordering::Relaxed);
}

/// The number of installed dictionaries. If the field is damaged, the most there can be: then no
/// place is taken to be free.
pub(crate) fn dictionaries(words: &[AtomicU64]) -> usize {
    let count = once(words[DICTIONARIES_AT].load(Ordering::Acquire));
    let count = count.and_then(|count| usize::try_from(count).ok());
    count.filter(|&count| count <= DICTIONARIES).unwrap_or(DICTIONARIES)
}

/// Sets the number of dictionaries, after the last one is completely written.
pub(crate) fn set_dictionaries(words: &[AtomicU64], count: usize) {
    words[DICTIONARIES_AT].store(twice(count as u64), Ordering::Release);
}

/// Sets the number of pages, after the table has memory for them.
pub(crate) fn set_pages(words: &[AtomicU64], pages: u64) {
    words[PAGES_AT].store(twice(pages), Ordering::Release);
}

/// A number below 2^32 with its complement in the upper half.
fn twice(number: u64) -> u64 {
    debug_assert!(number < 1 << 32);
    number | (!number & 0xffff_ffff) << 32
}

/// The number in a word of [`twice`]; `None` if the word is damaged.
fn once(word: u64) -> Option<u64> {
    let number = word & 0xffff_ffff;
    (word == twice(number)).then_some(number)
}

/// Blocks written to the backing device on `day`, by any server. The clock may be set back and
/// forth: going back a day, the count of the later day still applies, so that it brings no new
/// budget; a day after the recorded one starts at 0. If the recorded day is further ahead, the
/// clock was wrong and the count starts anew: otherwise there would be no budget until that day.
pub(crate) fn written(words: &[AtomicU64], day: u64) -> u64 {
    let last = words[DAY].load(Ordering::Relaxed);
    if last == day || last == day.saturating_add(1) {
        words[WRITTEN].load(Ordering::Relaxed)
    } else {
        0
    }
}

/// Adds to the number of [`written`] blocks. One thread at a time may call it.
pub(crate) fn add_written(words: &[AtomicU64], day: u64, blocks: u64) {
    let sum = written(words, day).saturating_add(blocks);
    // A server killed between the two stores leaves a count of 0 for today, or one that is too
    // high.
    words[WRITTEN].store(sum, Ordering::Relaxed);
    if words[DAY].load(Ordering::Relaxed) != day.saturating_add(1) {
        words[DAY].store(day, Ordering::Relaxed);
    }
}

/// Days since 1970 (UTC).
pub(crate) fn today() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400)
}

/// Records that these blocks (at most [`MAX_RUN`]) are about to be written. Returns the field for
/// [`clear_run`]. One thread at a time may call it.
///
/// # Errors
///
/// All fields are in use, each by a server that was killed while it wrote. The error is their
/// number.
pub(crate) fn note_run(words: &[AtomicU64], run: &Range<u32>) -> Result<usize, u32> {
    debug_assert!(run.start > 0 && !run.is_empty() && run.end - run.start <= MAX_RUN);
    let free = RUNS.into_iter().find(|&at| words[at].load(Ordering::Relaxed) == 0);
    let at = free.ok_or(u32::try_from(RUNS.len()).expect("a few hundred"))?;
    words[at].store(u64::from(run.start) | u64::from(run.end - run.start) << 32, Ordering::Release);
    Ok(at)
}

/// Clears the record of a run: the kernel has completed or failed the write.
pub(crate) fn clear_run(words: &[AtomicU64], at: usize) {
    words[at].store(0, Ordering::Release);
}

/// The recorded runs. At takeover: the blocks that the kernel may still write on behalf of killed
/// servers.
pub(crate) fn noted_runs(words: &[AtomicU64]) -> impl Iterator<Item = Range<u32>> + '_ {
    let noted = words[RUNS].iter().map(|word| word.load(Ordering::Relaxed));
    noted.filter_map(|word| {
        let [first, len] = [word & 0xffff_ffff, word >> 32];
        let first = u32::try_from(first).expect("32 bits");
        let len = u32::try_from(len).ok().filter(|&len| len <= MAX_RUN)?;
        Some(first..first.checked_add(len)?)
    })
}

fn fixed(layout: &Layout, id: u64) -> [u64; FIXED] {
    [
        MAGIC,
        VERSION,
        PAGE as u64,
        layout.capacity,
        layout.most_regions(),
        layout.regions_at as u64,
        fingerprint(),
        id,
    ]
}

fn sum(words: &[u64; FIXED]) -> u64 {
    words.iter().fold(0, |sum, word| {
        u64::from(crc32c::crc32c_append(u32::try_from(sum).unwrap_or(0), &word.to_le_bytes()))
    })
}

/// Why a file is not a store that this version can serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Foreign {
    /// The file is no store, or its creation was interrupted.
    #[error("not a store: its first word is {got:016x}")]
    Magic {
        /// The value found.
        got: u64,
    },
    /// Another version made the store.
    #[error("store of format version {got}, this program serves versions {oldest} to {expected}")]
    Version {
        /// The version found.
        got: u64,
        /// The oldest version served.
        oldest: u64,
        /// This version.
        expected: u64,
    },
    /// The superblock is damaged.
    #[error("superblock checksum is {got:08x}, its bytes have {expected:08x}")]
    Checksum {
        /// The checksum in the superblock.
        got: u64,
        /// The checksum of its fields.
        expected: u64,
    },
    /// The number of pages is impossible.
    #[error("store of {pages} pages with room for {capacity} is none that can be served")]
    Pages {
        /// The number; 0 if it is damaged.
        pages: u64,
        /// The most pages that the store has room for.
        capacity: u64,
    },
    /// The store has another geometry.
    #[error("store with {name} {got}, this program has {expected}")]
    Geometry {
        /// The size that differs.
        name: &'static str,
        /// The size's value.
        got: u64,
        /// This version's value.
        expected: u64,
    },
    /// The file's length is not what its superblock says.
    #[error("store file of {got} bytes, its superblock says {expected}")]
    Length {
        /// Bytes of the file.
        got: u64,
        /// Bytes that it should have.
        expected: u64,
    },
    /// The file could be truncated, which would kill the server that maps it.
    #[error("store file is not sealed against shrinking")]
    Unsealed,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_set_back_and_forth_brings_no_new_budget() {
        let words: Vec<AtomicU64> = (0..=WRITTEN).map(|_| AtomicU64::new(0)).collect();
        add_written(&words, 20_000, 5);
        add_written(&words, 20_000, 2);
        assert_eq!(written(&words, 20_000), 7);
        // A day back, where one may write what is left of the budget, and forth again.
        assert_eq!(written(&words, 19_999), 7);
        add_written(&words, 19_999, 1);
        assert_eq!((written(&words, 19_999), written(&words, 20_000)), (8, 8));
        assert_eq!(written(&words, 20_001), 0);
        add_written(&words, 20_001, 3);
        assert_eq!((written(&words, 20_001), written(&words, 20_000)), (3, 3));
        // It was years ahead, and is put right.
        add_written(&words, 24_000, 9);
        assert_eq!(written(&words, 20_001), 0);
        add_written(&words, 20_001, 1);
        assert_eq!((written(&words, 20_001), written(&words, 20_002)), (1, 0));
    }
}
