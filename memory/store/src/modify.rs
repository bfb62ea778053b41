//! Changing a part of a page: read, edit, store, with no write of the same page in between.

use std::sync::Arc;

use crate::heap::Claimed;
use crate::inject;
use crate::page::{GetError, Page, PutError};
use crate::slot::{State, Word, MAX_OBJECT, RARE, TAGS};
use crate::sync::relax;
use crate::worker::{slot_of, Pin, Worker};

/// What a page becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// This word, over and over.
    Same(u64),
    /// The first `len` bytes of the buffer.
    Object {
        /// The caller's, below [`TAGS`].
        tag: u8,
        /// Bytes, 1 to [`MAX_OBJECT`].
        len: usize,
    },
}

/// Why a page was not changed. What was there before still is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModifyError {
    /// It cannot be read.
    #[error(transparent)]
    Get(#[from] GetError),
    /// It cannot be stored.
    #[error(transparent)]
    Put(#[from] PutError),
    /// It is a part of a group, whose bytes do not fit the buffer: it has to
    /// [leave](Worker::leave_group) first.
    #[error("page {index} is a part of a group")]
    Grouped {
        /// The page.
        index: u64,
    },
    /// It is on the backing device: it has to be [brought back](Worker::bring_back) first.
    #[error("page {index} is on the backing device")]
    Backed {
        /// The page.
        index: u64,
    },
    /// The caller did not want to.
    #[error("page {index} was left as it is")]
    Left {
        /// The page.
        index: u64,
    },
}

impl Worker {
    /// Changes page `index`: `edit` gets what is stored, an object's bytes at the beginning of the
    /// buffer, checked, and says what the page becomes, with an object's new bytes in the same
    /// buffer; `None` leaves it. Other writes of the page come before or after as a whole, none in
    /// between. `edit` may be called more than once, and must not use the store.
    ///
    /// # Errors
    ///
    /// Those of [`get`](Self::get) and [`put`](Self::put); [`ModifyError::Left`] for `None`,
    /// [`ModifyError::Grouped`] and [`ModifyError::Backed`].
    pub fn modify(
        &mut self,
        index: u64,
        buffer: &mut [u8; MAX_OBJECT],
        mut edit: impl FnMut(Page, &mut [u8; MAX_OBJECT]) -> Option<Change>,
    ) -> Result<(), ModifyError> {
        let store = Arc::clone(self.store());
        let slot = slot_of(&store, index)?;
        let _one = store.editing.lock(index);
        loop {
            let (page, pinned) = match slot.pin(true) {
                Ok(pinned) => {
                    let pin = Pin(slot);
                    let page = self.read_pinned(index, pinned, buffer)?;
                    (page, Ok((pinned, pin)))
                }
                Err(word) => match word.state() {
                    Some(State::Absent) => (Page::Absent, Err(word)),
                    Some(State::Same(same)) => (Page::Same(same), Err(word)),
                    Some(State::Backed(_)) => return Err(ModifyError::Backed { index }),
                    _ => return Err(GetError::Lost { index }.into()),
                },
            };
            inject::step();
            if page == Page::Grouped {
                return Err(ModifyError::Grouped { index });
            }
            let change = edit(page, buffer).ok_or(ModifyError::Left { index })?;
            let (word, claimed) = self.prepare(index, change, buffer)?;
            let old = match pinned {
                Ok((pinned, pin)) => {
                    // Only readers, compaction and recompression pin besides us, and none waits.
                    let mut tries = 0;
                    while !slot.supersede(pinned, word) {
                        relax(&mut tries);
                    }
                    std::mem::forget(pin);
                    pinned
                }
                Err(seen) => {
                    if !slot.fill_in(seen, word) {
                        // Somebody wrote the page. Ours is to come after that, or before it.
                        if let Some(claimed) = claimed {
                            store.heap.release(claimed);
                        }
                        continue;
                    }
                    seen
                }
            };
            inject::step();
            self.forget(old);
            self.count_word(word);
            return Ok(());
        }
    }

    /// The word for a change, and the place of its object with the bytes in it.
    fn prepare(
        &mut self,
        index: u64,
        change: Change,
        buffer: &[u8; MAX_OBJECT],
    ) -> Result<(Word, Option<Claimed>), PutError> {
        let rare;
        let (tag, bytes) = match change {
            Change::Same(same) => match Word::same(same) {
                Some(word) => return Ok((word, None)),
                None => {
                    rare = same.to_le_bytes();
                    (RARE, &rare[..])
                }
            },
            Change::Object { tag, len } => match buffer.get(..len) {
                Some(bytes) if tag < TAGS && len > 0 => (tag, bytes),
                _ => return Err(PutError::Object { len, tag }),
            },
        };
        let (object, claimed) = self.place(index, tag, bytes)?;
        Ok((Word::object(object), Some(claimed)))
    }
}
