//! A thread's access to the store: put, replace, discard; `reading.rs` has get.

mod reading;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::class::{fitting, CLASSES};
use crate::entry::{Object, Word, MAX_OBJECT, RARE, TAGS};
use crate::heap::{Claimed, Heap};
use crate::inject;
use crate::layout::PAGE;
use crate::object::{checksum, locate};
use crate::page::{GetError, Page, PutError};
use crate::regions::Full;
use crate::slab::NIL;
use crate::slot::Slot;
use crate::stats::{add, Counters};
use crate::store::{Store, MAX_WORKERS};
use crate::sync::Ordering;

impl Store {
    /// A worker for one thread; `None` if there are [`MAX_WORKERS`].
    pub fn worker(self: &Arc<Self>) -> Option<Worker> {
        Worker::new(self)
    }
}

/// One thread's access to a [`Store`]: its current slab of each class, and its counters.
///
/// [`put`](Self::put) and [`get`](Self::get) do not allocate, hold locks only for list operations,
/// and make no system call while a [`Keeper`](crate::Keeper) keeps up.
pub struct Worker {
    store: Arc<Store>,
    number: usize,
    current: Box<[u32; CLASSES]>,
}

impl Worker {
    pub(crate) fn new(store: &Arc<Store>) -> Option<Self> {
        let take = |taken: u64| {
            let number = taken.trailing_ones();
            (number < u64::BITS).then(|| taken | 1 << number)
        };
        let before = store.working.fetch_update(Ordering::AcqRel, Ordering::Relaxed, take).ok()?;
        store.heap.workers.fetch_add(1, Ordering::Relaxed);
        let number = before.trailing_ones() as usize;
        debug_assert!(number < MAX_WORKERS);
        Some(Self { store: Arc::clone(store), number, current: Box::new([NIL; CLASSES]) })
    }

    /// The store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Stores `bytes` (1 to [`MAX_OBJECT`]) as page `index`. `tag` (below [`TAGS`]) is returned
    /// with them; it can name the codec. An uncompressed page of 4096 bytes takes 4096 bytes of
    /// memory.
    ///
    /// A concurrent reader gets the old page or this one. After this returns, any server that takes
    /// the store over has this one.
    ///
    /// # Errors
    ///
    /// [`PutError::Full`] at the limit; [`PutError::Index`] and [`PutError::Object`] for bad
    /// arguments.
    pub fn put(&mut self, index: u64, tag: u8, bytes: &[u8]) -> Result<(), PutError> {
        if tag >= TAGS {
            return Err(PutError::Object { len: bytes.len(), tag });
        }
        self.put_object(index, tag, bytes)
    }

    /// Stores page `index` as a repeated 64-bit value: in its entry if the value fits, which takes
    /// no memory, and else in an object of 64 bytes. Values that fit have equal upper five bits
    /// (zero, all ones, small numbers, addresses), equal halves, or lower four bits of zero (round
    /// floating-point numbers).
    ///
    /// # Errors
    ///
    /// [`PutError::Index`]; [`PutError::Full`] only for a value that does not fit.
    pub fn put_same(&mut self, index: u64, word: u64) -> Result<(), PutError> {
        let Some(new) = Word::same(word) else {
            return self.put_object(index, RARE, &word.to_le_bytes());
        };
        let old = slot_of(&self.store, index)?.publish(new);
        inject::step();
        self.release_word(old);
        self.count_word(new);
        add(&self.counters().stored, 1);
        Ok(())
    }

    fn put_object(&mut self, index: u64, tag: u8, bytes: &[u8]) -> Result<(), PutError> {
        if bytes.len() == PAGE && self.store.refuses_whole() {
            return Err(PutError::Full { index, len: bytes.len() });
        }
        let (object, _) = self.place(index, tag, bytes)?;
        let word = Word::object(object);
        let old = slot_of(&self.store, index)?.publish(word);
        inject::step();
        self.release_word(old);
        self.count_word(word);
        add(&self.counters().stored, u64::from(bytes.len() < PAGE));
        Ok(())
    }

    /// Claims a place for an object of page `index` and writes the bytes there. No entry names it
    /// yet.
    pub(crate) fn place(
        &mut self,
        index: u64,
        tag: u8,
        bytes: &[u8],
    ) -> Result<(Object, Claimed), PutError> {
        slot_of(&self.store, index)?;
        self.place_for(index, tag, bytes, Heap::claim)
    }

    /// As [`place`](Self::place), without the reserve for writes; `index` may be that of a group's
    /// object.
    pub(crate) fn place_spare(
        &mut self,
        index: u64,
        tag: u8,
        bytes: &[u8],
    ) -> Result<(Object, Claimed), PutError> {
        self.place_for(index, tag, bytes, Heap::claim_spare)
    }

    #[inline]
    fn place_for(
        &mut self,
        index: u64,
        tag: u8,
        bytes: &[u8],
        claim: impl FnOnce(&Heap, &mut u32, usize) -> Result<Claimed, Full>,
    ) -> Result<(Object, Claimed), PutError> {
        let (Ok(len), 1..=MAX_OBJECT) = (u32::try_from(bytes.len()), bytes.len()) else {
            return Err(PutError::Object { len: bytes.len(), tag });
        };
        let fits = fitting(bytes.len());
        let heap = &self.store.heap;
        let Ok(claimed) = claim(heap, &mut self.current[fits], fits) else {
            return Err(PutError::Full { index, len: bytes.len() });
        };
        inject::step();
        let bump = u32::try_from(claimed.class - fits).expect("three at most");
        let object = Object { slab: claimed.slab, index: claimed.index, len, bump, tag };
        let (_, place) = locate(&heap.map, &object).expect("the heap claims places that exist");
        heap.map.write(place, checksum(index, &object, bytes), bytes);
        inject::step();
        Ok((object, claimed))
    }

    /// Stores another form of the same page. `recode` gets the object's tag and verified bytes,
    /// writes the new form to the buffer (`out`) and returns its tag and length, or `None` to
    /// decline. Returns whether the page was replaced. It is not replaced if another thread reads
    /// it at this moment, or if there is no room. The page's age stays.
    ///
    /// The object is pinned while `recode` runs, so no write comes between, and a writer of this
    /// page waits. `recode` must not use the store.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get).
    pub fn replace(
        &mut self,
        index: u64,
        out: &mut [u8; MAX_OBJECT],
        recode: impl FnOnce(u8, &[u8], &mut [u8; MAX_OBJECT]) -> Option<(u8, usize)>,
    ) -> Result<bool, GetError> {
        let store = Arc::clone(&self.store);
        let table = store.heap.map.table();
        let slot = usize::try_from(index).ok().and_then(|at| table.get(at));
        let slot = slot.ok_or(GetError::Index { index, pages: store.pages() })?;
        let Ok(pinned) = slot.pin(false) else { return Ok(false) };
        let pin = Pin(slot);
        let mut bytes = [0; MAX_OBJECT];
        let (tag, bytes) = match self.read_pinned(index, pinned, &mut bytes)? {
            Page::Object { tag, len } => (tag, &bytes[..len]),
            // The object of a same-filled page is the store's own, and a group's are shared by its
            // pages.
            _ => return Ok(false),
        };
        let new = recode(tag, bytes, out);
        let Some((tag, len)) = new.filter(|(tag, len)| *tag < TAGS && *len > 0) else {
            return Ok(false);
        };
        let Some(bytes) = out.get(..len) else { return Ok(false) };
        let Ok((object, claimed)) = self.place(index, tag, bytes) else { return Ok(false) };
        let word = Word::object(object);
        if !slot.relocate(pinned, word) {
            drop(pin);
            store.heap.release(claimed);
            return Ok(false);
        }
        // `relocate` has dropped the pin.
        std::mem::forget(pin);
        inject::step();
        self.release_word(pinned);
        self.count_word(word);
        Ok(true)
    }

    /// Discards these pages; numbers beyond the end are ignored.
    pub fn discard(&mut self, pages: Range<u64>) {
        let end = pages.end.min(self.store.pages());
        for index in pages.start..end {
            if let Ok(slot) = slot_of(&self.store, index) {
                if slot.load() == Word::ABSENT {
                    continue;
                }
                let old = slot.publish(Word::ABSENT);
                inject::step();
                self.release_word(old);
            }
        }
    }

    /// Increments the ages of these pages, up to [`MAX_AGE`](crate::MAX_AGE).
    pub fn grow_older(&self, pages: Range<u64>) {
        let table = self.store.heap.map.table();
        let end = pages.end.min(self.store.pages());
        let at = |index: u64| usize::try_from(index).unwrap_or(usize::MAX);
        for slot in table.get(at(pages.start)..at(end)).into_iter().flatten() {
            slot.grow_older();
        }
    }

    /// Returns the worker's slabs to their classes: for a worker that is idle for a while.
    pub fn rest(&mut self) {
        for (class, current) in self.current.iter_mut().enumerate() {
            if *current != NIL {
                self.store.heap.disown(*current, class);
                *current = NIL;
            }
        }
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.store.counters[self.number]
    }
}

/// The entry of a page.
pub(crate) fn slot_of(store: &Store, index: u64) -> Result<&Slot, PutError> {
    let slot = usize::try_from(index).ok().and_then(|at| store.heap.map.table().get(at));
    slot.ok_or(PutError::Index { index, pages: store.pages() })
}

/// A pin that is dropped with this value.
pub(crate) struct Pin<'a>(pub(crate) &'a Slot);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.rest();
        self.store.heap.workers.fetch_sub(1, Ordering::Relaxed);
        self.store.working.fetch_and(!(1 << self.number), Ordering::Release);
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("number", &self.number).finish_non_exhaustive()
    }
}
