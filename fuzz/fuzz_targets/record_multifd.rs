//! A multifd migration for an image: it is recorded to its last byte or refused, and no channel
//! waits for ever.
//!
//! Input: length (u16) of the main channel, length (u16) of the first multifd channel, and these
//! two; the rest is the second multifd channel.
#![no_main]

use judge::Judge;
use libfuzzer_sys::fuzz_target;
use recorder::{Ending, Multifd};

#[path = "../judge.rs"]
mod judge;

/// Takes a length and that many bytes, or those that are there.
fn split<'a>(len: &[u8], input: &'a [u8]) -> (&'a [u8], &'a [u8]) {
    let len = usize::from(u16::from_be_bytes([len[0], len[1]]));
    input.split_at(len.min(input.len()))
}

fuzz_target!(|input: &[u8]| {
    if let Some((lengths, rest)) = input.split_at_checked(4) {
        let (main, rest) = split(&lengths[..2], rest);
        let (one, two) = split(&lengths[2..], rest);
        for ending in [Ending::Closed, Ending::Described] {
            let multifd = Multifd::new(2, Judge::default());
            let outcome = std::thread::scope(|scope| {
                for channel in [one, two] {
                    let multifd = &multifd;
                    scope.spawn(move || multifd.channel(channel));
                }
                multifd.main(main, ending)
            });
            assert!(multifd.is_over());
            if let Ok((recorded, judge)) = outcome {
                assert_eq!((recorded.pages, recorded.zeros), (judge.pages, judge.zeros));
                assert!(recorded.bytes <= input.len() as u64);
            }
        }
    }
});
