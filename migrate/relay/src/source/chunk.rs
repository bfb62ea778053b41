//! A chunk after it was read, with differences in place of pages: it goes to the codec threads or
//! straight to the links.

use super::encode::EncodeJob;
use super::shared::Shared;
use crate::auto::assigned::Assigned;
use crate::units::raw;
use codec::Codec;
use pages::Slot;
use pipeline::Submitted;
use session::{Header, Outgoing};
use stream::Token;

/// Smaller chunks are sent raw: waking a codec thread costs more than compression saves.
const LEAST_COMPRESSED: usize = 512;

/// A chunk to be sent.
pub(super) struct ReadChunk {
    pub(super) header: Header,
    pub(super) chunk: Slot,
    pub(super) len: usize,
    /// The checksum of the first `len` bytes of `chunk`.
    pub(super) checksum: u64,
    pub(super) tokens: Vec<Token>,
    pub(super) page_size: usize,
    /// Zeros are in place of pages that the destination has in its seed.
    pub(super) is_seeded: bool,
    /// Compressing the chunk is not worth it.
    pub(super) as_it_is: bool,
    /// A stopped vCPU waits for the chunk.
    pub(super) urgent: bool,
}

/// Sends a chunk to the codec threads, or straight to the links if compression gains nothing.
pub(super) fn send(shared: &Shared, chunk: ReadChunk) {
    let ReadChunk { is_seeded, as_it_is, urgent, .. } = chunk;
    let ReadChunk { header, chunk, len, checksum, tokens, page_size, .. } = chunk;
    let session = &shared.session;
    if urgent {
        let _ = shared.spare.push(tokens);
        shared.counters.raw(len);
        if let Some(auto) = &shared.auto {
            auto.as_it_was(len, len);
        }
        return session.send_first(raw(header, chunk, len, checksum));
    }
    // The pages of a seed count as not sent, so their zeros do not cross, whatever the codec.
    let packable = is_seeded || stream::worth_packing_without_codec(&tokens);
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
            (None, Some(auto)) => auto.as_it_was(len, len),
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
            let outgoing = if is_seeded { job.into_packed() } else { job.into_raw() };
            if let Some(auto) = &shared.auto {
                auto.as_it_was(len, sent(&outgoing));
            }
            session.send(outgoing);
        }
    }
}

/// Bytes of a chunk that cross.
fn sent(outgoing: &Outgoing) -> usize {
    match outgoing {
        Outgoing::Unit { unit, .. } => unit.payload_len as usize,
        _ => 0,
    }
}
