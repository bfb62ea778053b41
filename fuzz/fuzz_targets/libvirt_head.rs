//! The head of libvirt's save file: it is read to the stream's first byte, or refused.
//!
//! Input: the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use recorder::{beginning, Beginning};

fuzz_target!(|input: &[u8]| {
    let mut rest = input;
    match beginning(&mut rest) {
        Ok(Beginning::Libvirt(_)) => assert!(rest.len() <= input.len() - 92),
        Ok(Beginning::Other(head)) => assert_eq!([&head[..], rest].concat(), input),
        Err(_) => {}
    }
});
