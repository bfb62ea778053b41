//! The tokeniser: one per direction of one connection.

use crate::cursor::Feed;
use crate::facts::Facts;
use crate::layout::is_page_size;
use crate::main_channel::Main;
use crate::multifd::Channel;
use crate::token::Token;

/// What a connection of the source carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The main channel: file header, sections, device state.
    Main,
    /// A multifd channel.
    Multifd,
    /// The main channel of a migration that was paused in postcopy and goes on: no file header.
    Recovery,
    /// The postcopy preempt channel: records of RAM without any frame. Its first bytes do not tell
    /// it: it has no magic, and may never have any byte.
    Preempt,
    /// Anything else, all of it raw: return path, TLS.
    Other,
}

const MAIN_MAGIC: [u8; 4] = *b"QEVM";
const MULTIFD_MAGIC: [u8; 4] = [0x11, 0x22, 0x33, 0x44];
/// Command 10, RECV_BITMAP, of at most 255 bytes: what a source asks first when it goes on.
const RECOVERY_BEGIN: [u8; 4] = [0x08, 0x00, 0x0a, 0x00];

impl Kind {
    /// Whether this is the connection that the migration stands and falls with: it has the return
    /// path, and what starts the destination's VM. What is not known is taken for it.
    pub fn is_main(self) -> bool {
        matches!(self, Kind::Main | Kind::Recovery | Kind::Other)
    }
}

/// What a connection that begins with `first` carries; `None` while more bytes (4 at most) could
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

/// Turns one direction of one connection into [`Token`]s. Does no I/O and keeps no page data.
#[derive(Debug)]
pub struct Tokeniser {
    parser: Parser,
    facts: Facts,
}

#[derive(Debug)]
enum Parser {
    Main(Box<Main>),
    Multifd(Box<Channel>),
    Other,
}

impl Tokeniser {
    /// A tokeniser at the start of a connection. `page_size` (bytes) holds until the stream says
    /// otherwise; one that no target has is taken as 4096.
    pub fn new(kind: Kind, page_size: usize) -> Self {
        let page_size = if is_page_size(page_size) { page_size } else { 4096 };
        let mut facts = Facts::new(page_size);
        let parser = match kind {
            Kind::Main => Parser::Main(Box::default()),
            Kind::Multifd => Parser::Multifd(Box::default()),
            Kind::Recovery => {
                // A paused postcopy had its return path, and goes on with it.
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
    /// Whatever the bytes are and wherever they were cut; never fails, and looks at headers only:
    /// page bodies are not read.
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

    /// Multifd: where the SYNC packets completed in the last feed end, counted from its first byte.
    /// A destination's channel stops there until its main channel has reached the barrier, so a
    /// relay counts a SYNC as handed over before it writes what follows.
    pub fn sync_ends(&self) -> &[usize] {
        match &self.parser {
            Parser::Multifd(channel) => channel.sync_ends(),
            Parser::Main(_) | Parser::Other => &[],
        }
    }

    /// Main: from which byte of the last feed on records are of which RAM block, as the sum of the
    /// lengths of the blocks before it in the block table. A hint: with it added, addresses of
    /// pages are the VM's and not their block's.
    pub fn blocks(&self) -> &[(usize, u64)] {
        match &self.parser {
            Parser::Main(main) => main.blocks(),
            Parser::Multifd(_) | Parser::Other => &[],
        }
    }

    /// What the connection told so far.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }
}
