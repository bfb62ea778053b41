//! Hostile frames: a header is refused or parsed within its bounds; ACK entries are refused or
//! restore their bytes.
//!
//! Input: a frame header of 48 bytes, then the payload of an ACK. So that the fuzzer need not guess
//! a checksum, a header refused only for its checksum is tried again with the right one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use session::{AckEntry, Header, SessionError, HEADER_BYTES, MAX_FREE_PAYLOAD, MAX_STREAMS};

const CHUNK_BYTES: usize = 557_056;

fuzz_target!(|input: &[u8]| {
    let Some((raw, payload)) = input.split_first_chunk::<HEADER_BYTES>() else { return };
    let mut raw = *raw;
    let mut parsed = Header::from_bytes(&raw, CHUNK_BYTES);
    if let Err(SessionError::HeaderChecksum { computed, .. }) = parsed {
        raw[44..].copy_from_slice(&computed.to_be_bytes());
        parsed = Header::from_bytes(&raw, CHUNK_BYTES);
    }
    match parsed {
        Ok(header) => {
            assert!(usize::from(header.stream) < MAX_STREAMS);
            assert!(header.plain_len as usize <= CHUNK_BYTES);
            let limit = (CHUNK_BYTES + codec::UnitHeader::LEN).max(MAX_FREE_PAYLOAD);
            assert!(header.payload_len as usize <= limit);
            let again = header.to_bytes();
            let parsed = Header::from_bytes(&again, CHUNK_BYTES);
            assert_eq!(parsed.expect("what we write we read"), header);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Ok(entries) = AckEntry::read_all(payload) {
        let mut written = Vec::new();
        for entry in entries {
            assert!(usize::from(entry.stream) < MAX_STREAMS);
            entry.write(&mut written);
        }
        assert!(written == payload);
    }
});
