//! The receiver of a stream's pages.

use image::{RamBlock, WriteError, Writer};

/// Receives pages. Blocks are numbered in the order of the block table, pages from 0 in their
/// block.
pub trait Sink {
    /// The error of the sink.
    type Error;

    /// Receives the page size in bytes and the block table: once, before the first page.
    ///
    /// # Errors
    ///
    /// The sink's error.
    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), Self::Error>;

    /// Receives a page and its bytes. A page may be sent again: the last version counts.
    ///
    /// # Errors
    ///
    /// The sink's error.
    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), Self::Error>;

    /// Receives a page that is zero.
    ///
    /// # Errors
    ///
    /// The sink's error.
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
