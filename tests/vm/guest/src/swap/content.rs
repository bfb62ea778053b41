//! The expected contents of memory: a pure function of seed, page and version.
//!
//! Half of the pages are text, a quarter records with counters and pointers, an eighth mostly
//! empty, a sixteenth random, which resembles a heap. zstd compresses it to a third. No two pages
//! are the same.

use crate::pattern::{mix, PAGE};

/// One page.
pub(crate) type Page = [u8; PAGE];

/// Writes the contents of page `index` in `version`.
pub(crate) fn fill(seed: u64, index: u64, version: u64, page: &mut Page) {
    let mut state = mix(seed, index, version);
    let kind = state % 16;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    match kind {
        0..=8 => text(&mut next, page),
        9..=12 => records(index, &mut next, page),
        13 | 14 => {
            page.fill(0);
            for _ in 0..24 {
                let at = low(next(), PAGE / 8) * 8;
                page[at..at + 8].copy_from_slice(&next().to_le_bytes());
            }
        }
        _ => page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&next().to_le_bytes())),
    }
    // No two versions of any page are the same, and a page in another's place is detected.
    page[..8].copy_from_slice(&mix(index, version, seed).to_le_bytes());
}

/// Writes records of a program whose fields have long names, each once a page, and values of their
/// own: pages with more in common with each other than within themselves. A pure function, like
/// [`fill`].
pub(crate) fn fill_named(seed: u64, index: u64, page: &mut Page) {
    let mut state = mix(seed, index, 0) | 1;
    let mut at = 0;
    for field in 1_u64.. {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let name = mix(seed, field, u64::MAX);
        for byte in format!("{name:020x}=<{state:016x}>").bytes() {
            if at == PAGE {
                return;
            }
            page[at] = byte;
            at += 1;
        }
    }
}

/// Writes random contents, and zeros from the middle on. A pure function, like [`fill`].
pub(crate) fn fill_half(seed: u64, index: u64, version: u64, page: &mut Page) {
    fill_random(seed, index, version, page);
    page[PAGE / 2..].fill(0);
}

/// Writes random contents, which do not compress. A pure function, like [`fill`].
pub(crate) fn fill_random(seed: u64, index: u64, version: u64, page: &mut Page) {
    let mut state = mix(seed, index, version) | 1;
    for word in page.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// The offset at which `page` differs from the result of `fill`; `None` if it is right.
pub(crate) fn wrong(
    fill: impl Fn(u64, u64, u64, &mut Page),
    (seed, index, version): (u64, u64, u64),
    page: &Page,
    scratch: &mut Page,
) -> Option<String> {
    fill(seed, index, version, scratch);
    if page == scratch {
        return None;
    }
    let at = page.iter().zip(scratch.iter()).position(|(a, b)| a != b).unwrap_or(0);
    let bad = page.iter().zip(scratch.iter()).filter(|(a, b)| a != b).count();
    Some(format!(
        "page {index} version {version}: {bad} bytes, the first at {at}: {:02x} in place of {:02x}",
        page[at], scratch[at]
    ))
}

fn text(next: &mut impl FnMut() -> u64, page: &mut Page) {
    let mut at = 0;
    while at < PAGE {
        let bits = next();
        for shift in [0, 12, 24, 36] {
            // The smaller of two draws, so that common words are more common.
            let word =
                WORDS[low((bits >> shift) & 63, 64).min(low((bits >> (shift + 6)) & 63, 64))];
            let take = word.len().min(PAGE - at);
            page[at..at + take].copy_from_slice(&word.as_bytes()[..take]);
            at += take;
        }
    }
}

fn records(index: u64, next: &mut impl FnMut() -> u64, page: &mut Page) {
    let base = 0x0000_7f3a_0000_0000 | index << 12;
    for (nth, record) in (0_u64..).zip(page.chunks_exact_mut(32)) {
        let random = next();
        record[..8].copy_from_slice(&(base + (random & 0xff8)).to_le_bytes());
        record[8..16].copy_from_slice(&(nth * 3 + (random >> 60)).to_le_bytes());
        record[16..24].copy_from_slice(&u64::from(random >> 32 & 7 == 0).to_le_bytes());
        record[24..].copy_from_slice(&(random >> 16 & 0xffff).to_le_bytes());
    }
}

/// A number below `bound`, derived from `h`.
pub(crate) fn low(h: u64, bound: usize) -> usize {
    usize::try_from(h % bound as u64).unwrap_or(0)
}

const WORDS: [&str; 64] = [
    "the ",
    "of ",
    "and ",
    "to ",
    "in ",
    "a ",
    "is ",
    "that ",
    "for ",
    "it ",
    "as ",
    "was ",
    "with ",
    "be ",
    "by ",
    "on ",
    "not ",
    "he ",
    "this ",
    "are ",
    "or ",
    "his ",
    "from ",
    "at ",
    "which ",
    "but ",
    "have ",
    "an ",
    "had ",
    "they ",
    "you ",
    "were ",
    "their ",
    "one ",
    "all ",
    "we ",
    "can ",
    "her ",
    "has ",
    "there ",
    "been ",
    "if ",
    "more ",
    "when ",
    "will ",
    "would ",
    "who ",
    "so ",
    "\"name\": ",
    "\"value\": ",
    "return ",
    "struct ",
    "memory ",
    "kernel ",
    "request ",
    "response ",
    "compression ",
    "migration ",
    "127.0.0.1 ",
    "2026-11-21T",
    "0000000000 ",
    "<div class=",
    "http://www.",
    "\n",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_another_place_seed_or_version_is_wrong() {
        let (mut page, mut scratch) = ([0; PAGE], [0; PAGE]);
        for index in 0..64 {
            fill(1, index, 5, &mut page);
            assert_eq!(wrong(fill, (1, index, 5), &page, &mut scratch), None);
            assert!(wrong(fill, (1, index + 1, 5), &page, &mut scratch).is_some());
            assert!(wrong(fill, (1, index, 6), &page, &mut scratch).is_some());
            assert!(wrong(fill, (2, index, 5), &page, &mut scratch).is_some());
        }
        fill_named(1, 3, &mut page);
        fill_named(1, 4, &mut scratch);
        // Only the names are the same.
        assert!(page[..20] == scratch[..20] && page[20..40] != scratch[20..40]);
        assert!(page[4000..] != scratch[4000..]);
        fill(1, 3, 0, &mut page);
        page[4000] ^= 1;
        let said = wrong(fill, (1, 3, 0), &page, &mut scratch).unwrap();
        assert!(said.contains("1 bytes, the first at 4000"), "{said}");
    }
}
