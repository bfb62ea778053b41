//! A chunk after it was read, with differences in place of pages: it goes to the codec threads or
//! straight to the links.

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
