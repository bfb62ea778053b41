//! Hostile parts of a history: refused, or decoded within the output and the agreed window. The
//! parts of an honest encoder decode to their chunks, also behind a hostile one.
//!
//! Input: parts, each a header of a part, the length of its bytes and of its chunk (u16 each,
//! little-endian), and the bytes.
#![no_main]

use codec::{HistoryDecoder, HistoryEncoder, PartHeader};
use libfuzzer_sys::fuzz_target;

const WINDOW: u8 = 20;
/// A window, and zstd's buffers for blocks.
const MOST_MEMORY: usize = (1 << WINDOW) + (1 << 20);

fuzz_target!(|input: &[u8]| {
    let mut decoder = HistoryDecoder::new(WINDOW).expect("there is memory");
    let mut rest = input;
    let mut chunks = Vec::new();
    while let Some((head, behind)) = rest.split_first_chunk::<{ PartHeader::LEN + 4 }>() {
        let header = PartHeader::from_bytes(head);
        let [.., p0, p1, c0, c1] = *head;
        let len = usize::from(u16::from_le_bytes([p0, p1])).min(behind.len());
        let (bytes, next) = behind.split_at(len);
        rest = next;
        let mut chunk = vec![0; usize::from(u16::from_le_bytes([c0, c1]))];
        let Ok(header) = header else { continue };
        assert_eq!(PartHeader::from_bytes(&header.to_bytes()), Ok(header));
        if let Err(error) = decoder.decode(header.begins, bytes, &mut chunk) {
            assert!(!error.to_string().is_empty());
        }
        assert!(decoder.memory() < MOST_MEMORY, "{} bytes", decoder.memory());
        chunks.extend([chunk, bytes.to_vec()]);
    }
    let mut encoder = HistoryEncoder::new(0, 3, WINDOW).expect("zstd has the level");
    for chunk in chunks {
        let (mut part, mut out) = (vec![0; chunk.len()], vec![0; chunk.len()]);
        let Some(len) = encoder.encode(&chunk, &mut part) else { continue };
        let header = PartHeader::from_bytes(&part[..len]).expect("what we write we read");
        decoder.decode(header.begins, &part[PartHeader::LEN..len], &mut out).expect("decodes");
        assert!(out == chunk);
    }
});
