//! Byte identity for any input: random bytes, random grammar, mutated streams, any pieces.

mod common;

use common::check;
use proptest::prelude::*;
use stream::{classify, pack, unpack, Kind, Token, MAX_CHUNK};

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        Just(Kind::Main),
        Just(Kind::Multifd),
        Just(Kind::Recovery),
        Just(Kind::Preempt),
        Just(Kind::Other)
    ]
}

fn page_sizes() -> impl Strategy<Value = usize> {
    prop_oneof![4 => Just(4096usize), 1 => Just(1024), 1 => Just(16384), 1 => Just(65536)]
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        Just(vec![1 << 20]),
        prop::collection::vec(1usize..20, 1..8),
        prop::collection::vec(1usize..9000, 1..8),
    ]
}

/// Pieces that drive the parser: tags, records, headers, and noise between them.
fn soup() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just(b"QEVM\0\0\0\x03".to_vec()),
        Just(b"\x07\0\0\0\x02pc".to_vec()),
        Just(b"\x05\x1econfiguration/target-page-bits\0\0\0\x01\0\0\0\x0a".to_vec()),
        Just(
            b"\x05\x1ecconfiguration/capabilities\0\0\0\x01\0\0\0\x01\x0fx-ignore-shared".to_vec()
        ),
        Just(b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04".to_vec()),
        Just(b"\x02\0\0\0\x02".to_vec()),
        Just(b"\x03\0\0\0\x02".to_vec()),
        Just(b"\x7e\0\0\0\x02".to_vec()),
        Just(b"\x7e\0\0\0\x02\x02\0\0\0\x02".to_vec()),
        Just(b"\x08\0\x03\0\x10\0\0\0\0\0\x20\x10\0\0\0\0\0\0\0\x10\0".to_vec()),
        Just(b"\x08\0\x07\0\x04\0\0\0\x09".to_vec()),
        Just(b"\0\0\0\0\0\0\x20\x04\x06pc.ram\0\0\0\0\0\0\x20\0".to_vec()),
        any::<u64>().prop_map(|v| v.to_be_bytes().to_vec()),
        (any::<u64>(), 0u64..0x400).prop_map(|(a, f)| (a & !0xfff | f).to_be_bytes().to_vec()),
        prop_oneof![Just(0x10u64), Just(0x200)].prop_map(|v| v.to_be_bytes().to_vec()),
        (0u64..64, 0u64..40).prop_map(|(a, n)| {
            let record = |i: u64| [&(((a + i) << 12) | 0x22).to_be_bytes()[..], &[0]].concat();
            (0..n).flat_map(record).collect()
        }),
        (0u64..64, 1usize..4, any::<u8>(), any::<bool>()).prop_map(|(a, n, b, same)| {
            let body = |i: usize| if same { b } else { b.wrapping_mul(i.to_le_bytes()[0]) };
            let page: Vec<u8> = (0..4096).map(body).collect();
            (0..n)
                .flat_map(|i| [&((a + i as u64) << 12 | 0x28).to_be_bytes()[..], &page].concat())
                .collect()
        }),
        multifd_header().prop_map(|h| h),
        prop::collection::vec(any::<u8>(), 0..300),
        (0usize..9000).prop_map(|n| vec![0x5a; n]),
        Just(vec![0; 64]),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

/// A multifd header, mostly valid, with offsets in QEMU's order or in none.
fn multifd_header() -> impl Strategy<Value = Vec<u8>> {
    let fields = (0u32..0x42, 0u32..130, 0u32..130, any::<bool>(), any::<u64>(), any::<u64>());
    fields.prop_map(|(flags, normal, zero, sane, number, start)| {
        let mut h = vec![0; 1344];
        h[..8].copy_from_slice(b"\x11\x22\x33\x44\0\0\0\x01");
        let size = if sane { normal * 4096 } else { normal };
        let alloc = if sane || number % 2 == 0 { 128 } else { 0 };
        for (at, v) in [(8, flags), (12, alloc), (16, normal), (20, size), (32, zero)] {
            h[at..at + 4].copy_from_slice(&v.to_be_bytes());
        }
        h[24..32].copy_from_slice(&number.to_be_bytes());
        h[64..70].copy_from_slice(b"pc.ram");
        for i in 0..128usize {
            let offset = (start >> 20 << 12).wrapping_add(4096 * i as u64);
            h[320 + 8 * i..328 + 8 * i].copy_from_slice(&offset.to_be_bytes());
        }
        h
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_come_back(
        kind in kinds(), size in page_sizes(), cuts in cuts(),
        bytes in prop::collection::vec(any::<u8>(), 0..20_000),
    ) {
        check(kind, size, &bytes, &cuts);
    }

    #[test]
    fn mixed_fragments_come_back(kind in kinds(), size in page_sizes(), cuts in cuts(), bytes in soup()) {
        check(kind, size, &bytes, &cuts);
        let start: &[u8] = match kind {
            Kind::Main => b"QEVM\0\0\0\x03\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04",
            Kind::Multifd => &[&b"\x11\x22\x33\x44\0\0\0\x01"[..], &[0; 56]].concat(),
            Kind::Recovery => b"\x08\0\x09\0\0\x02\0\0\0\x02",
            Kind::Preempt | Kind::Other => &[],
        };
        check(kind, size, &[start, &bytes].concat(), &cuts);
    }

    #[test]
    fn tokens_of_other_bytes_are_refused_or_pack_to_the_bytes(
        a in soup(), b in soup(), kind in kinds(),
    ) {
        // Tokens of `a` on `b`: refused, or packed to exactly `b`.
        let b = &b[..b.len().min(a.len())];
        let mut tokens = Vec::new();
        stream::Tokeniser::new(kind, 4096).feed(&a[..b.len()], &mut tokens);
        let mut out = vec![0; b.len() + 16 * tokens.len() + 64];
        if let Some(len) = pack(b, &tokens, 4096, &mut out) {
            let mut plain = vec![1; b.len()];
            unpack(&out[..len], &mut plain).expect("what packed unpacks");
            prop_assert_eq!(&plain[..], b);
        }
    }

    #[test]
    fn hostile_packed_bytes_are_refused_or_bounded(
        bytes in soup(), flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(), kind in kinds(), len in 0usize..70_000,
    ) {
        let mut tokens = Vec::new();
        let mut tokeniser = stream::Tokeniser::new(kind, 4096);
        tokeniser.feed(&bytes, &mut tokens);
        // The bytes may state another page size.
        let size = tokeniser.facts().page_size;
        let mut out = vec![0; bytes.len() + 16 * tokens.len() + 64];
        let packed = pack(&bytes, &tokens, size, &mut out).expect("room");
        let packed = &mut out[..packed];
        for (at, with) in flips {
            *at.get_mut(packed) ^= with;
        }
        let mut plain = vec![0; bytes.len()];
        let _ = unpack(packed, &mut plain);
        let mut plain = vec![0; len];
        let _ = unpack(packed, &mut plain);
        // A truncated chunk is never whole: some region ends early.
        let cut = cut.index(packed.len());
        let mut plain = vec![0; bytes.len()];
        let _ = unpack(&packed[..cut], &mut plain);
    }
}

#[test]
fn too_long_chunks_and_short_outputs_are_refused() {
    let bytes = vec![7; MAX_CHUNK + 1];
    let raw = |len: usize| [Token::Raw { len: u32::try_from(len).unwrap() }];
    let mut out = vec![0; 2 * MAX_CHUNK];
    assert_eq!(pack(&bytes, &raw(bytes.len()), 4096, &mut out), None);
    let bytes = &bytes[1..];
    let len = pack(bytes, &raw(bytes.len()), 4096, &mut out).expect("fits");
    assert_eq!(len, bytes.len() + 12 + 4);
    assert_eq!(pack(bytes, &raw(bytes.len()), 4096, &mut out[..len - 1]), None);
    assert_eq!(pack(bytes, &raw(bytes.len() - 1), 4096, &mut out), None);
    assert_eq!(pack(bytes, &raw(bytes.len()), 3000, &mut out), None);
    assert!(unpack(&out[..len], &mut vec![0; MAX_CHUNK + 1]).is_err());
}

#[test]
fn the_first_bytes_determine_the_kind() {
    assert_eq!(classify(b""), None);
    assert_eq!(classify(b"QEV"), None);
    assert_eq!(classify(b"QEVM"), Some(Kind::Main));
    assert_eq!(classify(&[0x11, 0x22, 0x33]), None);
    assert_eq!(classify(&[0x11, 0x22, 0x33, 0x44, 9]), Some(Kind::Multifd));
    assert_eq!(classify(&[0x11, 0x22, 0x34]), Some(Kind::Other));
    assert_eq!(classify(b"\x08"), None);
    assert_eq!(classify(b"\x08\0\x0a\0\x07"), Some(Kind::Recovery));
    assert_eq!(classify(b"\x08\0\x09"), Some(Kind::Other));
    assert_eq!(classify(b"QEVN"), Some(Kind::Other));
}
