//! A mapped-ram file for an image: it is recorded to its last byte or refused.
//!
//! Input: the offset of the stream in the file, in one byte, then the file.
#![no_main]

use image::RamBlock;
use libfuzzer_sys::fuzz_target;
use recorder::{record_file, Sink};
use std::io::{Cursor, Seek, SeekFrom};

/// A sink that checks the contract of [`Sink`].
#[derive(Default)]
struct Judge {
    page_size: usize,
    blocks: Vec<u64>,
    pages: u64,
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
        Ok(())
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&first, input)) = input.split_first() else { return };
    let mut file = Cursor::new(input);
    file.seek(SeekFrom::Start(first.into())).expect("any offset");
    let mut judge = Judge::default();
    if let Ok(recorded) = record_file(file, &mut judge) {
        assert_eq!(recorded.pages, judge.pages);
        assert_eq!(recorded.bytes, input.len() as u64 - u64::from(first));
    }
});
