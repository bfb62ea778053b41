//! Encoded units decode to the same bytes, at every size, level and kind of data.

mod data;

use codec::{Codec, Decoder, Encoded, Encoder, Settings, UnitHeader, MAX_PLAIN};
use data::{every_setting, kinds, Kind};
use proptest::prelude::*;

/// Encodes, checks the promises of `Encoder::encode`, decodes into a dirty buffer, compares.
fn round_trip(encoder: &mut Encoder, decoder: &mut Decoder, plain: &[u8], room: usize) -> Encoded {
    let mut out = vec![0xa5; room];
    let encoded = encoder.encode(plain, &mut out);
    let payload = match encoded.codec {
        Codec::Raw => {
            assert_eq!(encoded.len, plain.len());
            plain
        }
        _ => {
            assert!(encoded.len < plain.len(), "{encoded:?} for {} bytes", plain.len());
            &out[..encoded.len]
        }
    };
    let header = UnitHeader::of(plain, encoded);
    let header = UnitHeader::from_bytes(&header.to_bytes()).expect("our own header");
    let mut back = vec![0x5a; plain.len()];
    decoder.decode(&header, payload, &mut back).expect("our own unit");
    assert!(back == plain, "{encoded:?} of {} bytes came back changed", plain.len());
    encoded
}

#[test]
fn every_size_level_and_kind_comes_back() {
    let sizes = [0, 1, 2, 7, 8, 9, 15, 16, 17, 100, 4095, 4096, 4097, 16384, 65534, 65535, 65536];
    let mut decoder = Decoder::new();
    for settings in every_setting() {
        let mut encoder = Encoder::new(settings).unwrap();
        for kind in kinds() {
            for size in sizes {
                round_trip(&mut encoder, &mut decoder, &kind.make(size, 7), size);
            }
        }
    }
}

#[test]
fn batches_up_to_the_largest_come_back() {
    let sizes = [524_288, 524_287, 525_632, MAX_PLAIN - 1, MAX_PLAIN];
    let mut decoder = Decoder::new();
    for (codec, levels) in [
        (Codec::Lz4, [1, -7, -63]),
        (Codec::Zlib, [1, 1, 6]),
        (Codec::Zstd, [-5, 1, 3]),
        (Codec::DeflateQz, [1, 1, 6]),
    ] {
        for level in levels {
            let mut encoder = Encoder::new(Settings::new(codec, Some(level)).unwrap()).unwrap();
            for kind in kinds() {
                for size in sizes {
                    round_trip(&mut encoder, &mut decoder, &kind.make(size, 11), size);
                }
            }
        }
    }
}

#[test]
fn each_kind_ends_in_the_codec_that_fits_it() {
    let mut decoder = Decoder::new();
    for settings in every_setting() {
        let mut encoder = Encoder::new(settings).unwrap();
        for kind in kinds() {
            let plain = kind.make(4096, 3);
            let got = round_trip(&mut encoder, &mut decoder, &plain, 4096).codec;
            let stored = settings.codec() == Codec::Zlib && settings.level() == 0;
            let expected = match (settings.codec(), kind) {
                (Codec::Raw, _) => Codec::Raw,
                (_, Kind::Zero | Kind::Word) => Codec::SameFilled,
                (_, Kind::Random) => Codec::Raw,
                _ if stored => Codec::Raw,
                (codec, _) => codec,
            };
            assert_eq!(got, expected, "{settings:?} on {kind:?}");
        }
    }
}

#[test]
fn an_encoder_can_change_codec_between_any_two_units() {
    let mut decoder = Decoder::new();
    let mut encoder = Encoder::new(Settings::default()).unwrap();
    let settings: Vec<_> = every_setting().collect();
    for first in &settings {
        for second in &settings {
            for setting in [first, second] {
                encoder.set(*setting).unwrap();
                assert_eq!(encoder.settings(), *setting);
                let plain = Kind::Text.make(8192, 5);
                let encoded = round_trip(&mut encoder, &mut decoder, &plain, 8192);
                // Earlier settings leave no trace: a fresh encoder gives the same result.
                let mut fresh = Encoder::new(*setting).unwrap();
                assert_eq!(encoded, round_trip(&mut fresh, &mut decoder, &plain, 8192));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Arbitrary bytes, and arbitrary repeats of earlier ones, with one encoder and decoder that
    /// keep their state from case to case.
    #[test]
    fn arbitrary_bytes_come_back(
        pieces in prop::collection::vec(
            (prop::collection::vec(any::<u8>(), 0..600), 0_usize..5000, 0_usize..3000), 0..12),
        setting in 0_usize..every_setting().count(),
    ) {
        let mut plain: Vec<u8> = Vec::new();
        for (fresh, back, len) in pieces {
            plain.extend(&fresh);
            for _ in 0..len {
                let at = plain.len().saturating_sub(1 + back % (plain.len() + 1));
                plain.push(plain.get(at).copied().unwrap_or(0));
            }
        }
        let settings = every_setting().nth(setting).unwrap();
        let mut encoder = Encoder::new(settings).unwrap();
        let mut decoder = Decoder::new();
        for _ in 0..2 {
            round_trip(&mut encoder, &mut decoder, &plain, plain.len());
        }
    }
}

#[test]
fn a_payload_is_shorter_than_its_plain_bytes_down_to_the_last_byte() {
    let mut rng = data::Rng(43);
    let mut decoder = Decoder::new();
    // Barely compressible: for some of these a codec's output is as long as its input, which is no
    // gain.
    for (codec, level, fixed) in [
        (Codec::Lz4, 1, 0),
        (Codec::Lz4, -15, 0),
        (Codec::Zlib, 6, 0),
        (Codec::Zstd, 1, 0),
        (Codec::DeflateQz, 6, codec::qz::MEMBER_OVERHEAD),
    ] {
        let mut encoder = Encoder::new(Settings::new(codec, Some(level)).unwrap()).unwrap();
        let (mut gains, mut raws) = (0, 0);
        for round in 0..20_000 {
            let len = 2 + 2 * fixed + round % 60;
            let mut plain = Kind::Random.make(len, rng.next());
            let repeat = usize::try_from(rng.next() % 24).unwrap() + fixed;
            let repeat = repeat.min(len / 2);
            plain.copy_within(..repeat, len - repeat);
            match round_trip(&mut encoder, &mut decoder, &plain, len).codec {
                Codec::Raw => raws += 1,
                _ => gains += 1,
            }
        }
        assert!(gains > 100 && raws > 100, "{codec}: {gains} gains, {raws} raw");
    }
}
