use proptest::prelude::*;

use super::*;
use crate::wire::OPTION_REPLY_MAGIC;

fn export() -> Export {
    Export { name: "swap".into(), size: 1 << 20 }
}

fn option(number: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(u32_of(body.len()));
    bytes.extend(body);
    bytes
}

fn named(name: &str, more: &[u8]) -> Vec<u8> {
    let mut body = u32_of(name.len()).to_vec();
    body.extend(name.as_bytes());
    body.extend(more);
    body
}

fn query(name: &str, query: &str) -> Vec<u8> {
    let mut more = 1_u32.to_be_bytes().to_vec();
    more.extend(named(query, &[]));
    named(name, &more)
}

/// The types of the replies, and the result of the handshake.
fn talk(options: &[Vec<u8>]) -> (Vec<u32>, Result<Progress, Refusal>) {
    let export = export();
    let mut handshake = Handshake::new(&export);
    let mut input = 3_u32.to_be_bytes().to_vec();
    input.extend(options.concat());
    let mut out = Vec::new();
    let mut last = Ok(Progress::More);
    while !input.is_empty() {
        match handshake.advance(&input, &mut out) {
            Ok((taken, progress)) => {
                input.drain(..taken);
                last = Ok(progress);
                if progress != Progress::Again {
                    break;
                }
            }
            Err(refusal) => {
                last = Err(refusal);
                break;
            }
        }
    }
    let mut kinds = Vec::new();
    let mut rest = &out[..];
    while rest.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()) {
        let word = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().unwrap());
        kinds.push(word(12));
        rest = &rest[20 + word(16) as usize..];
    }
    (kinds, last)
}

#[test]
fn a_modern_client_gets_all_it_asks_for() {
    let (kinds, last) = talk(&[
        option(STRUCTURED_REPLY, &[]),
        option(SET_META_CONTEXT, &query("swap", "base:allocation")),
        option(GO, &named("swap", &[0, 1, 0, 3])),
    ]);
    assert_eq!(kinds, [ACK, META_CONTEXT, ACK, INFO_REPLY, INFO_REPLY, ACK]);
    let session = Session { size: 1 << 20, structured: true, allocation: true };
    assert_eq!(last, Ok(Progress::Serve(session)));
}

#[test]
fn a_context_of_another_name_or_before_structured_replies_is_not_granted() {
    let (_, last) = talk(&[
        option(STRUCTURED_REPLY, &[]),
        option(SET_META_CONTEXT, &query("swap", "base:allocation")),
        option(GO, &named("", &[0, 0])),
    ]);
    assert!(matches!(last, Ok(Progress::Serve(Session { allocation: false, .. }))));
    let (kinds, _) = talk(&[option(SET_META_CONTEXT, &query("", "base:allocation"))]);
    assert_eq!(kinds, [ERR_INVALID]);
    let (kinds, _) = talk(&[
        option(STRUCTURED_REPLY, &[]),
        option(SET_META_CONTEXT, &query("", "qemu:dirty-bitmap:x")),
        option(SET_META_CONTEXT, &query("", "base:")),
        option(LIST_META_CONTEXT, &query("", "base:")),
    ]);
    assert_eq!(kinds, [ACK, ACK, ACK, META_CONTEXT, ACK]);
}

#[test]
fn export_name_gets_size_flags_and_zeros() {
    let export = export();
    let mut handshake = Handshake::new(&export);
    let mut out = Vec::new();
    assert_eq!(handshake.advance(&[0, 0, 0, 1], &mut out), Ok((4, Progress::Again)));
    let asked = option(EXPORT_NAME, b"swap");
    let (taken, last) = handshake.advance(&asked, &mut out).unwrap();
    assert_eq!((taken, out.len()), (asked.len(), 8 + 2 + 124));
    assert!(matches!(last, Progress::Serve(Session { structured: false, .. })));
    assert_eq!(talk(&[option(EXPORT_NAME, b"other")]).1, Err(Refusal::Name));
}

#[test]
fn invalid_options_are_answered_or_end_the_connection() {
    let (kinds, last) = talk(&[
        option(5, &[]),
        option(77, b"whatever"),
        option(GO, &named("other", &[0, 0])),
        option(GO, &[0xff; 8]),
        option(GO, &named("swap", &[0, 9])),
        option(LIST, &[]),
        option(ABORT, &[]),
    ]);
    assert_eq!(
        kinds,
        [ERR_UNSUP, ERR_UNSUP, ERR_UNKNOWN, ERR_INVALID, ERR_INVALID, SERVER, ACK, ACK]
    );
    assert_eq!(last, Ok(Progress::End));
    let mut long = option(GO, &[]);
    long[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(talk(&[long]).1, Err(Refusal::Length { option: GO, len: u32::MAX }));
    assert!(matches!(talk(&[vec![0; 16]]).1, Err(Refusal::Magic(0))));
    let mut handshake = export();
    handshake.name = String::new();
    assert_eq!(
        Handshake::new(&handshake).advance(&[0, 0, 0, 4], &mut Vec::new()),
        Err(Refusal::Flags(4))
    );
    assert_eq!(talk(&vec![option(LIST, &[]); 129]).1, Err(Refusal::Options));
}

proptest! {
    #[test]
    fn no_bytes_panic_or_are_answered_without_bound(
        pieces in prop::collection::vec(
            prop_oneof![
                (0..12_u32, prop::collection::vec(any::<u8>(), 0..64))
                    .prop_map(|(number, body)| option(number, &body)),
                (prop::sample::select(vec![INFO, GO, LIST_META_CONTEXT, SET_META_CONTEXT]),
                    "(|swap|x)", prop::collection::vec(any::<u8>(), 0..40))
                    .prop_map(|(number, name, more)| option(number, &named(&name, &more))),
                Just(option(STRUCTURED_REPLY, &[])),
                prop::collection::vec(any::<u8>(), 0..40),
            ], 0..12),
        cut in 0..2000_usize,
    ) {
        let export = export();
        let mut handshake = Handshake::new(&export);
        let mut input = 3_u32.to_be_bytes().to_vec();
        input.extend(pieces.concat());
        input.truncate(cut);
        let mut at = 0;
        loop {
            let mut out = Vec::new();
            match handshake.advance(&input[at..], &mut out) {
                Ok((taken, Progress::Again)) => {
                    prop_assert!(taken > 0 && out.len() < 512 + taken);
                    at += taken;
                }
                Ok((taken, Progress::More)) => {
                    prop_assert!(taken == 0 && input.len() - at < INPUT);
                    break;
                }
                _ => break,
            }
        }
    }
}
