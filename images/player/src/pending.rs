//! The set of pages that are still to be sent.

use image::Image;

/// One bit per page of each block: set until the page is sent. A zero page is sent only on request.
#[derive(Debug)]
pub(crate) struct Pending {
    blocks: Vec<Vec<u64>>,
}

impl Pending {
    /// The set of all pages.
    pub(crate) fn all(image: &Image) -> Self {
        let words = |pages: u64| usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
        // A set bit is stored as 0, so that the kernel allocates only the touched part of the map.
        let blocks = image.index().blocks.iter().map(|block| vec![0; words(block.pages)]);
        Self { blocks: blocks.collect() }
    }

    pub(crate) fn is_set(&self, block: usize, page: u64) -> bool {
        let (word, bit) = Self::place(page);
        self.blocks[block][word] & bit == 0
    }

    /// Removes a page from the set. Returns false if the page was not in it.
    pub(crate) fn take(&mut self, block: usize, page: u64) -> bool {
        let (word, bit) = Self::place(page);
        let word = &mut self.blocks[block][word];
        let was = *word & bit == 0;
        *word |= bit;
        was
    }

    /// Replaces the set of a block by QEMU's received bitmap, lowest bit first. Pages whose bits
    /// are set there are not pending.
    pub(crate) fn take_all(&mut self, block: usize, received: &[u8]) {
        for (word, bytes) in self.blocks[block].iter_mut().zip(received.chunks(8)) {
            let mut bits = [0; 8];
            bits[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(bits);
        }
    }

    fn place(page: u64) -> (usize, u64) {
        (usize::try_from(page / 64).expect("below the block's length"), 1 << (page % 64))
    }
}
