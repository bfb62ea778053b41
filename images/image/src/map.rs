//! The place of the last version of each page, while an image is written.

use crate::extents::{join, Content, Extent};

/// A RAM block, as in QEMU's block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamBlock {
    /// QEMU's name for the block.
    pub name: String,
    /// Length in bytes.
    pub len: u64,
    /// Host page size of the block, bytes; 0 if the stream did not state it.
    pub host_page: u64,
}

/// Pages per chunk. A chunk is allocated when its first page is received.
const CHUNK: usize = 4096;

/// One entry for each page of a block; 0: never received.
#[derive(Debug)]
pub(crate) struct PageMap {
    pages: u64,
    chunks: Vec<Option<Box<[u64]>>>,
    /// Words of same-filled pages; an entry with [`WORD`] holds an index of them.
    words: Vec<[u8; 8]>,
    /// Number of words at which those of superseded pages are dropped.
    most_words: usize,
}

/// Least number of words at which those of superseded pages are dropped.
const LEAST_WORDS: usize = 1 << 16;

/// Flag of an entry that holds the number of a slot.
const SLOT: u64 = 1 << 63;
/// Flag of an entry that holds an index of `words`.
const WORD: u64 = 1 << 62;
/// Entry of a page that was received as zero.
const ZERO: u64 = 1;

impl PageMap {
    pub(crate) fn new(pages: u64) -> Self {
        let chunks = usize::try_from(pages.div_ceil(CHUNK as u64)).unwrap_or(usize::MAX);
        let words = Vec::new();
        Self { pages, chunks: vec![None; chunks], words, most_words: LEAST_WORDS }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Sets the content of `page`, which must lie in the block, and returns its previous content.
    pub(crate) fn set(&mut self, page: u64, content: Content) -> Content {
        let (chunk, at) = Self::place(page);
        let entry = match content {
            Content::Zero => ZERO,
            Content::Slot(slot) => SLOT | slot,
            Content::Filled(word) => {
                // Neighbouring pages mostly have the same word.
                if self.words.last() != Some(&word) {
                    if self.words.len() >= self.most_words {
                        self.drop_words();
                    }
                    self.words.push(word);
                }
                WORD | (self.words.len() as u64 - 1)
            }
        };
        let chunk = self.chunks[chunk].get_or_insert_with(|| vec![0; CHUNK].into());
        let before = std::mem::replace(&mut chunk[at], entry);
        self.content(before)
    }

    /// Drops the words that no page has. A page may be sent any number of times.
    fn drop_words(&mut self) {
        let mut kept: Vec<[u8; 8]> = Vec::new();
        for entry in self.chunks.iter_mut().flatten().flat_map(|chunk| chunk.iter_mut()) {
            if *entry & SLOT == 0 && *entry & WORD != 0 {
                let word = self.words[usize::try_from(*entry & !WORD).expect("an index")];
                if kept.last() != Some(&word) {
                    kept.push(word);
                }
                *entry = WORD | (kept.len() as u64 - 1);
            }
        }
        self.words = kept;
        // Twice as many, so that the search costs each page the same, however many there are.
        self.most_words = (2 * self.words.len()).max(LEAST_WORDS);
    }

    fn place(page: u64) -> (usize, usize) {
        let page = usize::try_from(page).expect("below the block's length, whose chunks fit");
        (page / CHUNK, page % CHUNK)
    }

    fn content(&self, entry: u64) -> Content {
        if entry & SLOT != 0 {
            Content::Slot(entry & !SLOT)
        } else if entry & WORD != 0 {
            let word = usize::try_from(entry & !WORD).expect("an index of `words`");
            Content::Filled(self.words[word])
        } else {
            Content::Zero
        }
    }

    /// The slots that pages have.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u64> + '_ {
        let entries = self.chunks.iter().flatten().flat_map(|chunk| chunk.iter());
        entries.filter(|&&entry| entry & SLOT != 0).map(|&entry| entry & !SLOT)
    }

    /// Number of pages that were never received.
    pub(crate) fn unsent(&self) -> u64 {
        let sent = |chunk: &[u64]| chunk.iter().filter(|&&entry| entry != 0).count() as u64;
        self.pages - self.chunks.iter().flatten().map(|chunk| sent(chunk)).sum::<u64>()
    }

    /// All pages as extents. `number` returns the final number of a slot.
    pub(crate) fn extents(&self, number: impl Fn(u64) -> u64) -> Vec<Extent> {
        let mut extents = Vec::new();
        let mut first = 0;
        for chunk in &self.chunks {
            let pages = (CHUNK as u64).min(self.pages - first);
            match chunk {
                None => join(&mut extents, first, pages, Content::Zero),
                Some(entries) => {
                    for (page, &entry) in (first..first + pages).zip(entries) {
                        let content = match self.content(entry) {
                            Content::Slot(slot) => Content::Slot(number(slot)),
                            other => other,
                        };
                        join(&mut extents, page, 1, content);
                    }
                }
            }
            first += pages;
        }
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_version_counts_and_what_was_never_sent_is_zero() {
        let mut map = PageMap::new(10_000);
        assert_eq!(map.set(9_999, Content::Slot(0)), Content::Zero);
        assert_eq!(map.set(9_999, Content::Filled([3; 8])), Content::Slot(0));
        assert_eq!(map.set(9_998, Content::Filled([3; 8])), Content::Zero);
        map.set(0, Content::Slot(1));
        map.set(0, Content::Zero);
        map.set(5_000, Content::Zero);
        assert_eq!(map.unsent(), 10_000 - 4);
        let extent = |first, pages, content| Extent { first, pages, content };
        assert_eq!(
            map.extents(|slot| slot),
            [extent(0, 9_998, Content::Zero), extent(9_998, 2, Content::Filled([3; 8]))]
        );
    }

    /// A live save may send a page any number of times.
    #[test]
    fn words_of_superseded_pages_take_no_memory() {
        let mut map = PageMap::new(10_000);
        let word = |nth: u64| (nth | 1 << 40).to_le_bytes();
        for nth in 0..1_000_000 {
            map.set(nth % 5_000, Content::Filled(word(nth)));
        }
        assert!(map.words.len() < 100_000, "{} words", map.words.len());
        for (nth, extent) in (995_000..1_000_000).zip(map.extents(|slot| slot)) {
            let page = nth % 5_000;
            let expected = Extent { first: page, pages: 1, content: Content::Filled(word(nth)) };
            assert_eq!(extent, expected);
        }
        assert_eq!(map.unsent(), 5_000);
    }
}
