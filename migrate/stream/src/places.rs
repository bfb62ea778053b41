//! The addresses of the pages in a multifd channel's packets.

use crate::blocks::BlockTable;
use crate::cursor::be64;
use crate::layout::MULTIFD_FIXED_LEN;
use std::ops::Range;

/// Where the name of the RAM block lies in a packet's header.
const BLOCK_NAME: Range<usize> = 64..MULTIFD_FIXED_LEN;

/// Records the address of each body that a feed covers by [`crate::Token::Bodies`].
#[derive(Clone, Debug)]
pub(crate) struct Places {
    blocks: BlockTable,
    /// Pages with bytes of the present packet; none if a feed has split its header.
    packet: Vec<u64>,
    /// Pages of the last feed's bodies.
    feed: Vec<u64>,
}

impl Places {
    pub(crate) fn new(blocks: BlockTable) -> Self {
        Self { blocks, packet: Vec::new(), feed: Vec::new() }
    }

    /// Begins a feed.
    pub(crate) fn begin(&mut self) {
        self.feed.clear();
    }

    /// Begins a packet of `normal` pages with bytes. `header` is whole, or `None`.
    pub(crate) fn packet(&mut self, header: Option<&[u8]>, normal: u32) {
        self.packet.clear();
        let Some(header) = header else { return };
        let block = self.blocks.position_of_field(&header[BLOCK_NAME]);
        let offsets = header[MULTIFD_FIXED_LEN..].chunks_exact(8).take(normal as usize);
        self.packet.extend(offsets.map(|offset| block.wrapping_add(be64(offset))));
    }

    /// Records bodies of the present packet.
    pub(crate) fn bodies(&mut self, bodies: Range<usize>) {
        let unknown = |index| self.packet.get(index).copied().unwrap_or(u64::MAX);
        self.feed.extend(bodies.map(unknown));
    }

    pub(crate) fn of_feed(&self) -> &[u64] {
        &self.feed
    }
}
