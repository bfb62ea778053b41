//! Which pages QEMU has not been sent.

use image::Image;

/// One bit a page of each block: set while the page is to be sent, if it is asked for.
#[derive(Debug)]
pub(crate) struct Pending {
    blocks: Vec<Vec<u64>>,
}

impl Pending {
    /// All pages.
    pub(crate) fn all(image: &Image) -> Self {
        let words = |pages: u64| usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
        // The kernel gives zeroed memory when it is touched; a set bit is stored as 0.
        let blocks = image.index().blocks.iter().map(|block| vec![0; words(block.pages)]);
        Self { blocks: blocks.collect() }
    }

    pub(crate) fn is_set(&self, block: usize, page: u64) -> bool {
        let (word, bit) = Self::place(page);
        self.blocks[block][word] & bit == 0
    }

    /// Takes a page; false if it was taken before.
    pub(crate) fn take(&mut self, block: usize, page: u64) -> bool {
        let (word, bit) = Self::place(page);
        let word = &mut self.blocks[block][word];
        let was = *word & bit == 0;
        *word |= bit;
        was
    }

    /// Takes the pages of a block whose bits are set: QEMU's bitmap of what has arrived, lowest
    /// bit first.
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
