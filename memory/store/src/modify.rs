//! Changing a part of a page: reads, edits and stores it, with no other write of the page in
//! between.

use std::sync::Arc;

use crate::entry::{State, Word, MAX_OBJECT, RARE, TAGS};
use crate::heap::Claimed;
use crate::inject;
use crate::page::{GetError, Page, PutError};
use crate::sync::relax;
use crate::worker::{slot_of, Pin, Worker};

/// The new form of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// This 64-bit value, repeated.
    Same(u64),
    /// The first `len` bytes of the buffer.
    Object {
        /// The caller's tag, below [`TAGS`].
        tag: u8,
        /// Length in bytes, 1 to [`MAX_OBJECT`].
        len: usize,
    },
}

/// Why a page was not changed. Its old data is still there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModifyError {
    /// The page cannot be read.
    #[error(transparent)]
    Get(#[from] GetError),
    /// The page's new form cannot be stored.
    #[error(transparent)]
    Put(#[from] PutError),
    /// The page is in a group, whose bytes do not fit the buffer: call [`ungroup`](Worker::ungroup)
    /// first.
    #[error("page {index} is a part of a group")]
    Grouped {
        /// The page.
        index: u64,
    },
    /// The page is on the backing device: [bring it back](Worker::bring_back) first.
    #[error("page {index} is on the backing device")]
    Backed {
        /// The page.
        index: u64,
    },
    /// The caller's `edit` declined to change the page.
    #[error("page {index} was left as it is")]
    Left {
        /// The page.
        index: u64,
    },
}

impl Worker {
    /// Changes page `index`. `edit` gets what is stored (an object's verified bytes are at the
    /// start of the buffer) and returns the new form, with an object's new bytes in the same
    /// buffer, or `None` to decline. Other writes of the page come entirely before or after. `edit`
    /// may be called more than once, and must not use the store.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get) and [`put`](Self::put); [`ModifyError::Left`] for `None`,
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
                    // Besides us only readers, compaction and recompression pin, and none of them
                    // waits.
                    let mut tries = 0;
                    while !slot.supersede(pinned, word) {
                        relax(&mut tries);
                    }
                    std::mem::forget(pin);
                    pinned
                }
                Err(seen) => {
                    if !slot.fill_in(seen, word) {
                        // Another thread wrote the page: edit what it wrote.
                        if let Some(claimed) = claimed {
                            store.heap.release(claimed);
                        }
                        continue;
                    }
                    seen
                }
            };
            inject::step();
            self.release_word(old);
            self.count_word(word);
            return Ok(());
        }
    }

    /// The entry for a change, and the place of its object with the bytes written.
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
