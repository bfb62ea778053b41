//! A mapped-ram file for an image: it is recorded to its last byte or refused.
//!
//! Input: the offset of the stream in the file, in one byte, then the file.
#![no_main]

use judge::Judge;
use libfuzzer_sys::fuzz_target;
use recorder::record_file;
use std::io::{Cursor, Seek, SeekFrom};

#[path = "../judge.rs"]
mod judge;

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
