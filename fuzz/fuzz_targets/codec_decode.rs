//! Hostile units: refused, or decoded to bytes that match their checksum and do not depend on the
//! old contents of the output.
//!
//! Input: a unit header and a payload. So that the fuzzer need not guess a hash, a unit refused
//! only for its checksum is tried again with the right one.
#![no_main]

use codec::{checksum, Decoder, UnitHeader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(mut header) = UnitHeader::from_bytes(input) else { return };
    assert_eq!(UnitHeader::from_bytes(&header.to_bytes()), Ok(header), "a header says what it is");
    let payload = &input[UnitHeader::LEN..];
    let mut decoder = Decoder::new();
    let mut first = vec![0x00; header.plain_len as usize];
    if decoder.decode(&header, payload, &mut first).is_err() {
        header.checksum = checksum(&first);
        let mut again = vec![0x00; first.len()];
        if decoder.decode(&header, payload, &mut again).is_err() {
            return;
        }
        assert!(first == again, "decoding depends on what was decoded before");
    }
    let mut second = vec![0xff; first.len()];
    // Old bytes that show through would change the checksum.
    decoder.decode(&header, payload, &mut second).expect("decodes into dirty output as well");
    assert!(first == second);
});
