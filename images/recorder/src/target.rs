//! The receiver of the main channel's pages and barriers.

use image::RamBlock;

use crate::{RecordError, Sink};

/// A sink, and the multifd channels beside it, if the migration has any.
pub(crate) trait Target: Sink {
    /// Whether the migration has multifd channels. Barriers count only then.
    fn is_multifd(&self) -> bool;

    /// Waits at the barrier at offset `at` until every multifd channel is there.
    fn barrier(&mut self, at: u64) -> Result<(), RecordError<Self::Error>>;
}

/// The sink of a migration without multifd.
pub(crate) struct Alone<'a, S>(pub(crate) &'a mut S);

impl<S: Sink> Sink for Alone<'_, S> {
    type Error = S::Error;

    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), S::Error> {
        self.0.blocks(page_size, blocks)
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), S::Error> {
        self.0.page(block, page, bytes)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), S::Error> {
        self.0.zero(block, page)
    }
}

impl<S: Sink> Target for Alone<'_, S> {
    fn is_multifd(&self) -> bool {
        false
    }

    fn barrier(&mut self, _: u64) -> Result<(), RecordError<S::Error>> {
        Ok(())
    }
}
