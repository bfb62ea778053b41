//! The packed format itself, byte by byte as `PACKED.md` specifies it, and everything that
//! unpacking refuses.

use stream::{pack, unpack, Kind, Token, Tokeniser, UnpackError};

const PAGE: usize = 4096;

/// A packed chunk of format 1 with 4 KiB pages.
fn chunk(structure: &[u8], literals: &[u8], bodies: &[u8]) -> Vec<u8> {
    let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap().to_be_bytes();
    [&[1, 12, 0, 0][..], &len(structure), &len(literals), structure, literals, bodies].concat()
}

fn records(flags: u64, first: u64, bodies: &[Vec<u8>]) -> Vec<u8> {
    let record = |(i, body): (u64, &Vec<u8>)| {
        [&(((first + i) << 12) | flags).to_be_bytes()[..], body].concat()
    };
    (0..).zip(bodies).flat_map(record).collect()
}

/// A body that does not repeat one word.
fn body(seed: u8) -> Vec<u8> {
    (0..PAGE).map(|i| (i / 3).to_le_bytes()[0] ^ seed).collect()
}

#[test]
fn a_main_chunk_packs_to_the_documented_bytes() {
    let bodies = [body(1), body(2), body(3)];
    let plain = [
        &b"abc"[..],
        &records(0x28, 16, &bodies[..2]),
        &records(0x28, 18, &[vec![7; PAGE]]),
        &records(0x22, 2, &vec![vec![0]; 300]),
        &bodies[2],
        &vec![0; 2 * PAGE],
        &0x10u64.to_be_bytes(),
    ]
    .concat();
    let tokens = [
        Token::Raw { len: 3 },
        Token::Pages { first: 0x10028, count: 3 },
        Token::ZeroRun { first: 0x2022, count: 300 },
        Token::Bodies { count: 3 },
        Token::Barrier { len: 8 },
    ];
    let sevens = [0x87, 0x8e, 0x9c, 0xb8, 0xf0, 0xe0, 0xc1, 0x83, 0x07];
    let structure = [
        &[3 << 3][..],              // three literals
        &[2 << 3 | 1, 32],          // two pages, 16 on
        &[1 << 3 | 2, 0],           // one filled page behind them,
        &sevens,                    // of 0x0707070707070707
        &[0x65 | 0x80, 0x12, 0x21], // 300 zeros (300 << 3 | 5), from page 19 back to 2: -17
        &[1 << 3 | 3],              // a body
        &[2 << 3 | 4, 0],           // two zero bodies
        &[8 << 3],                  // eight literals
    ]
    .concat();
    let literals = [&b"abc"[..], &0x10u64.to_be_bytes()].concat();
    let expected = chunk(&structure, &literals, &bodies.concat());
    let mut out = vec![0xee; plain.len()];
    let len = pack(&plain, &tokens, PAGE, &mut out).expect("room");
    assert_eq!(out[..12], expected[..12]);
    assert_eq!(&out[12..12 + structure.len()], &structure[..]);
    assert!(out[..len] == expected);
    let mut back = vec![0xdd; plain.len()];
    unpack(&expected, &mut back).expect("a documented chunk");
    assert!(back == plain);
}

#[test]
fn a_multifd_header_unpacks_from_the_documented_code() {
    // Pages 0..8 of "ram", of which 1, 2 and 7 are zero; packet 5; then a SYNC as 9.2 writes it.
    let first = [2u8 | 4, 0, 0x80, 0x01, 5, 3, 10, 31];
    let id = [&[0; 28][..], b"ram"].concat();
    let runs = [0, 7, 0b1000_0110];
    let sync = [2u8 | 4, 1, 0, 0, 0, 2, 0];
    let structure = [
        // 42 << 3 | 6: a header in 42 bytes of code.
        &[0xd6, 0x02][..],
        &first,
        &id,
        &runs,
        &[7 << 3 | 6],
        &sync,
    ]
    .concat();
    let mut plain = vec![0; 2 * 1344];
    for header in plain.chunks_mut(1344) {
        header[..8].copy_from_slice(b"\x11\x22\x33\x44\0\0\0\x01");
    }
    for (at, value) in [(12, 128u32), (16, 5), (20, 5 * 4096), (28, 5), (32, 3)] {
        plain[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
    plain[64..67].copy_from_slice(b"ram");
    for (i, page) in [0u64, 6, 5, 3, 4, 2, 7, 1].into_iter().enumerate() {
        plain[320 + 8 * i..][..8].copy_from_slice(&(page << 12).to_be_bytes());
    }
    plain[1344 + 11] = 1;
    plain[1344 + 31] = 6;
    let mut back = vec![0xdd; plain.len()];
    unpack(&chunk(&structure, &[], &[]), &mut back).expect("a documented chunk");
    let differs = back.iter().zip(&plain).position(|(a, b)| a != b);
    assert_eq!(differs, None);
    // Packing the same bytes takes no more bytes.
    let mut tokens = vec![Token::MultifdHeader; 2];
    let mut out = vec![0; 4096];
    assert_eq!(pack(&plain, &tokens, PAGE, &mut out), Some(12 + structure.len()));
    tokens.pop();
    assert_eq!(pack(&plain, &tokens, PAGE, &mut out), None, "tokens must cover the bytes");
}

#[test]
fn everything_else_is_refused_by_name_and_place() {
    use UnpackError as E;
    let unpacked = |packed: &[u8], len: usize| unpack(packed, &mut vec![3; len]).unwrap_err();
    let code = |structure: &[u8], len| unpacked(&chunk(structure, b"ab", &[0; PAGE]), len);
    assert_eq!(unpacked(&[1; 11], 0), E::Short { len: 11, need: 12 });
    let mut long = chunk(&[], &[], &[]);
    long[7] = 9;
    assert_eq!(unpacked(&long, 0), E::Short { len: 12, need: 21 });
    long[4..12].fill(0xff);
    assert!(matches!(unpacked(&long, 0), E::Short { len: 12, .. }));
    for (at, value) in [(0, 0), (0, 2), (1, 9), (1, 17), (1, 200), (2, 1), (3, 1)] {
        let mut bad = chunk(&[], &[], &[]);
        bad[at] = value;
        assert!(matches!(unpacked(&bad, 0), E::Format { .. }), "{at} {value}");
    }
    assert_eq!(unpacked(&[], (1 << 20) + 1), E::PlainTooLong { len: (1 << 20) + 1 });
    assert_eq!(code(&[1 << 3 | 1], 5000), E::StructureEnds { at: 1 });
    assert_eq!(code(&[0x80], 5000), E::StructureEnds { at: 0 });
    assert_eq!(code(&[0xff; 11], 5000), E::Varint { at: 0 });
    assert_eq!(
        code(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2], 9),
        E::Varint { at: 0 }
    );
    for op in 0..8 {
        assert_eq!(code(&[op], 5000), E::Empty { op, at: 0 });
    }
    assert_eq!(code(&[2 << 3], 1), E::Overrun { op: 0, at: 0, len: 2, room: 1 });
    assert_eq!(code(&[3 << 3], 9), E::Starved { op: 0, at: 0, len: 3, left: 2 });
    assert_eq!(code(&[1 << 3 | 1, 0], 4103), E::Overrun { op: 1, at: 0, len: 4104, room: 4103 });
    let twice = [1 << 3, 2 << 3 | 3];
    assert_eq!(code(&twice, 20_000), E::Starved { op: 3, at: 1, len: 8192, left: 4096 });
    let huge = [0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0];
    assert!(matches!(code(&huge, 9), E::Overrun { op: 5, at: 0, len: u64::MAX, room: 9 }));
    assert_eq!(code(&[2 << 3 | 7], 5000), E::Varint { at: 0 });
    assert_eq!(code(&[1 << 3 | 7], 5000), E::Starved { op: 7, at: 0, len: 1344, left: 2 });

    // Headers: bits, too many pages, a long id, a missing previous header, runs, too long a code.
    let header = |code_bytes: &[u8]| {
        let n = u8::try_from(code_bytes.len()).unwrap();
        assert!(n < 16);
        code(&[&[n << 3 | 6], code_bytes].concat(), 5000)
    };
    let what = |error| match error {
        E::Header { what, .. } => what,
        other => panic!("{other}"),
    };
    assert_eq!(what(header(&[8])), "unknown bits");
    assert_eq!(what(header(&[6, 0, 0, 100, 29])), "more pages than a packet holds");
    assert_eq!(what(header(&[6, 0, 0, 0, 0, 0, 0x9d, 2])), "block id too long");
    assert_eq!(what(header(&[7, 0, 0, 0, 0, 0])), "no header before");
    assert_eq!(what(header(&[6, 0, 0, 2, 0, 0, 0, 0, 2])), "runs exceed the pages");
    assert_eq!(what(header(&[6, 0, 0, 0, 0, 0, 0, 0])), "code goes on");
    assert_eq!(header(&[6, 0, 0, 2, 0, 0, 0, 0]), E::StructureEnds { at: 8 });
    let wide = [6, 0x80, 0x80, 0x80, 0x80, 0x10];
    assert_eq!(header(&wide), E::Varint { at: 1 });

    // Unused bytes.
    let over = |plain, literals, bodies| E::LeftOver { plain, literals, bodies };
    assert_eq!(code(&[2 << 3], 5), over(3, 0, PAGE));
    assert_eq!(code(&[1 << 3, 1 << 3 | 3], 4097), over(0, 1, 0));
    assert_eq!(code(&[], 0), over(0, 2, PAGE));
}

#[test]
fn tokens_that_contradict_the_bytes_are_refused() {
    let zeros = records(0x22, 5, &vec![vec![0]; 20]);
    let pages = records(0x28, 5, &[body(1), body(2), body(3)]);
    let mut out = vec![0; 70_000];
    let mut lies = |bytes: &[u8], token| pack(bytes, &[token], PAGE, &mut out).is_none();
    assert!(!lies(&zeros, Token::ZeroRun { first: 0x5022, count: 20 }));
    assert!(lies(&zeros, Token::ZeroRun { first: 0x6022, count: 20 }));
    assert!(lies(&zeros, Token::ZeroRun { first: 0x5022, count: 19 }));
    assert!(lies(&zeros, Token::ZeroRun { first: 0x5022, count: 21 }));
    let mut filled = zeros.clone();
    filled[9 * 7 + 8] = 1;
    assert!(lies(&filled, Token::ZeroRun { first: 0x5022, count: 20 }));
    filled[9 * 7 + 8] = 0;
    filled[9 * 7 + 7] ^= 4;
    assert!(lies(&filled, Token::ZeroRun { first: 0x5022, count: 20 }));
    assert!(!lies(&pages, Token::Pages { first: 0x5028, count: 3 }));
    assert!(lies(&pages, Token::Pages { first: 0x4028, count: 3 }));
    let mut other = pages.clone();
    other[2 * 4104 + 7] ^= 0x20;
    assert!(lies(&other, Token::Pages { first: 0x5028, count: 3 }));
    // Flags that differ from the run's.
    let compressed = records(0x120, 5, &[body(1)]);
    assert!(lies(&compressed, Token::Pages { first: 0x5120, count: 1 }));
}

#[test]
fn streams_without_grammar_are_one_literal() {
    let bytes = body(9);
    let mut tokens = Vec::new();
    Tokeniser::new(Kind::Other, PAGE).feed(&bytes, &mut tokens);
    assert_eq!(tokens, [Token::Raw { len: 4096 }]);
}
