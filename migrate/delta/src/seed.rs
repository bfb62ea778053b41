//! The seed: pages that the destination has from another time, which need not cross the link.
//!
//! ```text
//!  destination:  SeedPages::offer ─► hashes ─► offer() ─► SEED frames
//!  source:       Known::learn ◄─ SEED frames     Known::find(page) ─► slot, for the table
//!  destination:  fill(): PageReader::read(slot) ─► the page in place of the zeros in the chunk
//! ```
//!
//! A page counts as known if its keyed SHA-256, cut to 16 bytes, is in an offer. A guest that does
//! not know the key cannot look for two pages with one hash. Whatever the seed holds, the hash over
//! the plain bytes (W12) is compared before a byte is written to QEMU.

use crate::table::Runs;
use crate::{Table, TableError};
use aws_lc_rs::digest::{Context, SHA256};
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

/// Keyed hash of a page; two pages with one hash are equal.
pub type PageHash = [u8; 16];
/// The key of the hashes.
pub type SeedKey = [u8; 32];

/// The most pages of a seed that a source remembers: 16 GiB of 4 KiB pages, in at most 200 MiB.
pub const MAX_SEED: u32 = 4 << 20;
/// The most hashes of one offer.
pub const MAX_OFFER: usize = 1000;
/// Bytes of an offer before its hashes: number of the first page, zeros, key.
const OFFER_HEAD: usize = 40;

/// The hash of a page: the first 16 bytes of SHA-256 over the key and the page.
pub fn page_hash(key: &SeedKey, page: &[u8]) -> PageHash {
    let mut context = Context::new(&SHA256);
    context.update(key);
    context.update(page);
    *context.finish().as_ref().first_chunk().expect("16 of 32 bytes")
}

/// A place that may hold pages. Each session opens it anew.
pub trait Seed: Debug + Send + Sync {
    /// Opens the pages of `page_size` bytes that are there now.
    ///
    /// # Errors
    /// A message for the user.
    fn open(&self, page_size: usize) -> Result<Arc<dyn SeedPages>, String>;
}

/// The pages of a seed, numbered from 0.
pub trait SeedPages: Debug + Send + Sync {
    /// The key of the hashes.
    fn key(&self) -> &SeedKey;
    /// One more than the number of the last page.
    fn pages(&self) -> u32;
    /// Passes the hashes of at most `most` undamaged pages to `give`, in runs: the number of the
    /// first page, and a hash for each page of the run. Ends when `give` returns false.
    fn offer(&self, most: u32, give: &mut dyn FnMut(u32, &[PageHash]) -> bool);
    /// A reader for one thread.
    fn reader(&self) -> Box<dyn PageReader>;
}

/// Reads the pages of a seed.
pub trait PageReader: Send {
    /// Reads page `number`, below [`SeedPages::pages`].
    ///
    /// # Errors
    /// A message for the user: the page is damaged, or cannot be read.
    fn read(&mut self, number: u32) -> Result<&[u8], String>;
}

/// The bytes of an offer of at most [`MAX_OFFER`] hashes, from page `first` on.
pub fn offer(first: u32, key: &SeedKey, hashes: &[PageHash]) -> Vec<u8> {
    let mut out = Vec::with_capacity(OFFER_HEAD + size_of_val(hashes));
    out.extend(first.to_be_bytes());
    out.extend([0; 4]);
    out.extend(key);
    out.extend(hashes.as_flattened());
    out
}

/// Why an offer is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// The offer has no whole number of hashes, or too many.
    #[error(
        "an offer of pages has {got} bytes, and not {OFFER_HEAD} and up to {MAX_OFFER} hashes"
    )]
    Length {
        /// Bytes of the offer.
        got: usize,
    },
    /// The pages of an offer have numbers beyond 32 bits.
    #[error("an offer of pages names {pages} pages from {first}")]
    Pages {
        /// Pages of the offer.
        pages: usize,
        /// The first one.
        first: u32,
    },
    /// The key differs from that of the first offer.
    #[error("an offer of pages has another key than the first one")]
    Key,
}

/// The pages that the destination has offered.
#[derive(Debug, Default)]
pub struct Known {
    key: Option<SeedKey>,
    pages: HashMap<PageHash, u32>,
    is_complete: bool,
}

impl Known {
    /// Adds the pages of an offer, up to [`MAX_SEED`] in all, and as far as there is memory. An
    /// offer without pages is the last one.
    ///
    /// # Errors
    /// The offer is invalid.
    pub fn learn(&mut self, offer: &[u8]) -> Result<(), OfferError> {
        let length = OfferError::Length { got: offer.len() };
        let (head, hashes) = offer.split_at_checked(OFFER_HEAD).ok_or(length)?;
        let (hashes, rest) = hashes.as_chunks::<{ size_of::<PageHash>() }>();
        if !rest.is_empty() || hashes.len() > MAX_OFFER {
            return Err(length);
        }
        let first = u32::from_be_bytes(*head.first_chunk().expect("as long as the head"));
        let key: SeedKey = head[8..].try_into().expect("32 of 40 bytes");
        let beyond = OfferError::Pages { pages: hashes.len(), first };
        let count = u32::try_from(hashes.len()).map_err(|_| beyond)?;
        first.checked_add(count).ok_or(beyond)?;
        if *self.key.get_or_insert(key) != key {
            return Err(OfferError::Key);
        }
        self.is_complete |= hashes.is_empty();
        let room = (MAX_SEED as usize).saturating_sub(self.pages.len()).min(hashes.len());
        if self.pages.try_reserve(room).is_ok() {
            self.pages.extend(hashes[..room].iter().copied().zip(first..));
        }
        Ok(())
    }

    /// Whether the last offer has come.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The number of pages with different contents.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// The number of the page in the seed.
    pub(crate) fn find(&self, page: &[u8]) -> Option<u32> {
        self.pages.get(&page_hash(self.key.as_ref()?, page)).copied()
    }
}

/// Why a chunk cannot be filled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FillError {
    /// The table is invalid.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A page of the seed cannot be read.
    #[error("page {number} of the seed cannot be read: {reason}")]
    Page {
        /// The page.
        number: u32,
        /// The reader's message.
        reason: String,
    },
}

/// Whether a table refers to the seed, whose slots begin at `base`; also of a table that is
/// invalid behind that.
pub fn refers_to_seed(table: Table<'_>, plain_len: usize, page_size: usize, base: u32) -> bool {
    let mut runs = Runs::new(table, plain_len, page_size);
    std::iter::from_fn(|| runs.next().ok().flatten()).any(|run| run.slot >= base)
}

/// Whether a table has slots below `base`, those of the cache; also of a table that is invalid
/// behind that.
pub fn refers_to_cache(table: Table<'_>, plain_len: usize, page_size: usize, base: u32) -> bool {
    let mut runs = Runs::new(table, plain_len, page_size);
    std::iter::from_fn(|| runs.next().ok().flatten()).any(|run| run.slot < base)
}

/// Puts the pages of a seed in place of those that the table of a chunk refers to: the slots from
/// `base` on are the pages of the seed, of which there are `pages`. Other runs of the table are
/// those of a [`Receiver`](crate::Receiver), which ignores these. Returns the number of pages.
///
/// # Errors
/// The table is invalid, or a page cannot be read. The contents of the chunk are then unspecified.
pub fn fill(
    plain: &mut [u8],
    table: Table<'_>,
    page_size: usize,
    (base, pages): (u32, u32),
    reader: &mut dyn PageReader,
) -> Result<u64, FillError> {
    let mut filled = 0;
    let mut runs = Runs::new(table, plain.len(), page_size);
    while let Some(run) = runs.next()? {
        if run.slot < base {
            continue;
        }
        run.check_seed((base, pages))?;
        let records = plain[run.bytes.clone()].chunks_mut(run.stride);
        for (record, number) in records.zip(run.slot - base..) {
            let page = reader.read(number).map_err(|reason| FillError::Page { number, reason })?;
            for (byte, of_seed) in record[..page_size].iter_mut().zip(page) {
                *byte ^= of_seed;
            }
            filled += 1;
        }
    }
    Ok(filled)
}
