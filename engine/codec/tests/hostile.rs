//! Units that no encoder wrote. A decoder returns an error, or by luck the right bytes: never wrong
//! bytes, never a panic, never a byte of the buffer's old contents.

mod data;

use std::io::Write;

use codec::{
    checksum, qz, Codec, DecodeError, Decoder, Encoded, Encoder, HeaderError, Settings, UnitHeader,
};
use data::{kinds, Kind, Rng};
use proptest::prelude::*;

/// One valid unit of each codec, for plain bytes of each kind.
fn sound_units(size: usize) -> Vec<(UnitHeader, Vec<u8>, Vec<u8>)> {
    let mut units = Vec::new();
    for (codec, level) in [
        (Codec::Raw, None),
        (Codec::Lz4, None),
        (Codec::Lz4, Some(-15)),
        (Codec::Zlib, Some(1)),
        (Codec::Zlib, Some(9)),
        (Codec::Zstd, Some(-5)),
        (Codec::Zstd, Some(1)),
        (Codec::Zstd, Some(19)),
        (Codec::DeflateQz, Some(1)),
        (Codec::DeflateQz, Some(9)),
    ] {
        let mut encoder = Encoder::new(Settings::new(codec, level).unwrap()).unwrap();
        for kind in kinds() {
            let plain = kind.make(size, 31);
            let mut out = vec![0; size];
            let encoded = encoder.encode(&plain, &mut out);
            let payload = if encoded.codec == Codec::Raw {
                plain.clone()
            } else {
                out[..encoded.len].to_vec()
            };
            units.push((UnitHeader::of(&plain, encoded), payload, plain));
        }
    }
    units
}

/// Decodes into a buffer filled with `dirt`; accepts an error, or the plain bytes.
#[track_caller]
fn never_wrong(
    decoder: &mut Decoder,
    header: &UnitHeader,
    payload: &[u8],
    plain: &[u8],
    dirt: u8,
) -> bool {
    let mut out = vec![dirt; header.plain_len as usize];
    match decoder.decode(header, payload, &mut out) {
        Ok(()) => {
            assert!(out == plain, "{header:?} was accepted with other bytes");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

/// About `count` of the numbers below `end`: the first, the last, and some in between.
fn sampled(end: usize, count: usize) -> impl Iterator<Item = usize> {
    let step = (end / count).max(1);
    (0..end).filter(move |at| at % step == 0 || *at < 40 || at + 40 > end)
}

#[test]
fn a_truncated_unit_is_refused() {
    let mut decoder = Decoder::new();
    for size in [17, 4096, 525_632] {
        for (header, payload, plain) in sound_units(size) {
            for cut in sampled(payload.len(), if size > 9000 { 12 } else { 400 }) {
                let short = &payload[..cut];
                let mut out = vec![0x77; size];
                let error = decoder.decode(&header, short, &mut out).unwrap_err();
                assert!(matches!(error, DecodeError::Buffer { what: "payload", .. }), "{error}");
                // The same from a sender whose header states the cut length.
                let stated = UnitHeader { payload_len: u32::try_from(cut).unwrap(), ..header };
                let taken = never_wrong(&mut decoder, &stated, short, &plain, 0x77);
                assert!(!taken, "{header:?} cut to {cut} bytes was accepted");
            }
        }
    }
}

#[test]
fn a_flipped_bit_never_gives_wrong_bytes() {
    let mut decoder = Decoder::new();
    let mut refused = 0;
    for size in [17, 4096, 70_000] {
        for (header, mut payload, plain) in sound_units(size) {
            for at in sampled(payload.len(), if size > 9000 { 30 } else { 300 }) {
                for bit in 0..8 {
                    payload[at] ^= 1 << bit;
                    let taken = never_wrong(&mut decoder, &header, &payload, &plain, 0xff);
                    refused += usize::from(!taken);
                    payload[at] ^= 1 << bit;
                }
            }
            assert!(never_wrong(&mut decoder, &header, &payload, &plain, 0xff), "sound again");
        }
    }
    assert!(refused > 10_000, "only {refused} refused: the flips do not reach the codecs");
}

#[test]
fn a_flipped_bit_in_the_header_never_gives_wrong_bytes() {
    let mut decoder = Decoder::new();
    for size in [16, 4096] {
        for (header, payload, plain) in sound_units(size) {
            for bit in 0..UnitHeader::LEN * 8 {
                let mut bytes = header.to_bytes();
                bytes[bit / 8] ^= 1 << (bit % 8);
                let Ok(bad) = UnitHeader::from_bytes(&bytes) else { continue };
                assert!(
                    bad.plain_len as usize <= codec::MAX_PLAIN && bad.payload_len <= bad.plain_len
                );
                if bad.payload_len == header.payload_len {
                    never_wrong(&mut decoder, &bad, &payload, &plain, 0);
                }
            }
        }
    }
}

#[test]
fn other_lengths_than_stated_are_refused() {
    let mut decoder = Decoder::new();
    for (header, payload, plain) in sound_units(4096) {
        for plain_len in [4096 - 8, 4096 - 1, 4096 + 1, 4096 + 8, 8192, 1 << 20] {
            let stated = UnitHeader { plain_len, ..header };
            assert!(!never_wrong(&mut decoder, &stated, &payload, &plain, 0), "{stated:?}");
            // A buffer of the true header's length, not of this one's.
            let mut out = vec![0; 4096];
            decoder.decode(&stated, &payload, &mut out).unwrap_err();
        }
        for out_len in [0, 4095, 4097] {
            let error = decoder.decode(&header, &payload, &mut vec![0; out_len]).unwrap_err();
            assert!(matches!(error, DecodeError::Buffer { what: "output", .. }), "{error}");
        }
        let sum = UnitHeader { checksum: header.checksum ^ 1, ..header };
        let error = decoder.decode(&sum, &payload, &mut vec![0; 4096]).unwrap_err();
        assert!(matches!(error, DecodeError::Checksum { .. }), "{error}");
        assert!(header.verify(&plain).is_ok() && sum.verify(&plain).is_err());
        assert!(header.verify(&plain[1..]).is_err());
        let long = UnitHeader { plain_len: u32::MAX, ..header };
        let error = decoder.decode(&long, &payload, &mut []).unwrap_err();
        assert!(matches!(error, DecodeError::Header(HeaderError::TooLong { .. })), "{error}");
    }
}

/// The buffer already holds the bytes of the header's checksum. A decoder that skips bytes, or
/// copies from before the start, would pass; see RUSTSEC-2026-0041.
#[test]
fn old_bytes_of_the_buffer_never_pass_as_decoded() {
    let plain = vec![0x61; 4096];
    let lz4 = |token: &[u8]| [token, &[0xff; 15], &[200, 0x50], b"aaaaa"].concat();
    let qz = |deflate: &[u8], plain_len| {
        let mut out = vec![0; 100];
        let crc32 = qz::crc32(&vec![0x61; plain_len as usize]);
        let len = qz::write_member(&mut out, deflate, crc32, plain_len).unwrap();
        out.truncate(len);
        out
    };
    let payloads: [(&str, Codec, Vec<u8>); 17] = [
        ("nothing", Codec::Lz4, vec![0]),
        ("offset zero", Codec::Lz4, lz4(&[0x1f, b'a', 0, 0])),
        ("offset before the start", Codec::Lz4, lz4(&[0x1f, b'a', 2, 0])),
        ("offset far before the start", Codec::Lz4, lz4(&[0x1f, b'a', 0xff, 0xff])),
        ("first a match", Codec::Lz4, lz4(&[0x0f, 1, 0])),
        ("short match in the fast path", Codec::Lz4, [&[0x12, b'a', 9, 0][..], &[0; 64]].concat()),
        ("one literal", Codec::Lz4, vec![0x10, b'a']),
        ("an empty final block", Codec::Zlib, vec![3, 0]),
        // Fixed codes: a match of length 3, distance 1, at the very start.
        ("distance before the start", Codec::Zlib, vec![0x03, 0x02, 0, 0]),
        ("an empty last raw block", Codec::Zstd, vec![0, 0x58, 1, 0, 0]),
        ("a run of 4095", Codec::Zstd, rle(4095)),
        ("no block", Codec::Zstd, vec![0, 0x58]),
        ("an empty final block", Codec::DeflateQz, qz(&[3, 0], 4096)),
        ("distance before the start", Codec::DeflateQz, qz(&[0x03, 0x02, 0, 0], 4096)),
        ("a stream of one byte", Codec::DeflateQz, qz(&[0x4b, 0x04, 0], 4096)),
        ("a member too few", Codec::DeflateQz, qz(&[0x4b, 0x04, 0], 1)),
        (
            "one sound member and one of nothing",
            Codec::DeflateQz,
            [qz(&[0x4b, 0x04, 0], 1), qz(&[3, 0], 4095)].concat(),
        ),
    ];
    let mut decoder = Decoder::new();
    for (what, codec, payload) in payloads {
        let encoded = Encoded { codec, len: payload.len() };
        let header = UnitHeader::of(&plain, encoded);
        let mut out = plain.clone();
        let result = decoder.decode(&header, &payload, &mut out);
        assert!(result.is_err(), "{codec}, {what}: accepted");
    }
    // The refusals have the right cause: with one byte more the payload is valid.
    let payload = rle(4096);
    let header = UnitHeader::of(&plain, Encoded { codec: Codec::Zstd, len: payload.len() });
    decoder.decode(&header, &payload, &mut vec![0; 4096]).unwrap();
    let payload = qz(&[0x4b, 0x04, 0], 1);
    let text = [&payload[..], &qz(&deflate(&plain[1..]), 4095)].concat();
    let header = UnitHeader::of(&plain, Encoded { codec: Codec::DeflateQz, len: text.len() });
    decoder.decode(&header, &text, &mut vec![0; 4096]).unwrap();
}

fn deflate(plain: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::new(6);
    let mut writer = flate2::write::DeflateEncoder::new(Vec::new(), level);
    writer.write_all(plain).unwrap();
    writer.finish().unwrap()
}

/// Parts of a text in members of these lengths, with correct lengths and checksums.
fn qz_members(plain: &[u8], lengths: &[usize]) -> Vec<u8> {
    let mut payload = Vec::new();
    let mut rest = plain;
    for &len in lengths {
        let (piece, after) = rest.split_at(len);
        rest = after;
        let deflate = deflate(piece);
        let mut member = vec![0; deflate.len() + qz::MEMBER_OVERHEAD];
        let plain_len = u32::try_from(len).unwrap();
        qz::write_member(&mut member, &deflate, qz::crc32(piece), plain_len).unwrap();
        payload.extend(member);
    }
    assert!(rest.is_empty());
    payload
}

#[test]
fn members_may_be_of_any_lengths_that_add_up() {
    let mut decoder = Decoder::new();
    let plain = Kind::Text.make(300_000, 3);
    for lengths in [
        &[300_000][..],
        &[65_536, 65_536, 65_536, 65_536, 37_856],
        &[1, 299_998, 1],
        &[150_000, 150_000],
    ] {
        let payload = qz_members(&plain, lengths);
        let header = UnitHeader::of(&plain, qz_of(&payload));
        let mut out = vec![0xdb; plain.len()];
        decoder.decode(&header, &payload, &mut out).unwrap();
        assert!(out == plain, "{lengths:?}");
    }
}

fn qz_of(payload: &[u8]) -> Encoded {
    Encoded { codec: Codec::DeflateQz, len: payload.len() }
}

#[test]
fn members_that_contradict_themselves_are_refused_by_name() {
    let mut decoder = Decoder::new();
    let plain = Kind::Text.make(130_000, 3);
    let sound = qz_members(&plain, &[65_536, 64_464]);
    let second = qz::members(&sound, plain.len()).unwrap().nth(1).unwrap().at;
    let end = sound.len();
    // Offset of four bytes to overwrite, their value, and the start of the error.
    for (at, value, reason) in [
        (20, u32::MAX, "member at byte 0: compressed length runs past the end"),
        (20, u32::try_from(end - 28).unwrap(), "member at byte 0: footer cut short"),
        (20, u32::try_from(end - 32).unwrap(), "member at byte 0: header and footer"),
        (16, u32::MAX, "member at byte 0: header and footer"),
        (16, 0, "member at byte 0: header and footer"),
        (second + 12, 0x0008_4342, "no QATzip extra field"),
        (second + 20, 0, "header and footer"),
        (second, 0x0408_8b1e, "not a gzip member"),
        (second - 8, 0x1234_5678, "member at byte 0: bad deflate stream, CRC-32 or length"),
        (end - 8, 0x1234_5678, "bad deflate stream, CRC-32 or length"),
    ] {
        let mut payload = sound.clone();
        payload[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let header = UnitHeader::of(&plain, qz_of(&payload));
        // The buffer already holds the right bytes.
        let error = decoder.decode(&header, &payload, &mut plain.clone()).unwrap_err();
        assert!(matches!(error, DecodeError::Member { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}, not {reason}");
    }
    // Two members that consistently misstate the border between them.
    let mut payload = sound.clone();
    for (at, value) in
        [(16, 65_537_u32), (second - 4, 65_537), (second + 16, 64_463), (end - 4, 64_463)]
    {
        payload[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    let header = UnitHeader::of(&plain, qz_of(&payload));
    let error = decoder.decode(&header, &payload, &mut plain.clone()).unwrap_err();
    assert!(
        error.to_string().contains("member at byte 0: bad deflate stream, CRC-32 or length"),
        "{error}"
    );
    for (at, value) in
        [(16, 65_535_u32), (second - 4, 65_535), (second + 16, 64_465), (end - 4, 64_465)]
    {
        payload[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    let error = decoder.decode(&header, &payload, &mut plain.clone()).unwrap_err();
    assert!(error.to_string().contains("member at byte 0: decodes to more bytes"), "{error}");
    // Bytes between a stream and its footer, which gunzip does not accept either.
    let mut stuffed = deflate(&plain);
    stuffed.extend([0; 5]);
    let mut payload = vec![0; stuffed.len() + qz::MEMBER_OVERHEAD];
    qz::write_member(&mut payload, &stuffed, qz::crc32(&plain), 130_000).unwrap();
    let header = UnitHeader::of(&plain, qz_of(&payload));
    let error = decoder.decode(&header, &payload, &mut plain.clone()).unwrap_err();
    assert!(error.to_string().contains("bad deflate stream, CRC-32 or length"), "{error}");
}

/// A zstd frame of one last block that repeats 'a'.
fn rle(len: u32) -> Vec<u8> {
    let [a, b, c, _] = (len << 3 | 1 << 1 | 1).to_le_bytes();
    vec![0, 0x58, a, b, c, b'a']
}

#[test]
fn a_unit_that_swells_stops_at_its_stated_length() {
    let mut decoder = Decoder::new();
    // Sixteen blocks of 128 KiB from 64 bytes; 1 MiB of zeros as deflate; the same as lz4.
    let blocks = (0..16).flat_map(|_| [2, 0, 0x10, 0]).chain([1, 0, 0]);
    let zstd: Vec<u8> = [0, 0x58].into_iter().chain(blocks).collect();
    let zeros = vec![0; 1 << 20];
    let mut units = vec![(Codec::Zstd, zstd)];
    for codec in [Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
        let mut encoder = Encoder::new(Settings::new(codec, None).unwrap()).unwrap();
        // Not a repeated word.
        let mut plain = zeros.clone();
        plain[0] = 1;
        let mut out = vec![0; 1 << 20];
        let encoded = encoder.encode(&plain, &mut out);
        assert_eq!(encoded.codec, codec);
        units.push((codec, out[..encoded.len].to_vec()));
    }
    for (codec, payload) in units {
        let plain_len = 8192;
        let header = UnitHeader {
            codec,
            plain_len,
            payload_len: u32::try_from(payload.len()).unwrap(),
            checksum: checksum(&zeros[..8192]),
        };
        let error = decoder.decode(&header, &payload, &mut vec![0; 8192]).unwrap_err();
        let swells = matches!(error, DecodeError::Payload { .. } | DecodeError::Member { .. });
        assert!(swells, "{codec}: {error}");
    }
}

#[test]
fn one_decoder_survives_every_bad_unit() {
    let mut decoder = Decoder::new();
    let sound = sound_units(4096);
    let mut rng = Rng(41);
    let mut out = vec![0; 4096];
    for _ in 0..300 {
        for (header, payload, plain) in &sound {
            let mut bad = payload.clone();
            let at = usize::try_from(rng.next() % bad.len() as u64).unwrap();
            bad[at] = bad[at].wrapping_add(1 + rng.next().to_le_bytes()[0] % 255);
            if decoder.decode(header, &bad, &mut out).is_ok() {
                assert!(out == *plain);
            }
            // Decodes into the buffer that the failed decode left behind.
            decoder.decode(header, payload, &mut out).unwrap();
            assert!(out == *plain);
        }
    }
}

/// The payload's bytes, or `None` if it is refused, decoded without a checksum into a buffer full
/// of `dirt`.
fn unchecked(codec: Codec, payload: &[u8], len: usize, dirt: u8) -> Option<Vec<u8>> {
    let mut out = vec![dirt; len];
    Decoder::new().decode_payload(codec, payload, &mut out).ok().map(|()| out)
}

#[test]
fn what_a_damaged_payload_decodes_to_does_not_depend_on_the_buffer() {
    let mut rng = Rng(47);
    let mut decoded = 0;
    for size in [100, 4096, 20_000] {
        for (header, payload, _) in sound_units(size) {
            for _ in 0..200 {
                let mut bad = payload.clone();
                for _ in 0..1 + rng.next() % 3 {
                    let at = usize::try_from(rng.next() % bad.len() as u64).unwrap();
                    bad[at] = rng.next().to_le_bytes()[0];
                }
                let [first, second] =
                    [0, 0xff].map(|dirt| unchecked(header.codec, &bad, size, dirt));
                assert!(first == second, "{}: {bad:02x?}", header.codec);
                decoded += usize::from(first.is_some() && header.codec == Codec::Lz4);
            }
        }
    }
    assert!(decoded > 100, "only {decoded} damaged payloads of lz4 are decoded");
    // Offset zero names bytes that no one has written yet: refused, or bytes of the library's own.
    for offset in 0..=2 {
        for literals in [1, 14] {
            for more in [0, 40, 200] {
                let plain_len = literals + 19 + more + 12;
                let token = [u8::try_from(literals << 4 | 15).unwrap()];
                let bad = [&token[..], &vec![b'a'; literals], &[offset, 0]].concat();
                let len = [u8::try_from(more).unwrap(), 0xc0];
                let bad = [&bad[..], &len, b"bbbbbbbbbbbb"].concat();
                let [first, second] =
                    [0x11, 0xee].map(|dirt| unchecked(Codec::Lz4, &bad, plain_len, dirt));
                assert!(first == second, "offset {offset}: {first:02x?}, {second:02x?}");
                assert!(first.is_some() || offset != 1, "{literals} {more}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Members with some bytes overwritten: everything read lies within payload and unit, and the
    /// iterator agrees with the check.
    #[test]
    fn members_never_exceed_the_payload(
        lengths in prop::collection::vec(1_usize..700, 0..5),
        hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        more in -2_isize..3,
    ) {
        let plain_len = lengths.iter().sum();
        let mut payload = qz_members(&Kind::Text.make(plain_len, 7), &lengths);
        for (at, byte) in hits {
            if !payload.is_empty() {
                let at = at.index(payload.len());
                payload[at] = byte;
            }
        }
        let stated = plain_len.saturating_add_signed(more);
        if let Ok(members) = qz::members(&payload, stated) {
            let members: Vec<_> = members.collect();
            prop_assert_eq!(members.iter().map(|member| member.plain_len).sum::<usize>(), stated);
            let bytes = members.iter().map(|member| member.deflate.len() + qz::MEMBER_OVERHEAD);
            prop_assert_eq!(bytes.sum::<usize>(), payload.len());
        }
    }

    #[test]
    fn arbitrary_payloads_never_panic(
        codec in 0_u8..6,
        payload in prop::collection::vec(any::<u8>(), 1..300),
        plain_len in 1_u32..5000,
        sum in any::<u64>(),
    ) {
        let codec = Codec::from_wire(codec).unwrap();
        let payload_len = u32::try_from(payload.len()).unwrap();
        let header = UnitHeader { codec, plain_len, payload_len, checksum: sum };
        let mut out = vec![0x99; plain_len as usize];
        let result = Decoder::new().decode(&header, &payload, &mut out);
        prop_assert!(result.is_err(), "a random checksum was met");
    }

    #[test]
    fn arbitrary_headers_never_panic_and_are_bounded(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        if let Ok(header) = UnitHeader::from_bytes(&bytes) {
            prop_assert!(header.plain_len as usize <= codec::MAX_PLAIN);
            prop_assert!(header.payload_len <= header.plain_len);
            prop_assert_eq!(&header.to_bytes()[..], &bytes[..UnitHeader::LEN]);
        }
    }
}

#[test]
fn the_valid_units_cover_every_codec() {
    // Each codec must be among the valid units, or its tests test nothing.
    let codecs: std::collections::HashSet<_> =
        sound_units(4096).iter().map(|(header, ..)| header.codec).collect();
    assert_eq!(codecs.len(), 6, "{codecs:?}");
    assert_ne!(Kind::Random.make(64, 1), Kind::Random.make(64, 2));
}
