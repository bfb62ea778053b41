//! Streams before judges: other decoders, other encoders, damage at any byte.

use std::io::{Read, Write};

use filter::{compress, decompress, FilterError, Format, Options, Totals};
use proptest::prelude::*;

const FORMATS: [Format; 2] = [Format::Zstd, Format::Gzip];

/// Bytes like a guest's: pages of zeros, of text and of noise.
fn plain(len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 4096);
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    while out.len() < len {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        match word >> 62 {
            0 => out.extend([0; 4096]),
            1 => {
                (0..512_u64).for_each(|at| out.extend((word ^ at.wrapping_mul(word)).to_le_bytes()))
            }
            _ => (0..256).for_each(|at| writeln!(out, "{:>15}", at % (word >> 60)).unwrap()),
        }
    }
    out.truncate(len);
    out
}

fn packed(format: Format, threads: usize, plain: &[u8]) -> (Vec<u8>, Totals) {
    let mut out = Vec::new();
    let totals = compress(&Options::new(format, threads), &mut &*plain, &mut out).unwrap();
    assert_eq!((totals.read, totals.written), (plain.len() as u64, out.len() as u64));
    (out, totals)
}

fn unpacked(format: Format, stream: &[u8]) -> (Result<Totals, FilterError>, Vec<u8>) {
    let mut out = Vec::new();
    (decompress(format, 2, &mut &*stream, &mut out), out)
}

/// A decoder that shares no line with ours.
fn judged(format: Format, stream: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    match format {
        Format::Gzip => {
            flate2::bufread::MultiGzDecoder::new(stream).read_to_end(&mut out).unwrap();
        }
        Format::Zstd => {
            let mut rest = stream;
            while !rest.is_empty() {
                let mut frame = ruzstd::decoding::StreamingDecoder::new(&mut rest).unwrap();
                frame.read_to_end(&mut out).unwrap();
            }
        }
    }
    out
}

#[test]
fn other_decoders_read_a_stream_and_so_does_this_one_in_parallel() {
    for format in FORMATS {
        for len in [0, 1, 4096, (1 << 20) - 1, 1 << 20, 2 << 20, (5 << 20) + 3] {
            let plain = plain(len);
            let (stream, totals) = packed(format, 3, &plain);
            assert!(judged(format, &stream) == plain, "{format:?} {len}");
            let (again, out) = unpacked(format, &stream);
            assert!(out == plain, "{format:?} {len}");
            let again = again.unwrap();
            assert_eq!((again.frames, again.parallel), (totals.frames, totals.frames));
            assert_eq!((again.read, again.written), (totals.written, totals.read));
        }
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_byte() {
    let plain = plain(9 << 20);
    for format in FORMATS {
        let (one, _) = packed(format, 1, &plain);
        assert!(packed(format, 4, &plain).0 == one, "{format:?}");
    }
}

/// As the usual programs write: one frame or member that states no length.
fn foreign(format: Format, plain: &[u8]) -> Vec<u8> {
    match format {
        Format::Gzip => {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(plain).unwrap();
            gzip.finish().unwrap()
        }
        Format::Zstd => {
            let mut context = zstd_safe::CCtx::create();
            context.set_parameter(zstd_safe::CParameter::ChecksumFlag(true)).unwrap();
            context.set_parameter(zstd_safe::CParameter::ContentSizeFlag(false)).unwrap();
            let mut out = Vec::with_capacity(zstd_safe::compress_bound(plain.len()));
            context.compress2(&mut out, plain).unwrap();
            out
        }
    }
}

#[test]
fn streams_of_other_encoders_are_read() {
    let plain = plain(5 << 20);
    let (front, back) = plain.split_at(3 << 20);
    for format in FORMATS {
        let stream = foreign(format, &plain);
        let (totals, out) = unpacked(format, &stream);
        assert!(out == plain && totals.unwrap().parallel == 0, "{format:?}");
        // Frames of both kinds in one stream.
        let mixed = [packed(format, 2, front).0, foreign(format, back), packed(format, 2, b"").0];
        let (totals, out) = unpacked(format, &mixed.concat());
        let totals = totals.unwrap();
        assert!(out == plain && totals.parallel + 1 == totals.frames, "{format:?} {totals:?}");
    }
    let padded = [foreign(Format::Gzip, front), vec![0; 700]].concat();
    assert!(unpacked(Format::Gzip, &padded).1 == front);
    // A skippable frame.
    let skipped = [b"\x50\x2a\x4d\x18\x03\0\0\0abc".to_vec(), packed(Format::Zstd, 1, front).0];
    assert!(unpacked(Format::Zstd, &skipped.concat()).1 == front);
}

#[test]
fn output_before_an_error_is_a_prefix_and_the_error_names_the_frame() {
    let plain = plain(3 << 20);
    for format in FORMATS {
        let (mut stream, totals) = packed(format, 2, &plain);
        // A byte of the last frame's checksum.
        let last = stream.len() - if format == Format::Zstd { 1 } else { 5 };
        stream[last] ^= 1;
        let (error, out) = unpacked(format, &stream);
        let error = error.unwrap_err().to_string();
        let name = format!("frame {} at byte ", totals.frames - 1);
        assert!(error.starts_with(&name), "{error}");
        let unit = if format == Format::Zstd { 2 << 20 } else { 1 << 20 };
        assert_eq!(out.len(), 2 << 20, "the frames before, of {unit} bytes");
        assert!(plain.starts_with(&out));
        for cut in [1, 5, 17, last / 2, last] {
            let (error, out) = unpacked(format, &stream[..cut]);
            assert!(error.is_err() && plain.starts_with(&out), "{format:?} {cut}");
        }
        for other in [&b""[..], b"x", b"no stream at all", &[0; 64]] {
            assert!(unpacked(format, other).0.is_err(), "{format:?} {other:?}");
        }
        let garbage = [&packed(format, 1, &plain).0[..], b"garbage"].concat();
        assert!(unpacked(format, &garbage).0.is_err());
    }
}

proptest! {
    #[test]
    fn a_flipped_bit_is_found_or_changes_nothing(at in any::<prop::sample::Index>(), bit in 0..8) {
        let plain = plain(20_000);
        for format in FORMATS {
            let (mut stream, _) = packed(format, 1, &plain);
            let at = at.index(stream.len());
            stream[at] ^= 1_u8 << bit;
            let (result, out) = unpacked(format, &stream);
            prop_assert!(result.is_err() || out == plain, "{format:?}: byte {at}");
        }
    }

    #[test]
    fn any_bytes_are_a_stream_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for (format, magic) in [(Format::Zstd, &b"\x28\xb5\x2f\xfd"[..]), (Format::Gzip, b"\x1f\x8b\x08")] {
            // Must neither panic nor hang.
            let _ = unpacked(format, &bytes);
            let _ = unpacked(format, &[magic, &bytes[..]].concat());
        }
    }
}

/// Bytes that do not compress lie in a frame as they are, so a damaged one decodes to wrong bytes.
#[test]
fn no_byte_of_a_damaged_frame_is_written() {
    let mut word = 1_u64;
    let noise: Vec<u8> = (0..300_000)
        .flat_map(|_| {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (word >> 32).to_le_bytes()[..4].to_vec()
        })
        .collect();
    for format in FORMATS {
        for mut stream in [foreign(format, &noise), packed(format, 2, &noise).0] {
            let middle = stream.len() / 3;
            stream[middle] ^= 1;
            let (result, out) = unpacked(format, &stream);
            assert!(result.is_err() && out.is_empty(), "{format:?}: {} bytes", out.len());
        }
    }
}

#[test]
fn a_level_that_does_not_exist_is_refused() {
    for (format, level) in [(Format::Zstd, 20), (Format::Zstd, 0), (Format::Gzip, 13)] {
        let options = Options { level, ..Options::new(format, 1) };
        let error = compress(&options, &mut &b""[..], &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains(&format!("has no level {level}")), "{error}");
    }
}

/// A reader that has gone.
struct Gone;

impl Write for Gone {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn an_output_that_breaks_ends_both_ways() {
    let plain = plain(8 << 20);
    for format in FORMATS {
        let error = compress(&Options::new(format, 2), &mut &*plain, &mut Gone).unwrap_err();
        assert!(matches!(error, FilterError::Io { what: "write", .. }));
        for stream in [packed(format, 2, &plain).0, foreign(format, &plain)] {
            let error = decompress(format, 2, &mut &*stream, &mut Gone).unwrap_err();
            assert!(matches!(error, FilterError::Io { what: "write", .. }), "{error:?}");
        }
    }
}
