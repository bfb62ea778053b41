use super::*;

/// An empty last block with fixed codes, then arbitrary bytes: `members` does not examine them.
const STREAM: [u8; 5] = [3, 0, 1, 2, 3];

fn member(plain_len: u32) -> Vec<u8> {
    let mut out = vec![0xee; 64];
    let len = write_member(&mut out, &STREAM, 0xa1b2_c3d4, plain_len).unwrap();
    out.truncate(len);
    out
}

#[test]
fn the_layout_is_the_documented_one() {
    let expected = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x0c\0QZ\x08\0\x00\x10\0\0\x05\0\0\0\
        \x03\0\x01\x02\x03\xd4\xc3\xb2\xa1\x00\x10\0\0";
    assert_eq!(member(4096), expected);
}

#[test]
fn a_member_is_written_only_where_it_fits() {
    for room in 0..64 {
        let mut out = vec![0xee; room];
        let written = write_member(&mut out, &STREAM, 7, 4096);
        assert_eq!(written, (room >= 37).then_some(37), "{room} bytes of room");
        let touched = written.unwrap_or(0);
        assert!(out[touched..].iter().all(|&byte| byte == 0xee), "{room} bytes of room");
    }
}

#[test]
fn members_round_trip() {
    let payload = [member(4096), member(1), member(1 << 20)].concat();
    let plain_len = 4097 + (1 << 20);
    let all: Vec<_> = members(&payload, plain_len).unwrap().collect();
    assert_eq!(all.iter().map(|m| m.plain_len).collect::<Vec<_>>(), [4096, 1, 1 << 20]);
    assert_eq!(all.iter().map(|m| m.at).collect::<Vec<_>>(), [0, 37, 74]);
    assert!(all.iter().all(|m| m.deflate == STREAM && m.crc32 == 0xa1b2_c3d4));
    assert_eq!(members(&[], 0).unwrap().count(), 0);
}

#[track_caller]
fn refused(payload: &[u8], plain_len: usize, at: usize, reason: &'static str) {
    assert_eq!(members(payload, plain_len).unwrap_err(), MemberError { at, reason });
}

#[test]
fn lengths_that_do_not_add_up_are_refused() {
    let payload = [member(4096), member(100)].concat();
    refused(&payload, 4195, 37, LONGER_THAN_UNIT);
    refused(&payload, 4197, 74, "the members end before the unit");
    refused(&payload, 0, 0, LONGER_THAN_UNIT);
    refused(&[], 1, 0, "the members end before the unit");
    refused(&member(0), 0, 0, "empty");
    for (lie, reason) in [
        (u32::MAX, "compressed length runs past the end"),
        (14, "compressed length runs past the end"),
        (13, "footer cut short"),
        (6, "footer cut short"),
        (4, "header and footer state different lengths"),
        (0, "header and footer state different lengths"),
    ] {
        let mut payload = member(4096);
        payload[20..24].copy_from_slice(&lie.to_le_bytes());
        refused(&payload, 4096, 0, reason);
        // The same with a second member behind it, into which the stated length reaches.
        payload.extend(member(100));
        assert!(members(&payload, 4196).is_err(), "{lie} was believed");
    }
    let mut payload = member(u32::MAX);
    payload.extend(member(u32::MAX));
    refused(&payload, 4096, 0, LONGER_THAN_UNIT);
    let empty = [&header(9, 0)[..], &footer(0, 9)].concat();
    refused(&empty, 9, 0, "empty");
}

#[test]
fn every_checked_byte_matters_and_the_others_do_not() {
    let sound = member(4096);
    for at in 0..sound.len() {
        for bit in 0..8 {
            let mut payload = sound.clone();
            payload[at] ^= 1 << bit;
            let read = members(&payload, 4096).map(|mut members| members.next().unwrap());
            let free = matches!(at, 4..10) || (24..29).contains(&at) || (29..33).contains(&at);
            assert_eq!(read.is_ok(), free, "byte {at}, bit {bit}");
        }
    }
    for cut in 1..sound.len() {
        assert!(members(&sound[..cut], 4096).is_err(), "cut to {cut} bytes");
    }
}

#[test]
fn other_extra_fields_are_refused() {
    let with = |flags: u8, extra: &[u8]| {
        let mut bytes = vec![0x1f, 0x8b, 8, flags, 0, 0, 0, 0, 0, 3];
        bytes.extend(extra);
        bytes.extend(STREAM);
        bytes.extend(footer(0, 4096));
        bytes.resize(bytes.len().max(64), 0);
        bytes
    };
    for (flags, extra) in [
        (0, &b""[..]),
        (4, b"\x08\0QZ\x04\0\0\x10\0\0"),
        (4, b"\x0c\0BC\x08\0\0\x10\0\0\x05\0\0\0"),
        (4, b"\x12\0BC\x02\0\0\0QZ\x08\0\0\x10\0\0\x05\0\0\0"),
        (4, b"\x0c\0QZ\x09\0\0\x10\0\0\x05\0\0\0"),
        (12, b"\x0c\0QZ\x08\0\0\x10\0\0\x05\0\0\0name\0"),
        (0x84, b"\x0c\0QZ\x08\0\0\x10\0\0\x05\0\0\0"),
    ] {
        let error = members(&with(flags, extra), 4096).unwrap_err();
        assert_eq!(error.at, 0);
        assert!(error.reason.contains("QATzip"), "{flags} {extra:x?}: {error}");
    }
}
