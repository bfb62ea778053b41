use proptest::prelude::*;

use super::*;

const SESSION: Session = Session { size: 1 << 30, structured: true, allocation: true };

fn bytes(flags: u16, kind: u16, offset: u64, length: u32) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&99_u64.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&length.to_be_bytes());
    bytes
}

fn refused(parsed: Parsed) -> Option<(Error, u32)> {
    match parsed {
        Parsed::Refuse { error, skip, cookie: 99, .. } => Some((error, skip)),
        _ => None,
    }
}

#[test]
fn ranges_are_checked_against_the_export() {
    let parse = |kind, offset, length| SESSION.parse(&bytes(0, kind, offset, length));
    for kind in [0, 1, 4, 6, 7] {
        assert!(matches!(parse(kind, (1 << 30) - 4, 4), Parsed::Do(_)), "{kind}");
        assert!(refused(parse(kind, (1 << 30) - 3, 4)).is_some(), "{kind}");
        assert!(refused(parse(kind, u64::MAX, 4)).is_some(), "{kind}");
    }
    assert_eq!(refused(parse(1, 1 << 30, 512)), Some((Error::NoSpace, 512)));
    assert_eq!(refused(parse(0, 0, MAX_REQUEST + 1)), Some((Error::Overflow, 0)));
    assert_eq!(parse(1, 0, MAX_REQUEST + 1), Parsed::Broken(Broken::Length(MAX_REQUEST + 1)));
    // Commands without payload may be longer.
    assert!(matches!(parse(4, 0, 1 << 30), Parsed::Do(_)));
    assert!(matches!(parse(6, 0, 1 << 30), Parsed::Do(_)));
    assert_eq!(parse(2, 7, 7), Parsed::Disconnect);
    assert_eq!(refused(parse(8, 0, 512)), Some((Error::Invalid, 0)));
}

#[test]
fn flags_that_a_command_does_not_have_are_refused() {
    let bare = Session { structured: false, allocation: false, ..SESSION };
    assert!(refused(bare.parse(&bytes(0, 7, 0, 512))).is_some());
    assert!(refused(bare.parse(&bytes(FLAG_DF, 0, 0, 512))).is_some());
    assert!(matches!(SESSION.parse(&bytes(FLAG_DF, 0, 0, 512)), Parsed::Do(_)));
    assert_eq!(
        refused(SESSION.parse(&bytes(FLAG_NO_HOLE, 1, 0, 512))),
        Some((Error::Invalid, 512))
    );
    assert!(refused(SESSION.parse(&bytes(1 << 9, 0, 0, 512))).is_some());
}

proptest! {
    #[test]
    fn any_request_stays_within_the_export(
        flags: u16, kind in 0..9_u16, offset: u64, length: u32, near: bool, size in 0..1_u64 << 40,
    ) {
        let session = Session { size, ..SESSION };
        let offset = if near { offset % (size + 2) } else { offset };
        match session.parse(&bytes(flags, kind, offset, length)) {
            Parsed::Do(request) => {
                prop_assert_eq!((request.cookie, request.length), (99, length));
                if request.command != Command::Flush {
                    prop_assert!(offset.checked_add(u64::from(length)).unwrap() <= size);
                }
                if matches!(request.command, Command::Read { .. } | Command::Write) {
                    prop_assert!(length <= MAX_REQUEST);
                }
            }
            Parsed::Refuse { skip, .. } => prop_assert!(skip <= MAX_REQUEST && (skip == 0 || kind == 1)),
            Parsed::Disconnect => prop_assert_eq!(kind, 2),
            Parsed::Broken(why) => prop_assert_eq!(why, Broken::Length(length)),
        }
    }
}
