//! RAM blocks, laid one behind the other in the order of the block table.

/// Blocks that are told apart. A VM has some ten, and one for each memory device.
const MOST: usize = 1024;
/// Changes of the block that are noted in a feed; a page more or less in the wrong place does no
/// harm.
const MOST_SEEN: usize = 256;

/// Pages of two blocks have the same addresses, as those count from their block's beginning. With
/// the place of its block added each page has one of its own. A hint, as all of the tokeniser's:
/// what two blocks of one hash share is a place.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    /// Hash of the name, and place.
    known: Vec<(u64, u64)>,
    /// Behind the last block.
    end: u64,
    /// Place of the block that records are of now.
    current: u64,
    /// Of the last feed: from which byte on, and which place.
    pub(crate) seen: Vec<(usize, u64)>,
}

impl Blocks {
    /// A feed begins.
    pub(crate) fn begin(&mut self) {
        self.seen.clear();
        self.seen.push((0, self.current));
    }

    /// The block table has an entry of this name.
    pub(crate) fn listed(&mut self, name: &[u8]) {
        if self.known.len() < MOST {
            self.known.push((hash(name), self.end));
        }
    }

    /// And so many bytes.
    pub(crate) fn length(&mut self, bytes: u64) {
        self.end = self.end.wrapping_add(bytes);
    }

    /// From byte `at` of this feed on records are of the block of this name.
    pub(crate) fn named(&mut self, name: &[u8], at: usize) {
        let hash = hash(name);
        let found = self.known.iter().find(|(known, _)| *known == hash);
        // One that came later than the table is like the first.
        self.current = found.map_or(0, |(_, place)| *place);
        if self.seen.len() < MOST_SEEN {
            self.seen.push((at, self.current));
        }
    }
}

/// FNV-1a, 64 bits: names are short, and nothing depends on it.
fn hash(name: &[u8]) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    name.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}
