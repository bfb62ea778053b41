//! A migration stream for an image: it is recorded to its last byte or refused.
//!
//! Input: the stream.
#![no_main]

use judge::Judge;
use libfuzzer_sys::fuzz_target;
use recorder::{record, Ending};

#[path = "../judge.rs"]
mod judge;

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
