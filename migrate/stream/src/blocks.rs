//! RAM blocks, laid out one behind the other in the order of the block table.

/// The most blocks distinguished. A VM has some ten, and one for each memory device.
const MOST: usize = 1024;
/// The most changes of the block that are recorded in a feed. Beyond them, pages get the wrong
/// block's position, which costs only compression ratio.
const MOST_SEEN: usize = 256;

/// Where each RAM block of a VM begins, if they are laid out one behind the other. A hint: two
/// blocks with the same hash share a position, and a block that is not in the table has position 0.
#[derive(Clone, Debug, Default)]
pub struct BlockTable {
    /// Hash of the name, and position.
    known: Vec<(u64, u64)>,
}

impl BlockTable {
    fn position(&self, name: &[u8]) -> u64 {
        let hash = hash(name);
        self.known.iter().find(|(known, _)| *known == hash).map_or(0, |(_, place)| *place)
    }

    /// The position of a block whose name ends at the first zero of `field`.
    pub(crate) fn position_of_field(&self, field: &[u8]) -> u64 {
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
        self.position(&field[..end])
    }
}

/// Addresses count from the start of a block, so pages of two blocks have the same addresses.
/// Adding the position of its block gives each page its own address. A hint, like all of the
/// tokeniser's results.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    table: BlockTable,
    /// Position behind the last block.
    end: u64,
    /// Position of the block of the current records.
    current: u64,
    /// For the last feed: the bytes from which on records belong to another block, and its
    /// position.
    pub(crate) seen: Vec<(usize, u64)>,
}

impl Blocks {
    pub(crate) fn table(&self) -> &BlockTable {
        &self.table
    }

    /// Begins a feed.
    pub(crate) fn begin(&mut self) {
        self.seen.clear();
        self.seen.push((0, self.current));
    }

    /// Records a block table entry's name.
    pub(crate) fn listed(&mut self, name: &[u8]) {
        if self.table.known.len() < MOST {
            self.table.known.push((hash(name), self.end));
        }
    }

    /// Records the length of that block.
    pub(crate) fn length(&mut self, bytes: u64) {
        self.end = self.end.wrapping_add(bytes);
    }

    /// Records that from byte `at` of this feed on, records belong to the block of this name.
    pub(crate) fn named(&mut self, name: &[u8], at: usize) {
        self.current = self.table.position(name);
        if self.seen.len() < MOST_SEEN {
            self.seen.push((at, self.current));
        }
    }
}

/// FNV-1a, 64 bits: names are short, and correctness does not depend on it.
fn hash(name: &[u8]) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    name.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}
