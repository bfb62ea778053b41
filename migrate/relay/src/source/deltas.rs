//! The sender of a stream's differences, within the budget of the session.

use super::differences::{take_channel_differences, take_differences, Differences};
use super::shared::Shared;
use crate::cpu_time::{process_cpu, thread_cpu};
use crate::threads::drop_aside;
use pages::Slot;
use session::{Header, FLAG_BODIES};
use stream::{Kind, Token, Tokeniser};

/// The sender of a stream's differences.
pub(super) enum Deltas {
    None,
    Main(Box<delta::Sender>),
    Multifd(delta::ChannelSender),
}

impl Deltas {
    /// The sender for a stream of this kind, if it may have one.
    pub(super) fn new(shared: &Shared, kind: Kind) -> Self {
        match kind {
            Kind::Main => Self::main(shared.main_deltas()),
            Kind::Multifd => shared.multifd_deltas().map_or(Self::None, Self::Multifd),
            _ => Self::None,
        }
    }

    fn main(sender: Option<delta::Sender>) -> Self {
        sender.map_or(Self::None, |sender| Self::Main(Box::new(sender)))
    }

    /// Bytes of a chunk that its table needs.
    pub(super) fn room(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Main(_) | Self::Multifd(_) => delta::TABLE_ROOM,
        }
    }

    /// Main: frees the caches of the session.
    pub(super) fn free(&mut self, shared: &Shared) {
        if let Self::Main(sender) = std::mem::replace(self, Self::None) {
            drop_aside(Some(sender));
        }
        if shared.channel_deltas.open().is_some() {
            shared.channel_deltas.end();
        }
    }

    /// Main, at a barrier: gives the cache to the multifd channels, of which there are `channels`.
    pub(super) fn pass_to_channels(
        &mut self,
        shared: &Shared,
        channels: u32,
        tokeniser: &Tokeniser,
    ) {
        let cache = &shared.channel_deltas;
        if let Some(open) = cache.open() {
            // QEMU opens all channels before its first barrier. The receiver could not tell which
            // of them the tables of a later one have to wait for.
            if open.channels != channels {
                cache.end();
            }
            return;
        }
        // A main stream that has pages of its own keeps the cache.
        let is_free = matches!(self, Self::Main(sender) if sender.has_cache_unused());
        if is_free && channels > 0 && cache.is_granted() {
            *self = Self::main(shared.seed_deltas());
            cache.begin(channels, shared.page_size, tokeniser.block_table());
        }
    }

    /// Puts differences, and zeros for pages that the destination has, in place of the pages of a
    /// chunk of `len` bytes. `tokens` are the tokeniser's for the chunk; `epoch` are the SYNCs of
    /// its multifd stream before the chunk.
    pub(super) fn take(
        &mut self,
        shared: &Shared,
        header: &mut Header,
        (chunk, len): (&mut Slot, usize),
        (tokeniser, tokens, epoch): (&mut Tokeniser, &[Token], u64),
    ) -> Option<delta::Counts> {
        let (wanted, seed) = (shared.wants_deltas(), shared.known_pages());
        if !wanted && seed.is_none() {
            return None;
        }
        let budget = &shared.delta_budget;
        let allowed = budget.allows(process_cpu());
        let begun = thread_cpu();
        let page_size = shared.page_size;
        let known = seed.as_deref().filter(|_| allowed);
        let taken = match self {
            Self::None => return None,
            Self::Main(sender) => {
                sender.use_cache(wanted);
                sender.store_new(allowed);
                let tokens = (tokens, tokeniser.blocks());
                take_differences(sender, chunk, len, tokens, (page_size, known))
            }
            Self::Multifd(sender) => {
                let open = shared.channel_deltas.open().filter(|_| wanted);
                sender.set_cache(open.as_ref().map(|open| open.cache()));
                if let Some(open) = &open {
                    tokeniser.find_places(&open.blocks);
                    header.channels = open.channels;
                    header.flags |= FLAG_BODIES;
                }
                let tokens = (tokens, tokeniser.places(), page_size);
                let when = (epoch, allowed);
                take_channel_differences(sender, (chunk, len), tokens, known, when)
            }
        };
        let Differences { table_len, counts, .. } = taken;
        if counts.deltas == 0 {
            let time = thread_cpu().saturating_sub(begun);
            budget.spend(if seed.is_some() { taken.wasted(time) } else { time });
        }
        header.table_len = u32::try_from(table_len).unwrap_or(u32::MAX);
        Some(counts)
    }
}

#[cfg(test)]
mod tests;
