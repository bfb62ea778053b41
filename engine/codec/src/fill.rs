//! Units that repeat one 8-byte word: zero pages, and pages that the guest filled.

/// The 8-byte word that `plain` repeats, if it is nothing else and longer than one word.
///
/// Stops at the first block that differs, so ordinary data costs one block of comparisons.
pub fn same_filled(plain: &[u8]) -> Option<[u8; WORD]> {
    if plain.len() <= WORD || !plain.len().is_multiple_of(WORD) {
        return None;
    }
    let first = *plain.first_chunk::<WORD>()?;
    // A repeated word equals itself shifted by one word. `memcmp` is the widest vector loop
    // available without `unsafe`; comparing block by block stops it at the first difference.
    let (head, tail) = (&plain[..plain.len() - WORD], &plain[WORD..]);
    let same = head.chunks(BLOCK).zip(tail.chunks(BLOCK)).all(|(a, b)| a == b);
    same.then_some(first)
}

/// Repeats `word` over all of `out`, whose length is a multiple of the word's.
pub(crate) fn fill(out: &mut [u8], word: [u8; WORD]) {
    if word == [word[0]; WORD] {
        out.fill(word[0]);
    } else {
        for chunk in out.chunks_exact_mut(WORD) {
            chunk.copy_from_slice(&word);
        }
    }
}

pub(crate) const WORD: usize = 8;
const BLOCK: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_repeated_word_is_found() {
        for len in (16..=4096).step_by(8).chain([1 << 20]) {
            let word = [1, 2, 3, 4, 5, 6, 7, 8];
            let mut plain = vec![0xee; len];
            fill(&mut plain, word);
            assert_eq!(same_filled(&plain), Some(word));
            for at in [0, 7, 8, len / 2, len - 8, len - 1] {
                plain[at] ^= 0x10;
                assert_eq!(same_filled(&plain), None, "length {len}, byte {at} differs");
                plain[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn lengths_that_are_no_multiple_of_a_word_are_refused() {
        for len in [0, 1, 7, 8, 9, 15, 17, 4095, 4097] {
            assert_eq!(same_filled(&vec![0; len]), None, "length {len}");
        }
        assert_eq!(same_filled(&[0; 16]), Some([0; 8]));
    }
}
