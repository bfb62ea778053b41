//! Turns the differences in a stream's chunks back into pages (W29 to W29c).

use super::super::seed;
use super::{no_table_here, Delivery, Stop};
use delta::{Layout, Table};
use session::{Header, SessionError};
use std::sync::atomic::Ordering;
use stream::Kind;

impl Delivery<'_> {
    /// Turns the differences in a chunk back into pages (W29 to W29c).
    pub(super) fn undo_deltas(&mut self, header: &Header, chunk: &mut [u8]) -> Result<(), Stop> {
        let (shared, seed) = (self.shared, self.shared.seed.pages());
        let layout = seed::layout(header);
        let may_have_one = match (self.kind, layout) {
            (Some(Kind::Main), _) => !self.tokeniser.facts().postcopy_running,
            (Some(Kind::Multifd), Layout::Records) => seed > 0,
            (Some(Kind::Multifd), Layout::Bodies) => true,
            _ => false,
        };
        if !may_have_one {
            return Err(no_table_here(header).into());
        }
        if layout == Layout::Bodies {
            self.use_channel_deltas(header)?;
        }
        let (plain, table) = chunk.split_at_mut(header.plain_len as usize);
        let table = Table { bytes: &table[..header.table_len as usize], layout };
        // A main stream that only refers to the seed leaves the cache to the channels.
        let (size, base) = (shared.page_size, shared.seed.base());
        let takes_cache = !self.has_cache
            && self.is_main()
            && (seed == 0 || delta::refers_to_cache(table, plain.len(), size, base));
        if takes_cache {
            (self.deltas, self.has_cache) = (None, true);
        }
        let receiver = self.deltas.get_or_insert_with(|| {
            // The session has one cache. A second stream that wants a cache gets none.
            let granted =
                if takes_cache { shared.delta_cache.swap(0, Ordering::AcqRel) } else { 0 };
            match granted {
                0 => delta::Receiver::without_cache(shared.seed.base(), shared.page_size),
                granted => delta::Receiver::new(granted, shared.page_size),
            }
        });
        let counts = receiver.apply(plain, table, seed);
        let counts = counts.map_err(|error| SessionError::Unit {
            stream: header.stream,
            seq: header.seq,
            detail: error.to_string(),
        })?;
        shared.counters.deltas(counts);
        self.has_seeded |= counts.seeded > 0;
        Ok(())
    }

    /// Gives this channel the cache that the multifd channels share, and waits until the slots hold
    /// what the table of this frame refers to: every channel has had as many SYNCs as this one
    /// (W29c).
    fn use_channel_deltas(&mut self, header: &Header) -> Result<(), Stop> {
        if self.kind != Some(Kind::Multifd) {
            return Err(no_table_here(header).into());
        }
        if !self.has_cache {
            let cache = self.shared.channel_deltas().ok_or_else(|| no_table_here(header))?;
            self.deltas = Some(delta::Receiver::of_channel(cache.clone()));
            self.has_cache = true;
        }
        self.wait_for_syncs(header.channels, self.tokeniser.facts().syncs, "another channel")
    }
}
