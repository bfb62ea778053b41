//! The parser's state in the main channel, and the transitions common to all parts of the grammar.

use crate::blocks::{BlockTable, Blocks};
use crate::cursor::{Feed, Gather};
use crate::facts::Facts;
use crate::handlers::{At, Handler};
use crate::resync::Scan;

#[derive(Clone, Debug)]
pub(crate) struct Main {
    pub(super) state: State,
    pub(super) gather: Gather,
    /// Bytes to skip before `state` continues.
    pub(super) skip: u64,
    pub(super) scan: Scan,
    /// Section id of RAM, once its START was seen.
    pub(super) ram: Option<u32>,
    /// Sections of other handlers whose START was seen, by id.
    pub(super) others: Vec<(u32, Handler)>,
    /// The section of RAM being read, or read last.
    pub(super) section: Section,
    pub(super) markers: Markers,
    pub(super) footer: u32,
    /// Bitwise or of the RAM block page sizes (command 3 with 16 bytes); 0 without postcopy.
    pub(super) block_page_sizes: u64,
    /// Bytes of RAM blocks that the block table has still to list.
    pub(super) table_left: u64,
    pub(super) blocks: Blocks,
    pub(super) form: Form,
}

/// The kind of migration that the connection belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// A migration, from its file header.
    Whole,
    /// A recovered postcopy: the section ids are those of an earlier connection.
    Recovery,
    /// Bare records (the preempt channel).
    Preempt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Section {
    Start,
    Part,
    End,
}

/// The record that marks multifd barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Markers {
    /// The body of START has had no FLUSH yet.
    Undecided,
    Flush,
    Eos,
    /// Markers are not counted any more.
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    FileHeader,
    Tag,
    ConfigurationLen,
    ConfigurationName {
        len: usize,
    },
    AfterConfiguration,
    SubsectionName,
    TargetPageBits,
    CapabilityCount,
    Capability {
        left: u32,
    },
    Uuid,
    Command,
    SectionHead {
        full: bool,
    },
    SectionId {
        end: bool,
    },
    VirtioMem,
    /// In the body of a section of another handler.
    Other {
        handler: Handler,
        at: At,
    },
    Footer,
    Record,
    RecordNameLen {
        kind: u64,
    },
    RecordBody {
        kind: u64,
    },
    Body,
    TableNameLen,
    TableLength,
    /// Between two entries with postcopy on: the length of a name, or the first byte of a page
    /// size.
    TableNext,
    /// After the last entry with postcopy on: a page size, or the next record.
    TableLast,
    /// A page size or, with ignore-shared, an address: the announced page sizes decide.
    TablePageSizeOrAddress,
    TableAddress,
    /// Unknown bytes; looking for a RAM section.
    Lost,
    /// Device state up to the end of the stream.
    Tail,
}

impl Default for Main {
    fn default() -> Self {
        Main {
            state: State::FileHeader,
            gather: Gather::new(),
            skip: 0,
            scan: Scan::default(),
            ram: None,
            others: Vec::new(),
            section: Section::Start,
            markers: Markers::Undecided,
            footer: 0,
            block_page_sizes: 0,
            table_left: 0,
            blocks: Blocks::default(),
            form: Form::Whole,
        }
    }
}

impl Main {
    pub(crate) fn recovery() -> Self {
        Main { state: State::Tag, markers: Markers::Off, form: Form::Recovery, ..Main::default() }
    }

    pub(crate) fn preempt() -> Self {
        Main {
            state: State::Record,
            section: Section::Part,
            markers: Markers::Off,
            form: Form::Preempt,
            ..Main::default()
        }
    }

    /// The offsets in the last feed at which the block of the records changes, and each block's
    /// position among all blocks.
    pub(crate) fn blocks(&self) -> &[(usize, u64)] {
        &self.blocks.seen
    }

    pub(crate) fn block_table(&self) -> &BlockTable {
        self.blocks.table()
    }

    pub(super) fn next(&mut self, state: State) -> Option<()> {
        self.gather.done();
        self.state = state;
        Some(())
    }

    pub(super) fn ram_section(&mut self, id: u32, section: Section) -> Option<()> {
        self.ram = Some(id);
        self.footer = id;
        self.section = section;
        self.next(State::Record)
    }

    /// Gives up: the bytes are not understood from here on.
    pub(super) fn lost(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        self.tail(feed, facts);
        facts.opaque = true;
        self.scan = Scan::default();
        let ended = self.section == Section::End || self.form == Form::Preempt;
        self.next(if ended { State::Tail } else { State::Lost })
    }

    pub(super) fn tail(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) {
        if !facts.tail && !facts.switched && self.form != Form::Preempt {
            feed.cut();
            facts.tail = true;
            facts.tail_at = facts.fed + feed.pos() as u64;
        }
    }
}
