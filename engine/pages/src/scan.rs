//! Finding pages that repeat one word.

/// Returns the 8-byte word (little-endian) that `page` repeats, if the page is nothing else.
///
/// `None` also for an empty page and for a length that is no multiple of 8. The first 64 bytes rule
/// out most pages; a same-filled page is read once, at memory speed.
#[inline]
pub fn same_filled(page: &[u8]) -> Option<u64> {
    let (first, rest) = page.split_first_chunk::<8>()?;
    if !rest.len().is_multiple_of(8) {
        return None;
    }
    let word = u64::from_le_bytes(*first);
    is_repeated(word, page).then_some(word)
}

/// Whether `words`, a multiple of 8 bytes, repeats `word` throughout.
#[inline]
fn is_repeated(word: u64, words: &[u8]) -> bool {
    let differing = |block: &[u8]| {
        let words =
            block.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("8 bytes")));
        words.fold(0, |bits, w| bits | (w ^ word))
    };
    // One branch per 256 bytes, four to eight vector registers' worth. Pages differ at once or not
    // at all: a finer step costs same-filled pages more than it saves on the others.
    let mut blocks = words.chunks_exact(256);
    let first = words.get(..64).unwrap_or_default();
    differing(first) == 0
        && blocks.by_ref().all(|block| differing(block) == 0)
        && differing(blocks.remainder()) == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, a word at a time.
    fn oracle(page: &[u8]) -> Option<u64> {
        let first = page.get(..8)?;
        (page.len().is_multiple_of(8) && page.chunks(8).all(|word| word == first))
            .then(|| u64::from_le_bytes(first.try_into().expect("8 bytes")))
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(
            word in prop_oneof![Just(0u64), any::<u64>()],
            len in 0usize..5000,
            flip in prop::option::of((0usize..5000, 1u8..)),
        ) {
            let mut page: Vec<u8> = word.to_le_bytes().into_iter().cycle().take(len).collect();
            if let Some((at, bits)) = flip {
                if let Some(byte) = page.get_mut(at) {
                    *byte ^= bits;
                }
            }
            prop_assert_eq!(same_filled(&page), oracle(&page));
        }
    }

    #[test]
    fn one_different_bit_makes_a_page_not_same_filled() {
        for word in [0, u64::MAX, 0x0123_4567_89ab_cdef] {
            let mut page: Vec<u8> = word.to_le_bytes().repeat(512);
            assert_eq!(same_filled(&page), Some(word));
            for at in 0..page.len() {
                page[at] ^= 0x10;
                assert_eq!(same_filled(&page), None, "byte {at}");
                page[at] ^= 0x10;
            }
        }
    }
}
