//! Where pages go.

use image::{RamBlock, WriteError, Writer};

/// Takes pages. Blocks and pages are numbered as in the block table.
pub trait Sink {
    /// Why it cannot.
    type Error;

    /// The page size in bytes and the block table; once, before the first page.
    ///
    /// # Errors
    ///
    /// The sink's.
    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), Self::Error>;

    /// A page and its bytes. A page may come again: the last version counts.
    ///
    /// # Errors
    ///
    /// The sink's.
    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), Self::Error>;

    /// A page that is zero now.
    ///
    /// # Errors
    ///
    /// The sink's.
    fn zero(&mut self, block: usize, page: u64) -> Result<(), Self::Error>;
}

impl Sink for Writer {
    type Error = WriteError;

    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), WriteError> {
        Writer::blocks(self, page_size, blocks)
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), WriteError> {
        Writer::page(self, block, page, bytes)
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), WriteError> {
        Writer::zero(self, block, page);
        Ok(())
    }
}
