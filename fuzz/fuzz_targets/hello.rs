//! Hostile hellos and welcomes: refused with a message, or equal to their own re-encoding.
//!
//! Input: a preamble of 20 bytes, then the JSON. So that the fuzzer need not guess magic, version,
//! length and checksum, a refused input is tried again with the right ones around its JSON.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde::{de::DeserializeOwned, Serialize};
use session::{decode_preamble, encode_preamble, Hello, Welcome};
use std::fmt::Debug;

const PREAMBLE: usize = 20;

fuzz_target!(|input: &[u8]| {
    decode::<Hello>(input);
    decode::<Welcome>(input);
    let json = input.get(PREAMBLE..).unwrap_or_default();
    // The input's JSON in a valid preamble: any JSON value has the right form.
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(json) {
        if let Ok(bytes) = encode_preamble("a peer", &value) {
            decode::<Hello>(&bytes);
            decode::<Welcome>(&bytes);
        }
    }
});

fn decode<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) {
    match decode_preamble::<T>("a peer", bytes) {
        Ok(decoded) => match encode_preamble("a peer", &decoded) {
            Ok(again) => {
                let twice: T = decode_preamble("a peer", &again).expect("what we write we read");
                assert_eq!(twice, decoded);
            }
            // Keys that were omitted are added.
            Err(error) => assert!(error.to_string().contains("limit"), "{error}"),
        },
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
