//! Differences and zeros in place of the pages of a chunk (W29 to W29c).

use delta::{ChannelSender, Known};
use std::time::Duration;
use stream::Token;

/// The result of [`take_differences`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Differences {
    /// Bytes of the delta table.
    pub table_len: usize,
    /// The pages in the table.
    pub counts: delta::Counts,
    /// The part of the pages looked up in the seed that the seed does not have.
    pub unknown: f64,
}

impl Differences {
    /// The part that has gained nothing of the time that a chunk took with a seed. A page that the
    /// seed has makes up for one that it does not have: its hash takes less time than its
    /// compression.
    pub(super) fn wasted(&self, time: Duration) -> Duration {
        time.mul_f64((2.0 * self.unknown - 1.0).max(0.0))
    }
}

/// Replaces the pages in the first `len` bytes of `chunk` that were sent before by their
/// differences, and those that the destination has in its seed by zeros, and puts the delta table
/// behind these bytes (W29, W29b). `tokens` and `blocks` are the tokeniser's for these bytes.
pub fn take_differences(
    sender: &mut delta::Sender,
    chunk: &mut [u8],
    len: usize,
    (tokens, blocks): (&[Token], &[(usize, u64)]),
    (page_size, seed): (usize, Option<&delta::Known>),
) -> Differences {
    let mut pass = sender.begin(chunk, len, seed);
    let mut blocks = blocks.iter().copied().peekable();
    let (mut at, mut block) = (0, 0);
    for token in tokens {
        while let Some((_, place)) = blocks.next_if(|(from, _)| *from <= at) {
            block = place;
        }
        match *token {
            Token::Pages { first, count } => {
                pass.records(at, first.wrapping_add(block), count as usize);
            }
            Token::Bodies { count } => pass.bodies(at, count as usize),
            _ => {}
        }
        at += token.len(page_size);
    }
    let unknown = pass.unknown();
    let (table_len, counts) = pass.finish();
    Differences { table_len, counts, unknown }
}

/// As [`take_differences`], for the chunk of a multifd channel. `places`: the
/// addresses of its pages, in their order. `when`: the SYNCs of the channel before the chunk, and
/// whether new pages are stored.
pub(super) fn take_channel_differences(
    sender: &ChannelSender,
    (chunk, len): (&mut [u8], usize),
    (tokens, places, page_size): (&[Token], &[u64], usize),
    known: Option<&Known>,
    when: (u64, bool),
) -> Differences {
    let mut pass = sender.begin((chunk, len), known, when);
    let (mut at, mut places) = (0, places);
    for token in tokens {
        if let Token::Bodies { count } = *token {
            let count = count as usize;
            let (here, rest) = places.split_at(count.min(places.len()));
            pass.bodies(at, count, here);
            places = rest;
        }
        at += token.len(page_size);
    }
    let unknown = pass.unknown();
    let (table_len, counts) = pass.finish();
    Differences { table_len, counts, unknown }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CPU time that the pages of a chunk take: their hashes, and all the rest.
    const HASHES: Duration = Duration::from_micros(300);
    const REST: Duration = Duration::from_micros(1300);

    /// The chunks out of 1000 whose pages are looked up, where this part of them is unknown.
    fn looked_up(unknown: f64) -> u32 {
        let differences = Differences { table_len: 0, counts: delta::Counts::default(), unknown };
        let (budget, mut used, mut count) = (delta::Budget::default(), Duration::ZERO, 0);
        for _ in 0..1000 {
            used += REST.mul_f64(unknown);
            if budget.allows(used) {
                used += HASHES;
                count += 1;
                budget.spend(differences.wasted(HASHES));
            }
        }
        count
    }

    #[test]
    fn known_pages_are_looked_up_although_others_are_unknown() {
        for unknown in [0.0, 0.15, 0.5] {
            assert_eq!(looked_up(unknown), 1000, "{unknown}");
        }
        let in_vain = looked_up(1.0);
        assert!((50..150).contains(&in_vain), "{in_vain} where nothing is found");
    }
}
