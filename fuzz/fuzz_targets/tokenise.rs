//! Any bytes, split anywhere: tokens cover them, packing and unpacking restore them, and facts do
//! not depend on the split.
//!
//! Input: byte 0 the kind and the page size, byte 1 the number of piece sizes (0 to 7), that many
//! u16 piece sizes, then the stream.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stream::{pack, unpack, Facts, Kind, Tokeniser};

fuzz_target!(|input: &[u8]| {
    let Some((&[kind, cuts], rest)) = input.split_first_chunk() else { return };
    let page_size = 1 << (10 + kind / 5 % 7);
    let kinds = [Kind::Main, Kind::Multifd, Kind::Other, Kind::Recovery, Kind::Preempt];
    let kind = kinds[usize::from(kind % 5)];
    let Some((cuts, bytes)) = rest.split_at_checked(usize::from(cuts % 8) * 2) else { return };
    let cuts: Vec<usize> =
        cuts.chunks(2).map(|c| usize::from(u16::from_le_bytes([c[0], c[1]])) + 1).collect();
    let whole = feed(kind, page_size, bytes, &[bytes.len().max(1)]);
    if !cuts.is_empty() {
        assert_eq!(feed(kind, page_size, bytes, &cuts), whole, "facts depend on the cuts");
    }
});

fn feed(kind: Kind, page_size: usize, mut bytes: &[u8], cuts: &[usize]) -> Facts {
    let mut tokeniser = Tokeniser::new(kind, page_size);
    let mut tokens = Vec::new();
    for size in cuts.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        let (piece, rest) = bytes.split_at((*size).min(bytes.len()));
        bytes = rest;
        tokens.clear();
        tokeniser.feed(piece, &mut tokens);
        let size = tokeniser.facts().page_size;
        let covered: usize = tokens.iter().map(|token| token.len(size)).sum();
        assert_eq!(covered, piece.len(), "tokens cover the feed");
        let mut packed = vec![0xaa; piece.len() + 64 + 16 * tokens.len()];
        let len = pack(piece, &tokens, size, &mut packed).expect("there is room");
        let mut plain = vec![0x55; piece.len()];
        unpack(&packed[..len], &mut plain).expect("what was packed unpacks");
        assert!(plain == piece, "identical");
    }
    tokeniser.facts().clone()
}
