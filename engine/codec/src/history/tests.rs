use super::*;

/// Chunks of which each repeats much of those before it.
fn chunks(count: usize, len: usize) -> Vec<Vec<u8>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let stock: Vec<u8> = std::iter::repeat_with(&mut random).flatten().take(64 << 10).collect();
    (0..count)
        .map(|_| {
            let mut chunk = Vec::with_capacity(len + 4096);
            while chunk.len() < len {
                let at = usize::from(u16::from_le_bytes([random()[0], random()[1]]));
                let end = (at + 700).min(stock.len());
                chunk.extend_from_slice(&stock[at..end]);
                chunk.extend_from_slice(&random());
            }
            chunk.truncate(len);
            chunk
        })
        .collect()
}

fn encoded(encoder: &mut HistoryEncoder, chunk: &[u8]) -> (PartHeader, Vec<u8>) {
    let mut out = vec![0; chunk.len()];
    let len = encoder.encode(chunk, &mut out).expect("it shrinks");
    let header = PartHeader::from_bytes(&out[..len]).unwrap();
    (header, out[PartHeader::LEN..len].to_vec())
}

#[test]
fn parts_decode_in_order_and_refer_to_those_before() {
    for (level, window) in [(3, 20), (6, 22), (9, 22), (19, 20)] {
        let chunks = chunks(12, 200_000);
        let mut encoder = HistoryEncoder::new(7, level, window).unwrap();
        let mut decoder = HistoryDecoder::new(window).unwrap();
        let mut out = vec![0; 200_000];
        let mut lens = Vec::new();
        for (number, chunk) in (0_u32..).zip(&chunks) {
            let (header, part) = encoded(&mut encoder, chunk);
            let expected = PartHeader { history: 7, begins: number == 0, number };
            assert_eq!(header, expected);
            decoder.decode(header.begins, &part, &mut out).unwrap();
            assert!(out == *chunk, "level {level}, part {number}");
            lens.push(part.len());
        }
        // The stock is in the window by then.
        assert!(lens[11] * 2 < lens[0], "level {level}: {lens:?}");
    }
}

#[test]
fn what_does_not_shrink_begins_a_new_frame_with_the_next_number() {
    let chunks = chunks(3, 100_000);
    let mut state = 1_u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    })
    .take(100_000)
    .collect();
    let mut encoder = HistoryEncoder::new(0, 6, 20).unwrap();
    let mut decoder = HistoryDecoder::new(20).unwrap();
    let mut out = vec![0; 100_000];
    for (chunk, begins, number) in [(&chunks[0], true, 0), (&chunks[1], false, 1)] {
        let (header, part) = encoded(&mut encoder, chunk);
        assert_eq!((header.begins, header.number), (begins, number));
        decoder.decode(begins, &part, &mut out).unwrap();
    }
    assert_eq!(encoder.encode(&noise, &mut out), None);
    assert_eq!(encoder.encode(&[], &mut out), None);
    // Nor is there a part for a chunk whose part has no room.
    let (_, part) = encoded(&mut HistoryEncoder::new(0, 6, 20).unwrap(), &chunks[2]);
    let room = PartHeader::LEN + part.len() - 1;
    assert_eq!(encoder.encode(&chunks[2], &mut out[..room]), None);
    let (header, part) = encoded(&mut encoder, &chunks[2]);
    assert_eq!((header.begins, header.number), (true, 2));
    // Even a decoder that knows nothing of the frame before reads it.
    HistoryDecoder::new(20).unwrap().decode(true, &part, &mut out).unwrap();
    assert!(out == chunks[2]);
}

#[test]
fn a_part_that_is_missing_cut_or_of_another_length_is_refused() {
    let chunks = chunks(4, 50_000);
    let mut encoder = HistoryEncoder::new(0, 6, 20).unwrap();
    let parts: Vec<_> = chunks.iter().map(|chunk| encoded(&mut encoder, chunk).1).collect();
    let fresh = || {
        let mut decoder = HistoryDecoder::new(20).unwrap();
        decoder.decode(true, &parts[0], &mut vec![0; 50_000]).unwrap();
        decoder
    };
    let mut out = vec![0; 50_000];
    fresh().decode(false, &parts[1], &mut out).unwrap();
    // Without the part before, it gives other bytes or none.
    let skipped = fresh().decode(false, &parts[3], &mut out);
    assert!(skipped.is_err() || out != chunks[3]);
    assert!(HistoryDecoder::new(20).unwrap().decode(false, &parts[1], &mut out).is_err());
    for cut in [0, 1, 2, parts[1].len() / 2, parts[1].len() - 1] {
        let error = fresh().decode(false, &parts[1][..cut], &mut out).unwrap_err();
        assert!(error.to_string().contains("expected 50000"), "cut at {cut}: {error}");
    }
    let error = fresh().decode(false, &parts[1], &mut out[..49_999]).unwrap_err();
    assert!(error.to_string().contains("decodes to more bytes"), "{error}");
    let error = fresh().decode(false, &parts[1], &mut vec![0; 50_001]).unwrap_err();
    assert!(error.to_string().contains("50000 bytes, expected 50001"), "{error}");
}

#[test]
fn a_larger_window_than_agreed_is_refused_without_memory_for_it() {
    let chunk = &chunks(1, 100_000)[0];
    let (_, part) = encoded(&mut HistoryEncoder::new(0, 6, 24).unwrap(), chunk);
    let mut decoder = HistoryDecoder::new(22).unwrap();
    assert!(decoder.decode(true, &part, &mut vec![0; 100_000]).is_err());
    assert!(decoder.memory() < 1 << 20, "{} bytes", decoder.memory());
    HistoryDecoder::new(24).unwrap().decode(true, &part, &mut vec![0; 100_000]).unwrap();
}

#[test]
fn any_bytes_are_refused_or_decoded_within_bounds() {
    let chunks = chunks(2, 30_000);
    let mut encoder = HistoryEncoder::new(0, 6, 20).unwrap();
    let parts: Vec<_> = chunks.iter().map(|chunk| encoded(&mut encoder, chunk).1).collect();
    let mut out = vec![0; 30_000];
    for at in (0..parts[1].len()).step_by(7) {
        let mut decoder = HistoryDecoder::new(20).unwrap();
        decoder.decode(true, &parts[0], &mut out).unwrap();
        let mut bad = parts[1].clone();
        bad[at] ^= 1 << (at % 8);
        let _ = decoder.decode(false, &bad, &mut out);
        assert!(decoder.memory() < 3 << 20);
        // A frame that begins makes it whole again.
        decoder.decode(true, &parts[0], &mut out).unwrap();
        assert!(out == chunks[0]);
    }
}

#[test]
fn the_layout_of_the_header_is_the_documented_one() {
    let header = PartHeader { history: 0x0102, begins: true, number: 0x0304_0506 };
    assert_eq!(header.to_bytes(), [1, 2, 1, 0, 3, 4, 5, 6]);
    assert_eq!(PartHeader::from_bytes(&header.to_bytes()), Ok(header));
    assert!(PartHeader::from_bytes(&[0; 7]).unwrap_err().contains("7 bytes"));
    assert!(PartHeader::from_bytes(&[0, 0, 2, 0, 0, 0, 0, 0]).unwrap_err().contains("0x2"));
    assert!(PartHeader::from_bytes(&[0, 0, 1, 9, 0, 0, 0, 0]).unwrap_err().contains("0x9"));
}

#[test]
fn the_tables_of_an_encoder_are_no_larger_than_stated() {
    const MIB: usize = 1 << 20;
    let chunk = &chunks(1, 100_000)[0];
    for window in [20, 22, 23] {
        for level in HISTORY_LEVELS {
            let mut encoder = HistoryEncoder::new(0, level, window).unwrap();
            encoded(&mut encoder, chunk);
            let has = encoder.context.sizeof();
            let tables = if level < 10 { 10 * MIB } else { (80 * MIB).min(16 << window) };
            let most = (1 << window) + tables + 2 * MIB;
            assert!(has > 1 << window && has <= most, "level {level}, 2^{window}: {has} bytes");
        }
    }
}
