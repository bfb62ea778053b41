//! Restores the sequence of results that arrive in any order.

/// Holds items back until all items before them have arrived. One thread uses it.
///
/// Sequence numbers start at 0. The window bounds the number of items held: an item beyond it is
/// refused. A number that was used before is an error too.
#[derive(Debug)]
pub struct Reorder<T> {
    /// Item `n` waits in cell `n % window`.
    window: Box<[Option<T>]>,
    next: u64,
}

/// Why an item was refused. This program makes the numbers, so the cause is a bug in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReorderError {
    /// The number has been used before.
    #[error("sequence number {seq} came twice (next in order is {next})")]
    Duplicate {
        /// The item's number.
        seq: u64,
        /// The number that is next in order.
        next: u64,
    },
    /// The item is too far ahead of the first one missing.
    #[error("sequence number {seq} is outside the window of {window} that starts at {next}")]
    OutsideWindow {
        /// The item's number.
        seq: u64,
        /// The number that is next in order.
        next: u64,
        /// How many numbers the window spans.
        window: usize,
    },
}

impl<T> Reorder<T> {
    /// A window of `capacity` numbers, at least one.
    pub fn new(capacity: usize) -> Self {
        let window = (0..capacity.max(1)).map(|_| None).collect();
        Self { window, next: 0 }
    }

    /// Accepts item number `seq`.
    ///
    /// # Errors
    ///
    /// [`ReorderError`]; the item is dropped.
    pub fn insert(&mut self, seq: u64, item: T) -> Result<(), ReorderError> {
        let Some(ahead) = seq.checked_sub(self.next) else {
            return Err(ReorderError::Duplicate { seq, next: self.next });
        };
        let window = self.window.len();
        if ahead >= window as u64 {
            return Err(ReorderError::OutsideWindow { seq, next: self.next, window });
        }
        let cell = self.cell(seq);
        if self.window[cell].is_some() {
            return Err(ReorderError::Duplicate { seq, next: self.next });
        }
        self.window[cell] = Some(item);
        Ok(())
    }

    /// The next item in sequence, if it has arrived.
    pub fn pop(&mut self) -> Option<T> {
        let item = self.window[self.cell(self.next)].take()?;
        self.next += 1;
        Some(item)
    }

    fn cell(&self, seq: u64) -> usize {
        usize::try_from(seq % self.window.len() as u64).expect("below the window's length")
    }
}
