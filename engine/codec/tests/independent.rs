//! Every codec against a decoder, and an encoder, that shares no code with ours.

mod data;

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use codec::{
    qz, Codec, Decoder, Encoded, Encoder, HistoryEncoder, PartHeader, Settings, UnitHeader,
};
use data::{every_setting, kinds, Kind};

const SIZES: [usize; 11] =
    [2, 17, 100, 4096, 4097, 20_000, 65_535, 65_536, 131_073, 524_288, 525_632];

/// Decodes a payload as its documentation describes, with other libraries.
fn judge(codec: Codec, payload: &[u8], plain_len: usize) -> Vec<u8> {
    let mut out = vec![0xdb; plain_len];
    match codec {
        Codec::Raw => out = payload.to_vec(),
        Codec::SameFilled => out = payload.repeat(plain_len / 8),
        Codec::Lz4 => {
            let len =
                lz4_flex::block::decompress_into(payload, &mut out).expect("lz4_flex reads it");
            out.truncate(len);
        }
        Codec::Zlib => {
            out.clear();
            let mut reader = flate2::bufread::DeflateDecoder::new(payload);
            reader.read_to_end(&mut out).expect("zlib-rs reads it");
            assert_eq!(reader.total_in(), payload.len() as u64, "bytes after the stream");
        }
        Codec::DeflateQz => {
            out.clear();
            let mut reader = flate2::bufread::MultiGzDecoder::new(payload);
            reader.read_to_end(&mut out).expect("zlib-rs reads the members");
            assert!(reader.get_ref().is_empty(), "bytes after the members");
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
fn other_decoders_read_our_units() {
    for settings in every_setting() {
        let mut encoder = Encoder::new(settings).unwrap();
        for kind in kinds() {
            for size in SIZES {
                // The slow levels and the slow reference decoder would take too long on large
                // units.
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

/// The parts of a history are one zstd frame, but for its last block.
#[test]
fn another_decoder_reads_our_histories() {
    const LAST_BLOCK: [u8; 3] = [1, 0, 0];
    for level in [3, 6, 9] {
        let mut encoder = HistoryEncoder::new(0, level, 20).unwrap();
        let (mut all, mut frame) = (Vec::new(), Vec::new());
        for (number, kind) in (0_u32..).zip([Kind::Text, Kind::Heap, Kind::Text, Kind::Zero]) {
            let plain = kind.make(140_000, 31 + u64::from(number) / 2);
            let mut out = vec![0; plain.len()];
            let len = encoder.encode(&plain, &mut out).expect("it shrinks");
            let header = PartHeader::from_bytes(&out).unwrap();
            assert_eq!((header.begins, header.number), (number == 0, number));
            frame.extend_from_slice(&out[PartHeader::LEN..len]);
            all.extend_from_slice(&plain);
        }
        frame.extend_from_slice(&LAST_BLOCK);
        assert!(judge(Codec::Zstd, &frame, all.len()) == all, "level {level}");
    }
}

#[test]
fn units_of_other_encoders_are_decoded() {
    let mut decoder = Decoder::new();
    for kind in [Kind::Zero, Kind::Text, Kind::Heap] {
        for size in SIZES.into_iter().filter(|&size| size >= 4096) {
            let plain = kind.make(size, 29);
            let mut units = Vec::new();
            units.push((Codec::Lz4, lz4_flex::block::compress(&plain)));
            for level in [1, 6, 9] {
                let level = flate2::Compression::new(level);
                let mut writer = flate2::write::DeflateEncoder::new(Vec::new(), level);
                writer.write_all(&plain).unwrap();
                units.push((Codec::Zlib, writer.finish().unwrap()));
            }
            for (pieces, level) in [(qz::MEMBER_PLAIN, 1), (qz::MEMBER_PLAIN, 9), (size, 1)] {
                let level = flate2::Compression::new(level);
                units.push((Codec::DeflateQz, members(&plain, pieces, level)));
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
fn a_unit_with_a_stored_block_is_decoded() {
    // Our encoder never sends stored blocks. A unit of one stored and one compressed block is
    // valid.
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

/// Members with QATzip's extra field, written by another library's gzip encoder. `pieces` of 64 KiB
/// match QATzip's hardware path, one piece for the whole its software path.
fn members(plain: &[u8], pieces: usize, level: flate2::Compression) -> Vec<u8> {
    let mut payload = Vec::new();
    for piece in plain.chunks(pieces) {
        let start = payload.len();
        let extra = [&b"QZ\x08\0"[..], &[0; 8]].concat();
        let builder = flate2::GzBuilder::new().extra(extra).operating_system(255);
        let mut writer = builder.write(payload, level);
        writer.write_all(piece).unwrap();
        payload = writer.finish().unwrap();
        let plain_len = u32::try_from(piece.len()).unwrap();
        let deflate_len = u32::try_from(payload.len() - start - qz::MEMBER_OVERHEAD).unwrap();
        payload[start + 16..][..4].copy_from_slice(&plain_len.to_le_bytes());
        payload[start + 20..][..4].copy_from_slice(&deflate_len.to_le_bytes());
    }
    payload
}

#[test]
fn gunzip_reads_our_units() {
    if Command::new("gunzip").arg("--version").output().is_err() {
        println!("skipped: no gunzip on this machine");
        return;
    }
    for level in [1, 6, 9] {
        let settings = Settings::new(Codec::DeflateQz, Some(level)).unwrap();
        let mut encoder = Encoder::new(settings).unwrap();
        for size in [100, 4096, 65_536, 65_537, 524_288, 1 << 20] {
            let plain = Kind::Text.make(size, 37);
            let mut out = vec![0; size];
            let Encoded { codec, len } = encoder.encode(&plain, &mut out);
            assert_eq!(codec, Codec::DeflateQz);
            let sized = qz::members(&out[..len], size).unwrap().map(|member| member.plain_len);
            let expected: Vec<_> = plain.chunks(qz::MEMBER_PLAIN).map(<[u8]>::len).collect();
            assert_eq!(sized.collect::<Vec<_>>(), expected);
            let mut gunzip = Command::new("gunzip")
                .arg("-c")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut stdin = gunzip.stdin.take().unwrap();
            let payload = out[..len].to_vec();
            let writer = std::thread::spawn(move || stdin.write_all(&payload));
            let output = gunzip.wait_with_output().unwrap();
            writer.join().unwrap().unwrap();
            assert!(output.status.success() && output.stdout == plain, "level {level}, {size}");
        }
    }
}

const ZSTD_MAGIC: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();
