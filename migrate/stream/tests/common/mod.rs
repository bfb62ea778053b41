//! The check that every test of this crate applies to a stream: feed it in pieces, check, pack,
//! unpack.
#![allow(dead_code, reason = "each test binary uses its part")]

use stream::{pack, unpack, Facts, Kind, Token, Tokeniser, MAX_CHUNK};

/// The result for one stream.
pub(crate) struct Outcome {
    pub(crate) facts: Facts,
    pub(crate) tokens: Vec<Token>,
    /// Bytes of all packed chunks.
    pub(crate) packed: usize,
    /// Bytes of structure (and head) in them.
    pub(crate) structure: usize,
}

/// Feeds `bytes` in pieces of the given `sizes`, repeated, and checks that the tokens cover each
/// piece and that it survives packing and unpacking.
pub(crate) fn check(kind: Kind, page_size: usize, bytes: &[u8], sizes: &[usize]) -> Outcome {
    let mut tokeniser = Tokeniser::new(kind, page_size);
    let mut sizes = sizes.iter().cycle();
    let mut rest = bytes;
    let mut tokens = Vec::new();
    let (mut packed, mut structure) = (0, 0);
    let mut room = Vec::new();
    // Dirty on purpose, also from one piece to the next.
    let mut plain = vec![0xa5; 1 << 20];
    let mut tail_seen = None;
    while !rest.is_empty() {
        let n = (*sizes.next().expect("a size")).clamp(1, rest.len().min(MAX_CHUNK));
        let (piece, after) = rest.split_at(n);
        let from = tokens.len();
        let fed = tokeniser.facts().fed;
        tokeniser.feed(piece, &mut tokens);
        let facts = tokeniser.facts();
        let mine = &tokens[from..];
        let size = facts.page_size;
        let covered: usize = mine.iter().map(|token| token.len(size)).sum();
        assert_eq!(covered, n, "tokens cover the feed at {fed}: {mine:?}");
        assert!(mine.iter().all(|token| token.len(size) > 0), "empty token in {mine:?}");
        if facts.tail && tail_seen.is_none() {
            tail_seen = Some(facts.tail_at);
            assert!(facts.tail_at <= facts.fed);
            if facts.tail_at >= fed {
                let mut at = fed;
                let starts = mine.iter().any(|token| {
                    let here = at == facts.tail_at;
                    at += token.len(size) as u64;
                    here
                });
                assert!(starts || at == facts.tail_at, "a token begins at the tail");
            }
        }
        if let Some(at) = tail_seen {
            let taken_back = facts.switched && !facts.tail;
            assert!(taken_back || facts.tail_at == at, "only a switch takes the tail back");
        }
        // Packing adds at most a head and one short operation for every token.
        room.resize(n + 64 + 16 * mine.len(), 0xee);
        let len = pack(piece, mine, size, &mut room).expect("there is room");
        let plain = &mut plain[..n];
        unpack(&room[..len], plain).expect("what was packed unpacks");
        assert!(plain == piece, "the piece at {fed} of {n} bytes came back changed");
        packed += len;
        structure += 12 + u32::from_be_bytes(room[4..8].try_into().unwrap()) as usize;
        rest = after;
    }
    assert_eq!(tokeniser.facts().fed, bytes.len() as u64);
    Outcome { facts: tokeniser.facts().clone(), tokens, packed, structure }
}

/// Bytes under `Raw` tokens.
pub(crate) fn raw_bytes(tokens: &[Token]) -> usize {
    tokens.iter().map(|t| if let Token::Raw { len } = t { *len as usize } else { 0 }).sum()
}

/// Barrier tokens.
pub(crate) fn barriers(tokens: &[Token]) -> u64 {
    tokens.iter().filter(|token| matches!(token, Token::Barrier { .. })).count() as u64
}
