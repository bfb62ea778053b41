//! Reads the objects of pages, verified, and returns how a page is stored.

use super::Worker;
use crate::entry::{Object, State, Word, MAX_OBJECT, RARE};
use crate::inject;
use crate::layout::PAGE;
use crate::object::{checksum, locate};
use crate::page::{GetError, Page};

impl Worker {
    /// Copies the object of page `index` to the start of `out`, verified, and resets the page's
    /// age. After an error the bytes in `out` are undefined.
    ///
    /// # Errors
    ///
    /// [`GetError::Index`], [`GetError::Checksum`] and [`GetError::Lost`].
    #[inline]
    pub fn get(&self, index: u64, out: &mut [u8; MAX_OBJECT]) -> Result<Page, GetError> {
        self.read(index, true, |_| out)
    }

    /// As [`get`](Self::get), but copies the object of a page that is stored uncompressed, as 4096
    /// bytes, to `whole`. That is one copy less than by way of `out`.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get).
    #[inline]
    pub fn get_page(
        &self,
        index: u64,
        out: &mut [u8; MAX_OBJECT],
        whole: &mut [u8; PAGE],
    ) -> Result<Page, GetError> {
        self.read(index, true, |object| if object.len as usize == PAGE { whole } else { out })
    }

    /// As [`get`](Self::get), without resetting the page's age.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get).
    pub fn look(&self, index: u64, out: &mut [u8; MAX_OBJECT]) -> Result<Page, GetError> {
        self.read(index, false, |_| out)
    }

    /// Reads page `index`. `buffer` returns the memory to which an object is copied.
    #[inline]
    fn read<'a>(
        &self,
        index: u64,
        touch: bool,
        buffer: impl FnOnce(&Object) -> &'a mut [u8; MAX_OBJECT],
    ) -> Result<Page, GetError> {
        let map = &self.store.heap.map;
        let slot = usize::try_from(index).ok().and_then(|at| map.table().get(at));
        let slot = slot.ok_or(GetError::Index { index, pages: self.store.pages() })?;
        let lost = GetError::Lost { index };
        let word = match slot.pin(touch) {
            Ok(word) => word,
            Err(word) => {
                return match word.state() {
                    Some(State::Absent) => Ok(Page::Absent),
                    Some(State::Same(word)) => Ok(Page::Same(word)),
                    Some(State::Backed(_)) => Ok(Page::Backed),
                    _ => Err(lost),
                }
            }
        };
        inject::step();
        if let Some(State::Member(_)) = word.state() {
            slot.unpin();
            return Ok(Page::Grouped);
        }
        let copied = self.copy_pinned(word, buffer);
        slot.unpin();
        inject::step();
        let (object, expected, out) = copied.ok_or(lost)?;
        self.examine(index, object, expected, out)
    }

    /// Reads the object of a pinned entry into `out`, verified.
    pub(crate) fn read_pinned(
        &self,
        index: u64,
        pinned: Word,
        out: &mut [u8; MAX_OBJECT],
    ) -> Result<Page, GetError> {
        if let Some(State::Member(_)) = pinned.state() {
            return Ok(Page::Grouped);
        }
        let copied = self.copy_pinned(pinned, |_| out);
        let (object, expected, out) = copied.ok_or(GetError::Lost { index })?;
        self.examine(index, object, expected, out)
    }

    #[inline]
    fn copy_pinned<'a>(
        &self,
        pinned: Word,
        buffer: impl FnOnce(&Object) -> &'a mut [u8; MAX_OBJECT],
    ) -> Option<(Object, u32, &'a [u8; MAX_OBJECT])> {
        let Some(State::Object(object)) = pinned.state() else { return None };
        let map = &self.store.heap.map;
        let (_, place) = locate(map, &object)?;
        let out = buffer(&object);
        Some((object, map.read(place, &mut out[..object.len as usize]), out))
    }

    #[inline]
    fn examine(
        &self,
        index: u64,
        object: Object,
        expected: u32,
        out: &[u8; MAX_OBJECT],
    ) -> Result<Page, GetError> {
        let len = object.len as usize;
        let got = checksum(index, &object, &out[..len]);
        if got != expected {
            return Err(GetError::Checksum { index, len, expected, got });
        }
        match (object.tag, out.first_chunk()) {
            (RARE, Some(word)) if len == 8 => Ok(Page::Same(u64::from_le_bytes(*word))),
            (RARE, _) => Err(GetError::Lost { index }),
            (tag, _) => Ok(Page::Object { tag, len }),
        }
    }

    /// The stored form of page `index`, without reading it, and the page's age: the calls of
    /// [`grow_older`](Self::grow_older) since it was written or read.
    ///
    /// # Errors
    ///
    /// [`GetError::Index`] and [`GetError::Lost`].
    pub fn peek(&self, index: u64) -> Result<(Page, u8), GetError> {
        let table = self.store.heap.map.table();
        let slot = usize::try_from(index).ok().and_then(|at| table.get(at));
        let word = slot.ok_or(GetError::Index { index, pages: self.store.pages() })?.load();
        let page = match word.state() {
            Some(State::Absent) => Page::Absent,
            Some(State::Same(word)) => Page::Same(word),
            Some(State::Object(object)) => {
                Page::Object { tag: object.tag, len: object.len as usize }
            }
            Some(State::Member(_)) => Page::Grouped,
            Some(State::Backed(_)) => Page::Backed,
            Some(State::Lost) | None => return Err(GetError::Lost { index }),
        };
        Ok((page, word.age()))
    }
}
