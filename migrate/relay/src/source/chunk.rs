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
