//! gzip streams with a wrong length in a member's header, or with a hole.

use filter::{compress, decompress, FilterError, Format, Options, Totals};

fn packed(plain: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    compress(&Options::new(Format::Gzip, 1), &mut &*plain, &mut out).unwrap();
    out
}

fn unpacked(stream: &[u8]) -> (Result<Totals, FilterError>, Vec<u8>) {
    let mut out = Vec::new();
    (decompress(Format::Gzip, 2, &mut &*stream, &mut out), out)
}

/// Two equal members, of which the first states the length of both.
#[test]
fn a_member_that_ends_before_its_stated_length_is_refused() {
    let plain = vec![0; 2 << 20];
    let mut stream = packed(&plain);
    let both = u32::try_from(stream.len()).unwrap();
    assert_eq!(stream[16..20], (both / 2).to_le_bytes(), "the member's own length");
    stream[16..20].copy_from_slice(&both.to_le_bytes());
    let (result, out) = unpacked(&stream);
    assert!(result.is_err(), "{} of {} bytes are written", out.len(), plain.len());
    assert!(out.is_empty());
}

/// As a file has them in which blocks were lost.
#[test]
fn zeros_are_padding_only_at_the_end_of_a_stream() {
    let one = packed(b"one");
    for zeros in [1, 512, 3 << 20] {
        let padded = [&one[..], &vec![0; zeros]].concat();
        assert!(unpacked(&padded).0.is_ok(), "{zeros}");
        let holed = [&padded[..], &one].concat();
        let (result, out) = unpacked(&holed);
        assert!(result.is_err() && out == b"one", "{zeros}: {result:?}");
    }
}
