//! A chunk after it was read. Pages that were sent before become differences; then the chunk goes
//! to the codec threads or straight to the links.

use super::encode::EncodeJob;
use super::shared::Shared;
use crate::auto::assigned::Assigned;
use crate::units::raw;
use codec::Codec;
use pages::Slot;
use pipeline::Submitted;
use session::Header;
use std::time::Duration;
use stream::Token;

/// Smaller chunks are sent raw: waking a codec thread costs more than compression saves.
const LEAST_COMPRESSED: usize = 512;

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

/// A chunk to be sent.
pub(super) struct ReadChunk {
    pub(super) header: Header,
    pub(super) chunk: Slot,
    pub(super) len: usize,
    /// The checksum of the first `len` bytes of `chunk`.
    pub(super) checksum: u64,
    pub(super) tokens: Vec<Token>,
    pub(super) page_size: usize,
    /// Compressing the chunk is not worth it.
    pub(super) as_it_is: bool,
    /// A stopped vCPU waits for the chunk.
    pub(super) urgent: bool,
}

/// Sends a chunk to the codec threads, or straight to the links if compression gains nothing.
pub(super) fn send(shared: &Shared, chunk: ReadChunk) {
    let ReadChunk { header, chunk, len, checksum, tokens, page_size, as_it_is, urgent } = chunk;
    let session = &shared.session;
    if urgent {
        let _ = shared.spare.push(tokens);
        shared.counters.raw(len);
        if let Some(auto) = &shared.auto {
            auto.as_it_was(len);
        }
        return session.send_first(raw(header, chunk, len, checksum));
    }
    let packable = stream::worth_packing_without_codec(&tokens);
    let assigned = shared
        .auto
        .as_ref()
        .filter(|_| len >= LEAST_COMPRESSED && (packable || !as_it_is))
        .map(|auto| auto.choose(&chunk[..len]));
    let settings = assigned.as_ref().map_or(shared.settings, Assigned::settings);
    let worthwhile =
        len >= LEAST_COMPRESSED && ((settings.codec() != Codec::Raw && !as_it_is) || packable);
    let payload = if worthwhile {
        session.payload().take_until(None, || session.failure().is_some())
    } else {
        None
    };
    let Some(payload) = payload else {
        let _ = shared.spare.push(tokens);
        shared.counters.raw(len);
        let outgoing = raw(header, chunk, len, checksum);
        match (&assigned, &shared.auto) {
            (Some(assigned), _) => assigned.past(len, &outgoing),
            (None, Some(auto)) => auto.as_it_was(len),
            (None, None) => {}
        }
        return session.send(outgoing);
    };
    let pages = tokens.iter().map(|token| match token {
        Token::Pages { count, .. } | Token::Bodies { count } => u64::from(*count),
        _ => 0,
    });
    let pages = pages.sum();
    let job = EncodeJob {
        header,
        chunk,
        len,
        checksum,
        tokens,
        page_size,
        pages,
        payload,
        counters: shared.counters.clone(),
        spare: shared.spare.clone(),
        assigned,
    };
    match shared.submitter.submit(job, pages) {
        Submitted::Queued => {}
        Submitted::Busy(job) | Submitted::Closed(job) => {
            if let Some(auto) = &shared.auto {
                auto.as_it_was(len);
            }
            session.send(job.into_raw());
        }
    }
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
