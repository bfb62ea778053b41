//! Hostile packed chunks: refused, or unpacked to bytes that do not depend on the old contents of
//! the output.
//!
//! Input: u32 plain length (modulo a little more than 1 MiB), then the packed bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stream::{unpack, MAX_CHUNK};

fuzz_target!(|input: &[u8]| {
    let Some((len, packed)) = input.split_first_chunk() else { return };
    let len = u32::from_le_bytes(*len) as usize % (MAX_CHUNK + 2);
    let mut first = vec![0x00; len];
    let mut second = vec![0xff; len];
    let result = unpack(packed, &mut first);
    assert_eq!(result, unpack(packed, &mut second));
    match result {
        Ok(()) => assert!(first == second, "old bytes show through"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
