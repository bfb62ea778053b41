//! Dictionaries in the file: at most [`DICTIONARIES`], never removed.
//!
//! ```text
//!  place: 4 pages, sparse  | checksum (4) | 0 (4) | len (8) | gain (8) | generation (8) | bytes |
//! ```
//!
//! The store does not compress, and a dictionary is bytes to it. The store has them because objects
//! cannot be decompressed without them. The lower four bits of an object's tag name its dictionary:
//! [`DICTIONARY_TAG`](crate::DICTIONARY_TAG) plus the place. Places are taken in order and never
//! reused, so no user of a dictionary (a thread about to store an object, an object on the backing
//! device) has to be tracked.
//!
//! A dictionary is written, then counted in the superblock, then named by objects. If a server is
//! killed before the count, the next one frees the memory. A counted place is never written again,
//! even if it is damaged: with other bytes there, objects would decompress to wrong pages.

use std::any::Any;
use std::sync::{Arc, PoisonError};

use crate::class::{fitting, SUM, TABLE, WHOLE};
use crate::inject;
use crate::layout::{DICTIONARIES, PAGE, PLACE_PAGES};
use crate::store::Store;
use crate::superblock;

/// A gap of 4 bytes lies between the checksum and the body, which begins with three 64-bit fields.
const HEADER: usize = 24;
const BODY: usize = PLACE_PAGES * PAGE - 2 * SUM;

/// The most bytes of a dictionary.
pub const MAX_DICTIONARY: usize = BODY - HEADER;

/// A dictionary of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Bytes.
    pub len: usize,
    /// Its maker's rating, of no meaning to the store.
    pub gain: u64,
    /// The number of the server that installed it.
    pub generation: u64,
}

/// Why a dictionary could not be installed or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DictionaryError {
    /// All places are taken.
    #[error("the store has {DICTIONARIES} dictionaries, and no place for another")]
    Full,
    /// There is no memory: the limit is reached, or the kernel has none.
    #[error("no memory for a dictionary")]
    Memory,
    /// The dictionary is empty, or longer than its place.
    #[error("dictionary of {0} bytes, expected 1 to {MAX_DICTIONARY}")]
    Length(usize),
    /// There is no such dictionary.
    #[error("the store has no dictionary {0}")]
    None(usize),
    /// The dictionary's bytes are not those that were installed.
    #[error("dictionary {place} has checksum {got:08x}, installed with {expected:08x}")]
    Damaged {
        /// The dictionary's place.
        place: usize,
        /// The checksum with which it was installed.
        expected: u32,
        /// The checksum of its bytes now.
        got: u32,
    },
}

/// Bytes of memory that an object of `len` bytes (1 to 4096) takes in its slab, with its checksum.
pub fn stored_len(len: usize) -> usize {
    let class = fitting(len.clamp(1, PAGE));
    TABLE[class].bytes as usize + if class == WHOLE { SUM } else { 0 }
}

impl Store {
    /// The number of installed dictionaries, damaged ones included.
    pub fn dictionaries(&self) -> usize {
        superblock::dictionaries(self.heap.map.superblock())
    }

    /// Installs a dictionary, which is never removed, and returns its place.
    ///
    /// # Errors
    ///
    /// [`DictionaryError`]; then nothing has changed.
    pub fn install_dictionary(&self, bytes: &[u8], gain: u64) -> Result<usize, DictionaryError> {
        if !(1..=MAX_DICTIONARY).contains(&bytes.len()) {
            return Err(DictionaryError::Length(bytes.len()));
        }
        let _alone = self.installing.lock().unwrap_or_else(PoisonError::into_inner);
        let map = &self.heap.map;
        let place = self.dictionaries();
        if place >= DICTIONARIES {
            return Err(DictionaryError::Full);
        }
        self.heap.regions.grow_dictionary(map, place).map_err(|_| DictionaryError::Memory)?;
        inject::step();
        let mut body = [0; BODY];
        for (at, word) in [bytes.len() as u64, gain, self.generation()].into_iter().enumerate() {
            body[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        body[HEADER..][..bytes.len()].copy_from_slice(bytes);
        let used = HEADER + bytes.len();
        map.write(parts(map.layout().dictionary(place)), sum(place, &body[..used]), &body[..used]);
        inject::step();
        superblock::set_dictionaries(map.superblock(), place + 1);
        inject::step();
        Ok(place)
    }

    /// Copies a dictionary to the start of `out`, and verifies its checksum.
    ///
    /// # Errors
    ///
    /// [`DictionaryError::None`] and [`DictionaryError::Damaged`].
    pub fn dictionary(
        &self,
        place: usize,
        out: &mut [u8; MAX_DICTIONARY],
    ) -> Result<Installed, DictionaryError> {
        if place >= self.dictionaries() {
            return Err(DictionaryError::None(place));
        }
        let map = &self.heap.map;
        let mut body = [0; BODY];
        // A taken place is never written.
        let expected = map.read(parts(map.layout().dictionary(place)), &mut body);
        let word =
            |at: usize| body[at * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let len = usize::try_from(word(0)).unwrap_or(usize::MAX);
        let bytes = body.get(..HEADER.saturating_add(len)).unwrap_or(&body);
        let got = sum(place, bytes);
        if got != expected || !(1..=MAX_DICTIONARY).contains(&len) {
            return Err(DictionaryError::Damaged { place, expected, got });
        }
        out[..len].copy_from_slice(&body[HEADER..][..len]);
        Ok(Installed { len, gain: word(1), generation: word(2) })
    }

    /// Pages in memory whose objects were made with each dictionary.
    pub fn dictionary_pages(&self) -> [u64; DICTIONARIES] {
        std::array::from_fn(|place| crate::stats::sum(&self.counters, |c| &c.dictionary[place]))
    }

    /// Objects that were overwritten, discarded or replaced since this server took the store.
    pub fn objects_freed(&self) -> u64 {
        crate::stats::sum(&self.counters, |c| &c.freed)
    }

    /// A value that all users of the store share and that lives as long as the store; the first
    /// call makes it. `None` if there is a value of another type. The store does not use it.
    pub fn beside<T: Any + Send + Sync>(&self, make: impl FnOnce() -> Arc<T>) -> Option<Arc<T>> {
        let shared = self.beside.get_or_init(|| make());
        Arc::clone(shared).downcast().ok()
    }
}

/// Where a place's checksum and its body lie.
fn parts(at: usize) -> (usize, usize) {
    (at, at + 2 * SUM)
}

fn sum(place: usize, body: &[u8]) -> u32 {
    let seed = u32::try_from(place).unwrap_or(u32::MAX) ^ 0x6463_7470;
    crc32c::crc32c_append(seed, body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::DICTIONARY_TAG;
    use crate::options::Options;
    use std::os::fd::AsFd;

    fn store() -> Arc<Store> {
        Store::create(100, Options { reserve: 0, ..Options::default() }).unwrap()
    }

    #[test]
    fn places_are_taken_in_order_and_outlive_their_server() {
        let _turn = crate::crash_tests::turn();
        let first = store();
        let mut out = [0; MAX_DICTIONARY];
        assert_eq!(first.dictionary(0, &mut out), Err(DictionaryError::None(0)));
        assert_eq!(first.install_dictionary(&[], 1), Err(DictionaryError::Length(0)));
        let longest = vec![7; MAX_DICTIONARY];
        let before = first.stats().mem_used_total;
        assert_eq!(first.install_dictionary(b"abc", 31), Ok(0));
        assert_eq!(first.install_dictionary(&longest, 32), Ok(1));
        assert_eq!(first.stats().mem_used_total, before + 8 * 4096);
        assert_eq!(first.stats().mem_used_total, first.resident().unwrap());
        let fd = first.fd().try_clone_to_owned().unwrap();
        drop(first);
        let second = Store::attach(fd.as_fd(), Options::default()).unwrap();
        assert_eq!(second.dictionaries(), 2);
        let found = second.dictionary(0, &mut out).unwrap();
        assert_eq!(
            (found, &out[..3]),
            (Installed { len: 3, gain: 31, generation: 1 }, &b"abc"[..])
        );
        assert_eq!(second.dictionary(1, &mut out).unwrap().len, MAX_DICTIONARY);
        assert_eq!(out[..], longest[..]);
        assert_eq!(second.install_dictionary(b"c", 0), Ok(2));
        assert_eq!(second.install_dictionary(b"d", 0), Ok(3));
        assert_eq!(second.install_dictionary(b"e", 0), Err(DictionaryError::Full));
        assert_eq!(second.stats().mem_used_total, second.resident().unwrap());
    }

    #[test]
    fn a_damaged_dictionary_is_reported_and_its_number_stays_reserved() {
        use std::os::unix::fs::FileExt;
        let _turn = crate::crash_tests::turn();
        let store = store();
        store.install_dictionary(&[5; 1000], 1).unwrap();
        let at = store.heap.map.layout().dictionary(0) as u64;
        let file = std::fs::File::from(store.fd().try_clone_to_owned().unwrap());
        drop(store);
        let mut out = [0; MAX_DICTIONARY];
        // Checksum, length, gain, bytes; then the superblock's count, in both of its halves.
        for (offset, place) in [(0, 0), (8, 0), (9, 0), (15, 0), (16, 0), (900, 0)] {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at + offset).unwrap();
            file.write_all_at(&[byte[0] ^ 0x40], at + offset).unwrap();
            let store = Store::attach(file.as_fd(), Options::default()).unwrap();
            let found = store.dictionary(place, &mut out);
            assert!(matches!(found, Err(DictionaryError::Damaged { place: 0, .. })), "{offset}");
            assert_eq!(store.dictionaries(), 1);
            file.write_all_at(&byte, at + offset).unwrap();
        }
        for offset in [13 * 8, 13 * 8 + 5] {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            file.write_all_at(&[byte[0] ^ 2], offset).unwrap();
            let store = Store::attach(file.as_fd(), Options::default()).unwrap();
            // Nothing more is installed where objects may name it; what is sound is read.
            assert_eq!(store.dictionaries(), DICTIONARIES);
            assert_eq!(store.dictionary(0, &mut out).unwrap().len, 1000);
            assert!(store.dictionary(1, &mut out).is_err());
            file.write_all_at(&byte, offset).unwrap();
        }
        // A word that is gone does not say that there is none.
        file.write_all_at(&[0; 8], 13 * 8).unwrap();
        let store = Store::attach(file.as_fd(), Options::default()).unwrap();
        assert_eq!(store.dictionaries(), DICTIONARIES);
        assert_eq!(store.dictionary(0, &mut out).unwrap().len, 1000);
    }

    #[test]
    fn an_entry_that_names_an_absent_dictionary_is_lost() {
        let _turn = crate::crash_tests::turn();
        let store = store();
        let mut worker = store.worker().unwrap();
        worker.put(1, DICTIONARY_TAG, b"abc").unwrap();
        worker.put(2, 4, b"abc").unwrap();
        assert_eq!(store.dictionary_pages(), [1, 0, 0, 0]);
        let fd = store.fd().try_clone_to_owned().unwrap();
        drop((worker, store));
        let store = Store::attach(fd.as_fd(), Options::default()).unwrap();
        assert_eq!((store.lost_pages(), store.dictionary_pages()), (1, [0; 4]));
        assert!(store.worker().unwrap().get(1, &mut [0; 4096]).is_err());
    }

    #[test]
    fn a_lack_of_memory_is_an_error_and_uses_no_memory() {
        let least = Store::create(100, Options { reserve: 0, ..Options::default() }).unwrap();
        let used = least.stats().mem_used_total;
        least.set_mem_limit(used + 3 * 4096);
        assert_eq!(least.install_dictionary(b"abc", 1), Err(DictionaryError::Memory));
        assert_eq!((least.stats().mem_used_total, least.dictionaries()), (used, 0));
    }
}
