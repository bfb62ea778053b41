//! A migration stream for an image: it is recorded to its last byte or refused.
//!
//! Input: the stream.
#![no_main]

use image::RamBlock;
use libfuzzer_sys::fuzz_target;
use recorder::{record, Ending, Sink};

/// A sink that checks the contract of [`Sink`].
#[derive(Default)]
struct Judge {
    page_size: usize,
    blocks: Vec<u64>,
    pages: u64,
    zeros: u64,
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

fuzz_target!(|input: &[u8]| {
    for ending in [Ending::Closed, Ending::Described] {
        let mut judge = Judge::default();
        if let Ok(recorded) = record(input, &mut judge, ending) {
            assert_eq!((recorded.pages, recorded.zeros), (judge.pages, judge.zeros));
            assert!(recorded.bytes <= input.len() as u64);
            assert!(ending == Ending::Described || recorded.bytes == input.len() as u64);
        }
    }
});
