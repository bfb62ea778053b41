//! The tokeniser: one per direction of one connection.

use crate::blocks::BlockTable;
use crate::cursor::Feed;
use crate::facts::Facts;
use crate::layout::is_page_size;
use crate::main_channel::Main;
use crate::multifd::Channel;
use crate::token::Token;

/// The kind of a connection of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The main channel: file header, sections, device state.
    Main,
    /// A multifd channel.
    Multifd,
    /// The main channel of a postcopy migration that was paused and is recovered: no file header.
    Recovery,
    /// The postcopy preempt channel: RAM records without a header. Its first bytes do not identify
    /// it: it has no magic, and may never carry a byte.
    Preempt,
    /// Any other connection, which is all raw: return path, TLS.
    Other,
}

const MAIN_MAGIC: [u8; 4] = *b"QEVM";
const MULTIFD_MAGIC: [u8; 4] = [0x11, 0x22, 0x33, 0x44];
/// Command 10, RECV_BITMAP, of at most 255 bytes: the first command of a source that recovers.
const RECOVERY_BEGIN: [u8; 4] = [0x08, 0x00, 0x0a, 0x00];

impl Kind {
    /// Whether this connection carries the return path and the bytes that start the destination's
    /// VM. An unknown kind counts as such.
    pub fn is_main(self) -> bool {
        matches!(self, Kind::Main | Kind::Recovery | Kind::Other)
    }
}

/// The kind of a connection that begins with `first`; `None` while more bytes (4 at most) could
/// still make it a main or multifd channel.
pub fn classify(first: &[u8]) -> Option<Kind> {
    let n = first.len().min(4);
    let magics = [
        (MAIN_MAGIC, Kind::Main),
        (MULTIFD_MAGIC, Kind::Multifd),
        (RECOVERY_BEGIN, Kind::Recovery),
    ];
    for (magic, kind) in magics {
        if first[..n] == magic[..n] {
            return (n == 4).then_some(kind);
        }
    }
    Some(Kind::Other)
}

/// Turns one direction of one connection into [`Token`]s. Does no I/O and stores no page data. A
/// clone can look ahead at bytes that are fed later.
#[derive(Clone, Debug)]
pub struct Tokeniser {
    parser: Parser,
    facts: Facts,
}

#[derive(Clone, Debug)]
enum Parser {
    Main(Box<Main>),
    Multifd(Box<Channel>),
    Other,
}

impl Tokeniser {
    /// Creates a tokeniser at the start of a connection. `page_size` (bytes) applies until the
    /// stream states another. An unsupported size is replaced by 4096.
    pub fn new(kind: Kind, page_size: usize) -> Self {
        let page_size = if is_page_size(page_size) { page_size } else { 4096 };
        let mut facts = Facts::new(page_size);
        let parser = match kind {
            Kind::Main => Parser::Main(Box::default()),
            Kind::Multifd => Parser::Multifd(Box::default()),
            Kind::Recovery => {
                // A paused postcopy had its return path, and still has it.
                (facts.return_path, facts.postcopy) = (true, true);
                (facts.postcopy_running, facts.switched) = (true, true);
                Parser::Main(Box::new(Main::recovery()))
            }
            Kind::Preempt => Parser::Main(Box::new(Main::preempt())),
            Kind::Other => Parser::Other,
        };
        Tokeniser { parser, facts }
    }

    /// Appends tokens that cover `bytes` exactly: their lengths, at the page size in
    /// [`Tokeniser::facts`] after this call, add up to `bytes.len()`.
    ///
    /// Accepts any bytes, split anywhere, and never fails. It reads headers only, not page bodies.
    pub fn feed(&mut self, bytes: &[u8], tokens: &mut Vec<Token>) {
        let mut feed = Feed::new(bytes, tokens);
        match &mut self.parser {
            Parser::Main(main) => main.run(&mut feed, &mut self.facts),
            Parser::Multifd(channel) => channel.run(&mut feed, &mut self.facts),
            Parser::Other => feed.advance(bytes.len()),
        }
        debug_assert!(feed.rest().is_empty());
        feed.cut();
        self.facts.fed += bytes.len() as u64;
    }

    /// Multifd: the ends of the SYNC packets completed in the last feed, counted from its first
    /// byte. A destination's channel stops there until its main channel has reached the barrier, so
    /// a relay counts a SYNC as written before it writes the bytes behind it.
    pub fn sync_ends(&self) -> &[usize] {
        match &self.parser {
            Parser::Multifd(channel) => channel.sync_ends(),
            Parser::Main(_) | Parser::Other => &[],
        }
    }

    /// Main: the bytes of the last feed from which on records belong to another RAM block. A block
    /// is given as the sum of the lengths of the preceding blocks in the block table. The value is
    /// a hint: added to a page's address, it makes the address unique in the VM.
    pub fn blocks(&self) -> &[(usize, u64)] {
        match &self.parser {
            Parser::Main(main) => main.blocks(),
            Parser::Multifd(_) | Parser::Other => &[],
        }
    }

    /// Main: where each RAM block begins that the block table has listed so far; empty on other
    /// connections.
    pub fn block_table(&self) -> BlockTable {
        match &self.parser {
            Parser::Main(main) => main.block_table().clone(),
            Parser::Multifd(_) | Parser::Other => BlockTable::default(),
        }
    }

    /// Multifd: finds the addresses of pages (see [`Self::places`]) from the first packet on that
    /// begins after this, with the block table of the VM's main channel. Only the first call has an
    /// effect.
    pub fn find_places(&mut self, blocks: &BlockTable) {
        if let Parser::Multifd(channel) = &mut self.parser {
            channel.find_places(blocks);
        }
    }

    /// Multifd: the addresses of the pages that the last feed's [`Token::Bodies`] cover, in their
    /// order: each is unique in the VM, as with [`Self::blocks`]. `u64::MAX` for a page whose
    /// packet's header was split by a feed, or came before [`Self::find_places`]. Empty if that was
    /// not called.
    pub fn places(&self) -> &[u64] {
        match &self.parser {
            Parser::Multifd(channel) => channel.places(),
            Parser::Main(_) | Parser::Other => &[],
        }
    }

    /// The facts so far.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }
}
