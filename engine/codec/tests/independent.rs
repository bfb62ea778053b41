//! Every codec against a decoder, and an encoder, that shares no code with ours.

mod data;

use std::io::{Read, Write};

use codec::{Codec, Decoder, Encoded, Encoder, Settings, UnitHeader};
use data::{every_setting, kinds, Kind};

const SIZES: [usize; 11] =
    [2, 17, 100, 4096, 4097, 20_000, 65_535, 65_536, 131_073, 524_288, 525_632];

/// Reads a payload as its documentation says, by other libraries.
fn judge(codec: Codec, payload: &[u8], plain_len: usize) -> Vec<u8> {
    let mut out = vec![0xdb; plain_len];
    match codec {
        Codec::Raw => out = payload.to_vec(),
        Codec::SameFilled => out = payload.repeat(plain_len / 8),
        Codec::Lz4 => {
            let len = lzzzz::lz4::decompress(payload, &mut out).expect("C lz4 reads it");
            out.truncate(len);
        }
        Codec::Zlib => {
            out.clear();
            let mut reader = flate2::bufread::DeflateDecoder::new(payload);
            reader.read_to_end(&mut out).expect("zlib-rs reads it");
            assert_eq!(reader.total_in(), payload.len() as u64, "bytes after the stream");
        }
        Codec::Zstd => {
            out.clear();
            let framed = [&ZSTD_MAGIC[..], payload].concat();
            let mut rest = &framed[..];
            ruzstd::decoding::StreamingDecoder::new(&mut rest)
                .expect("ruzstd reads the header")
                .read_to_end(&mut out)
                .expect("ruzstd reads the blocks");
            assert!(rest.is_empty(), "{} bytes after the frame", rest.len());
        }
    }
    out
}

#[test]
fn what_we_encode_others_decode() {
    for settings in every_setting() {
        let mut encoder = Encoder::new(settings).unwrap();
        for kind in kinds() {
            for size in SIZES {
                // The slow levels and the slow judge: enough is enough.
                if size > 140_000 && settings.level() > 6 {
                    continue;
                }
                let plain = kind.make(size, 23);
                let mut out = vec![0; size];
                let Encoded { codec, len } = encoder.encode(&plain, &mut out);
                let payload = if codec == Codec::Raw { &plain } else { &out[..len] };
                assert!(judge(codec, payload, size) == plain, "{settings:?} {kind:?} {size}");
            }
        }
    }
}

#[test]
fn what_others_encode_we_decode() {
    let mut decoder = Decoder::new();
    for kind in [Kind::Zero, Kind::Text, Kind::Heap] {
        for size in SIZES.into_iter().filter(|&size| size >= 4096) {
            let plain = kind.make(size, 29);
            let mut units = Vec::new();
            for acceleration in [1, 20] {
                let mut payload = Vec::new();
                lzzzz::lz4::compress_to_vec(&plain, &mut payload, acceleration).unwrap();
                units.push((Codec::Lz4, payload));
            }
            let mut payload = Vec::new();
            lzzzz::lz4_hc::compress_to_vec(&plain, &mut payload, 9).unwrap();
            units.push((Codec::Lz4, payload));
            for level in [1, 6, 9] {
                let level = flate2::Compression::new(level);
                let mut writer = flate2::write::DeflateEncoder::new(Vec::new(), level);
                writer.write_all(&plain).unwrap();
                units.push((Codec::Zlib, writer.finish().unwrap()));
            }
            let level = ruzstd::encoding::CompressionLevel::Fastest;
            let framed = ruzstd::encoding::compress_to_vec(&plain[..], level);
            assert_eq!(framed[..4], ZSTD_MAGIC);
            units.push((Codec::Zstd, framed[4..].to_vec()));
            for (codec, payload) in units {
                let header = UnitHeader::of(&plain, Encoded { codec, len: payload.len() });
                let mut back = vec![0xdb; size];
                decoder.decode(&header, &payload, &mut back).expect("a sound unit");
                assert!(back == plain, "{codec} {kind:?} {size}");
            }
        }
    }
}

#[test]
fn stored_blocks_of_zlib_level_0_are_read_if_ever_they_pay() {
    // Our encoder never sends them; a unit of one stored and one compressed block is sound all the
    // same.
    let plain = [&Kind::Random.make(300, 1)[..], &[7; 4000]].concat();
    let mut payload = vec![0, 44, 1, 0xd3, 0xfe];
    payload.extend(&plain[..300]);
    let mut writer = flate2::write::DeflateEncoder::new(&mut payload, flate2::Compression::new(1));
    writer.write_all(&plain[300..]).unwrap();
    writer.finish().unwrap();
    let header = UnitHeader::of(&plain, Encoded { codec: Codec::Zlib, len: payload.len() });
    let mut back = vec![0xdb; plain.len()];
    Decoder::new().decode(&header, &payload, &mut back).unwrap();
    assert!(back == plain);
    let settings = Settings::new(Codec::Zlib, Some(0)).unwrap();
    let encoded = Encoder::new(settings).unwrap().encode(&plain, &mut back);
    assert_eq!(encoded, Encoded { codec: Codec::Raw, len: plain.len() });
}

const ZSTD_MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();
