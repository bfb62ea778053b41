//! The sink of the targets that record a VM.

use image::RamBlock;
use recorder::Sink;

/// A sink that checks the contract of [`Sink`].
#[derive(Default)]
pub struct Judge {
    page_size: usize,
    blocks: Vec<u64>,
    /// Pages that were recorded.
    pub pages: u64,
    /// Zero pages that were recorded.
    pub zeros: u64,
}

impl Sink for Judge {
    type Error = ();

    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), ()> {
        assert!(self.blocks.is_empty(), "a block table twice");
        self.page_size = page_size;
        self.blocks = blocks.iter().map(|block| block.len).collect();
        Ok(())
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), ()> {
        assert_eq!(bytes.len(), self.page_size);
        assert!(page * (self.page_size as u64) < self.blocks[block]);
        self.pages += 1;
        Ok(())
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), ()> {
        assert!(page * (self.page_size as u64) < self.blocks[block]);
        self.zeros += 1;
        Ok(())
    }
}
