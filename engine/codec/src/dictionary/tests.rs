use super::contexts::*;
use super::*;
use crate::Codec;
use crate::{Decoder, Encoder, Settings};
use std::sync::Arc;

/// A page of synthetic records: long names common to all pages, each once, and values unique to the
/// page.
fn page(number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut page = Vec::with_capacity(4200);
    for field in 0_u64.. {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let name = (field % 80 + 1).wrapping_mul(0x2545_f491_4f6c_dd1d);
        page.extend_from_slice(format!("{name:020x}=<{state:016x}>").as_bytes());
        if page.len() >= 4096 {
            break;
        }
    }
    page.truncate(4096);
    page
}

fn trained(most: usize) -> Vec<u8> {
    let samples: Vec<u8> = (0..400).flat_map(page).collect();
    train(&samples, 4096, most).expect("there is much in common")
}

#[test]
fn pages_come_back_at_every_level_and_size_and_get_smaller() {
    let mut out = vec![0; 8192];
    let mut back = vec![0; 4096];
    let mut decoder = Decoder::new();
    for most in [1024, 5000, 15 << 10, MAX_DICTIONARY] {
        let bytes = trained(most);
        for level in -5..=19 {
            let settings = Settings::new(Codec::Zstd, Some(level)).unwrap();
            let mut encoder = Encoder::with_dictionaries(settings, 4096).unwrap();
            let mut dictionary = Dictionary::room(Some(level));
            dictionary.digest(&bytes).unwrap();
            let dictionary = Arc::new(dictionary);
            let (mut with, mut without) = (0, 0);
            for number in 1000..1020 {
                let plain = page(number);
                without += encoder.encode(&plain, &mut out).len;
                let (encoded, used) = encoder.encode_with(Some(&dictionary), &plain, &mut out);
                assert!(used && encoded.codec == Codec::Zstd, "{level} {most}");
                with += encoded.len;
                decoder.decode_with(&dictionary, &out[..encoded.len], &mut back).unwrap();
                assert!(back == plain, "level {level}, {most} bytes");
                // A unit without a dictionary in between, on the same contexts.
                let encoded = encoder.encode(&plain, &mut out);
                decoder.decode_payload(Codec::Zstd, &out[..encoded.len], &mut back).unwrap();
                assert!(back == plain);
            }
            println!("level {level}, {most} bytes: {with} of {without}");
            let gains = level < 1 || most < 5000 || with * 100 < without * 97;
            assert!(gains, "level {level}: {with} of {without}");
        }
    }
}

#[test]
fn threads_and_dictionaries_take_little_memory_at_low_levels() {
    for (level, most) in [(1, 400_000), (3, 600_000), (19, 3_000_000)] {
        let (room, context) = (Dictionary::room(Some(level)), WithDictionary::new(level).unwrap());
        let (room, thread) = (room.memory(), context.context.memory());
        println!("level {level}: {room} a dictionary, {thread} a thread");
        assert!(room + thread < most, "level {level}");
    }
}

#[test]
fn a_false_dictionary_is_refused_and_the_memory_stays_usable() {
    let good = trained(8192);
    let mut room = Dictionary::room(Some(1));
    assert_eq!(room.digest(&[]), Err(DictionaryError::Length(0)));
    assert_eq!(
        room.digest(&vec![0; MAX_DICTIONARY + 1]),
        Err(DictionaryError::Length(MAX_DICTIONARY + 1))
    );
    assert_eq!(room.digest(&[7; 300]), Err(DictionaryError::Magic([7; 4])));
    let mut bad = good.clone();
    bad[8..100].fill(0xff);
    assert_eq!(room.digest(&bad), Err(DictionaryError::Unsound));
    assert!(room.is_empty());
    let mut out = [0; 4096];
    let error = Decoder::new().decode_with(&room, &[1, 2, 3], &mut out).unwrap_err();
    assert!(error.to_string().contains("no dictionary"), "{error}");
    room.digest(&good).unwrap();
    assert_eq!((room.len(), room.digest(&good)), (good.len(), Err(DictionaryError::Taken)));
    room.clear();
    room.digest(&good).unwrap();
}

#[test]
fn a_dictionary_for_decoding_only_compresses_no_page() {
    let mut room = Dictionary::room(None);
    room.digest(&trained(8192)).unwrap();
    let room = Arc::new(room);
    let mut encoder = Encoder::with_dictionaries(Settings::default(), 4096).unwrap();
    let mut out = vec![0; 8192];
    let (encoded, used) = encoder.encode_with(Some(&room), &page(1), &mut out);
    assert!(!used && encoded.codec == Codec::Zstd);
    let mut back = vec![0; 4096];
    Decoder::new().decode_payload(Codec::Zstd, &out[..encoded.len], &mut back).unwrap();
    assert!(back == page(1));
}

#[test]
fn the_stated_memory_is_the_memory_used() {
    for level in [None, Some(-5), Some(1), Some(3), Some(12), Some(19)] {
        assert_eq!(Dictionary::room(level).memory(), Dictionary::memory_for(level));
        let Some(level) = level else { continue };
        let context = WithDictionary::new(level).unwrap();
        assert_eq!(context.context.memory(), Dictionary::context_memory(level));
    }
}

#[test]
fn incompressible_pages_are_raw_and_one_word_pages_are_found() {
    let mut room = Dictionary::room(Some(1));
    room.digest(&trained(8192)).unwrap();
    let room = Arc::new(room);
    let mut encoder = Encoder::with_dictionaries(Settings::default(), 4096).unwrap();
    let mut out = vec![0; 8192];
    let mut state = 1_u64;
    let noise: Vec<u8> = (0..512)
        .flat_map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(99);
            (state ^ state >> 29).to_le_bytes()
        })
        .collect();
    for _ in 0..3 {
        let (encoded, used) = encoder.encode_with(Some(&room), &noise, &mut out);
        assert!(encoded.codec == Codec::Raw && !used);
        let (encoded, used) = encoder.encode_with(Some(&room), &[7; 4096], &mut out);
        assert!(encoded.codec == Codec::SameFilled && !used);
        assert!(encoder.encode_with(Some(&room), &page(3), &mut out).1);
        encoder.release_dictionary();
    }
}

#[test]
fn payloads_of_no_encoder_are_errors() {
    let mut room = Dictionary::room(Some(1));
    room.digest(&trained(8192)).unwrap();
    let room = Arc::new(room);
    let mut encoder = Encoder::with_dictionaries(Settings::default(), 4096).unwrap();
    let (mut out, mut back) = (vec![0; 8192], vec![0; 4096]);
    let plain = page(77);
    let (encoded, _) = encoder.encode_with(Some(&room), &plain, &mut out);
    let mut decoder = Decoder::new();
    for at in 0..encoded.len {
        let mut bent = out[..encoded.len].to_vec();
        bent[at] ^= 1 << (at % 8);
        // Either result is allowed: an error, or bytes within `back`.
        let _ = decoder.decode_with(&room, &bent, &mut back);
        assert!(decoder.decode_with(&room, &bent[..at], &mut back).is_err());
    }
    decoder.decode_with(&room, &out[..encoded.len], &mut back).unwrap();
    assert!(back == plain);
}
