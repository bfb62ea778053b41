//! Grammar of the main channel: file header, configuration, commands, sections of RAM.
//!
//! A state machine over fields. A field that a feed cuts is collected in [`Gather`]; long things
//! (page bodies, blobs, names) are skipped by count and never kept. Every transition that needs no
//! more bytes is made at once, so that [`Facts`] are current at the end of each feed.

use crate::blocks::Blocks;
use crate::cursor::{be32, be64, Feed, Gather};
use crate::handlers::{self, At, Handler, Step};
use crate::resync::{Found, Scan};
use crate::token::{
    Token, FLAG_COMPRESS_PAGE, FLAG_CONTINUE, FLAG_EOS, FLAG_FLUSH, FLAG_MEM_SIZE, FLAG_PAGE,
    FLAG_XBZRLE, FLAG_ZERO, PAGE_FLAGS, ZERO_FLAGS, ZERO_RECORD_LEN,
};
use crate::{is_page_size, Facts};

/// Longest machine type name believed; QEMU's have about 20 bytes.
const MAX_MACHINE_NAME: usize = 256;
/// Most capabilities a configuration section may name; QEMU has under 40.
const MAX_CAPABILITIES: u32 = 256;
/// Largest PACKAGED blob: QEMU's own limit (MAX_VM_CMD_PACKAGED_SIZE).
const MAX_PACKAGED: u32 = 512 << 20;
/// Most 64-bit words in a virtio-mem bitmap: 2^32 blocks.
const MAX_BITMAP_WORDS: u64 = 1 << 26;
/// Most sections of other handlers remembered; one a VFIO device, one each for the others.
const MAX_OTHERS: usize = 64;

#[derive(Debug)]
pub(crate) struct Main {
    state: State,
    gather: Gather,
    /// Bytes to pass over before `state` goes on.
    skip: u64,
    scan: Scan,
    /// Section id of RAM, once its START was seen.
    ram: Option<u32>,
    /// Sections of other handlers whose START was seen, by id.
    others: Vec<(u32, Handler)>,
    /// Which section of RAM is being read, or was read last.
    section: Section,
    markers: Markers,
    footer: u32,
    /// Bitwise or of the RAM block page sizes (command 3 with 16 bytes); 0 without postcopy.
    block_page_sizes: u64,
    /// Bytes of RAM blocks the block table has yet to name.
    table_left: u64,
    blocks: Blocks,
    form: Form,
}

/// What the connection is the main channel of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// A migration, from its file header.
    Whole,
    /// A postcopy that goes on: section ids are those of a connection that nobody here has seen.
    Recovery,
    /// Nothing: bare records.
    Preempt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Section {
    Start,
    Part,
    End,
}

/// Which record is the multifd barrier marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Markers {
    /// The body of START has shown no FLUSH yet.
    Undecided,
    Flush,
    Eos,
    /// Nothing counts any more.
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
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
    /// Between two entries with postcopy on: a name length, or the first byte of a page size.
    TableNext,
    /// After the last entry with postcopy on: a page size, or the next record.
    TableLast,
    /// A page size or, with ignore-shared, an address: told apart by the announced page sizes.
    TablePageSizeOrAddress,
    TableAddress,
    /// Not understood; looking for a RAM section.
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

    /// Where in the last feed records of which block begin, by the block's place among all.
    pub(crate) fn blocks(&self) -> &[(usize, u64)] {
        &self.blocks.seen
    }

    pub(crate) fn run(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) {
        self.blocks.begin();
        while feed.skip(&mut self.skip) && self.step(feed, facts).is_some() {}
    }

    /// One transition; `None` when it needs bytes of the next feed.
    fn step(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        match self.state {
            State::Record => self.record(feed, facts),
            State::Body => {
                let size = facts.page_size;
                if feed.rest().len() >= size {
                    feed.take(Token::Bodies { count: 1 }, size);
                } else {
                    self.skip = size as u64;
                }
                self.next(State::Record)
            }
            State::Lost => {
                let found = self.scan.run(feed, self.ram)?;
                facts.opaque = false;
                facts.resyncs += 1;
                self.markers = Markers::Off;
                match found {
                    Found::Start { id } => self.ram_section(id, Section::Start),
                    Found::Section { end } => {
                        let id = self.ram?;
                        facts.vm_stopped_hint |= end;
                        self.ram_section(id, if end { Section::End } else { Section::Part })
                    }
                }
            }
            State::Tail => {
                feed.advance(feed.rest().len());
                None
            }
            _ => self.field(feed, facts),
        }
    }

    fn next(&mut self, state: State) -> Option<()> {
        self.gather.done();
        self.state = state;
        Some(())
    }

    fn ram_section(&mut self, id: u32, section: Section) -> Option<()> {
        self.ram = Some(id);
        self.footer = id;
        self.section = section;
        self.next(State::Record)
    }

    /// From here on the bytes are not understood.
    fn lost(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        self.tail(feed, facts);
        facts.opaque = true;
        self.scan = Scan::default();
        let ended = self.section == Section::End || self.form == Form::Preempt;
        self.next(if ended { State::Tail } else { State::Lost })
    }

    fn tail(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) {
        if !facts.tail && !facts.switched && self.form != Form::Preempt {
            feed.cut();
            facts.tail = true;
            facts.tail_at = facts.fed + feed.pos() as u64;
        }
    }

    /// A barrier marker if `kind` is what marks barriers here. `len` bytes of it were just read.
    fn marker(&mut self, kind: Markers, len: usize, feed: &mut Feed<'_>, facts: &mut Facts) {
        if self.markers == Markers::Undecided && self.section == Section::Start {
            self.markers = kind;
        }
        if self.markers == kind && !facts.postcopy_running {
            if let Ok(len) = u8::try_from(len) {
                feed.take_back(Token::Barrier { len }, usize::from(len));
                facts.barriers += 1;
            }
        }
    }

    fn record(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        let size = facts.page_size;
        let step = size as u64;
        let mask = step - 1;
        let rest = feed.rest();
        if self.gather.is_empty() && rest.len() >= 8 {
            let first = be64(rest);
            if first & mask == ZERO_FLAGS {
                let count = zero_run(rest, first, step);
                if count > 0 {
                    facts.duplicate += u64::from(count);
                    feed.take(Token::ZeroRun { first, count }, count as usize * ZERO_RECORD_LEN);
                    return Some(());
                }
            } else if first & mask == PAGE_FLAGS {
                let count = page_run(rest, first, size);
                if count > 0 {
                    facts.normal += u64::from(count);
                    feed.take(Token::Pages { first, count }, count as usize * (8 + size));
                    return Some(());
                }
            }
        }
        let (value, read) = self.record_value(feed)?;
        self.judge(value, read, feed, facts)
    }

    /// The next `u64`, and how many of its bytes this feed has.
    fn record_value(&mut self, feed: &mut Feed<'_>) -> Option<(u64, usize)> {
        let before = feed.pos();
        let value = be64(self.gather.field(feed, 8)?);
        self.gather.done();
        Some((value, feed.pos() - before))
    }

    /// Goes on behind the `u64` of a record.
    fn judge(
        &mut self,
        value: u64,
        read: usize,
        feed: &mut Feed<'_>,
        facts: &mut Facts,
    ) -> Option<()> {
        let mask = facts.page_size as u64 - 1;
        match value {
            FLAG_EOS => {
                self.marker(Markers::Eos, read, feed, facts);
                if self.section == Section::End {
                    self.tail(feed, facts);
                }
                let bare = self.form == Form::Preempt;
                return self.next(if bare { State::Record } else { State::Footer });
            }
            FLAG_FLUSH => {
                self.marker(Markers::Flush, read, feed, facts);
                return self.next(State::Record);
            }
            _ => {}
        }
        let flags = value & mask;
        if flags == FLAG_MEM_SIZE && self.section == Section::Start {
            self.table_left = value & !mask;
            return self.next(if self.table_left == 0 {
                State::Record
            } else {
                State::TableNameLen
            });
        }
        let kind = flags & !FLAG_CONTINUE;
        match kind {
            FLAG_ZERO => facts.duplicate += 1,
            FLAG_PAGE => facts.normal += 1,
            FLAG_XBZRLE => facts.xbzrle += 1,
            FLAG_COMPRESS_PAGE => facts.compressed_records += 1,
            _ => return self.lost(feed, facts),
        }
        self.next(if flags & FLAG_CONTINUE == 0 {
            State::RecordNameLen { kind }
        } else {
            Self::body_state(kind)
        })
    }

    fn body_state(kind: u64) -> State {
        if kind == FLAG_PAGE {
            State::Body
        } else {
            State::RecordBody { kind }
        }
    }

    /// The states that read one field, which a feed may cut.
    fn field(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        let size = facts.page_size as u64;
        let field = |gather: &mut Gather, feed: &mut Feed<'_>, n| gather.field(feed, n).map(|_| ());
        // One byte decides on a state of its own; looking at it does not read it.
        match self.state {
            State::Footer if *feed.rest().first()? != 0x7e && self.gather.is_empty() => {
                // Footers are off (send-section-footer=off).
                return self.next(State::Tag);
            }
            State::AfterConfiguration if *feed.rest().first()? != 0x05 => {
                return self.next(State::Tag);
            }
            State::Tag if *feed.rest().first()? == 0x00 => {
                self.tail(feed, facts);
                facts.opaque = true;
                return self.next(State::Tail);
            }
            _ => {}
        }
        match self.state {
            State::FileHeader => {
                let b = self.gather.field(feed, 8)?;
                if b == b"QEVM\0\0\0\x03" {
                    return self.next(State::Tag);
                }
            }
            State::Tag => {
                let tag = self.gather.field(feed, 1)?[0];
                let state = match tag {
                    0x01 => State::SectionHead { full: false },
                    0x02 | 0x03 => State::SectionId { end: tag == 0x03 },
                    0x04 => State::SectionHead { full: true },
                    0x07 if facts.machine.is_none() && self.ram.is_none() => {
                        State::ConfigurationLen
                    }
                    0x08 => State::Command,
                    _ => return self.lost(feed, facts),
                };
                return self.next(state);
            }
            State::ConfigurationLen => {
                let len = be32(self.gather.field(feed, 4)?, 0) as usize;
                if len <= MAX_MACHINE_NAME {
                    return self.next(State::ConfigurationName { len });
                }
            }
            State::ConfigurationName { len } => {
                let name = self.gather.field(feed, len)?;
                facts.machine = Some(String::from_utf8_lossy(name).into_owned());
                return self.next(State::AfterConfiguration);
            }
            State::AfterConfiguration => {
                field(&mut self.gather, feed, 1)?;
                return self.next(State::SubsectionName);
            }
            State::SubsectionName => {
                let n = usize::from(self.gather.field(feed, 1)?[0]);
                let b = self.gather.field(feed, 1 + n + 4)?;
                let state = match (&b[1..1 + n], be32(b, 1 + n)) {
                    (b"configuration/target-page-bits", 1) => State::TargetPageBits,
                    (b"configuration/capabilities", 1) => State::CapabilityCount,
                    (b"configuration/uuid", 1) => State::Uuid,
                    _ => return self.lost(feed, facts),
                };
                return self.next(state);
            }
            State::TargetPageBits => {
                let bits = be32(self.gather.field(feed, 4)?, 0);
                if let Some(size) = 1usize.checked_shl(bits).filter(|&s| is_page_size(s)) {
                    facts.page_size = size;
                    return self.next(State::AfterConfiguration);
                }
            }
            State::CapabilityCount => {
                let left = be32(self.gather.field(feed, 4)?, 0);
                if left <= MAX_CAPABILITIES {
                    return self.next(State::Capability { left });
                }
            }
            State::Capability { left: 0 } => return self.next(State::AfterConfiguration),
            State::Capability { left } => {
                let n = usize::from(self.gather.field(feed, 1)?[0]);
                let name = &self.gather.field(feed, 1 + n)?[1..];
                facts.ignore_shared |= name == b"x-ignore-shared";
                if name != b"mapped-ram" {
                    return self.next(State::Capability { left: left - 1 });
                }
            }
            State::Uuid => {
                let b = self.gather.field(feed, 16)?;
                facts.uuid = b.try_into().ok();
                return self.next(State::AfterConfiguration);
            }
            State::Command => return self.command(feed, facts),
            State::SectionHead { full } => return self.section_head(full, feed, facts),
            State::SectionId { end } => {
                let id = be32(self.gather.field(feed, 4)?, 0);
                if facts.switch_end > 0 {
                    facts.switched = true;
                    facts.tail = false;
                }
                // Only RAM is iterated in postcopy but for block bitmaps, which do not survive a
                // pause.
                if self.form == Form::Recovery && self.ram.is_none() {
                    self.ram = Some(id);
                }
                if self.ram == Some(id) {
                    facts.vm_stopped_hint |= end;
                    let section = if end { Section::End } else { Section::Part };
                    return self.ram_section(id, section);
                }
                if let Some(&(_, handler)) = self.others.iter().find(|other| other.0 == id) {
                    self.footer = id;
                    return self.next(State::Other { handler, at: At::Record });
                }
            }
            State::Other { handler, at } => {
                match handlers::step(handler, at, &mut self.gather, feed)? {
                    Step::Go { at, skip } => {
                        self.skip = skip;
                        return self.next(State::Other { handler, at });
                    }
                    Step::End => return self.next(State::Footer),
                    Step::Surprise => {}
                }
            }
            State::VirtioMem => {
                let b = self.gather.field(feed, 36)?;
                let (region, block) = (be64(&b[8..]), be64(&b[16..]));
                let words = region.checked_div(block).map(|blocks| blocks.div_ceil(64));
                if let Some(words) = words.filter(|&w| w <= MAX_BITMAP_WORDS) {
                    self.skip = words * 8;
                    return self.next(State::Footer);
                }
            }
            State::Footer => {
                let id = be32(self.gather.field(feed, 5)?, 1);
                if id == self.footer {
                    return self.next(State::Tag);
                }
            }
            State::RecordNameLen { kind } => {
                let n = usize::from(self.gather.field(feed, 1)?[0]);
                let name = &self.gather.field(feed, 1 + n)?[1..];
                self.blocks.named(name, feed.pos());
                return self.next(Self::body_state(kind));
            }
            State::RecordBody { kind: FLAG_ZERO } => {
                field(&mut self.gather, feed, 1)?;
                return self.next(State::Record);
            }
            State::RecordBody { kind: FLAG_XBZRLE } => {
                let b = self.gather.field(feed, 3)?;
                let n = u64::from(u16::from_be_bytes([b[1], b[2]]));
                if b[0] == 0x01 && n <= size {
                    self.skip = n;
                    return self.next(State::Record);
                }
            }
            State::RecordBody { .. } => {
                let n = u64::from(be32(self.gather.field(feed, 4)?, 0));
                // zlib's compressBound of one page.
                if n <= size + (size >> 12) + (size >> 14) + 13 {
                    self.skip = n;
                    return self.next(State::Record);
                }
            }
            State::TableNameLen => {
                let n = usize::from(self.gather.field(feed, 1)?[0]);
                self.blocks.listed(&self.gather.field(feed, 1 + n)?[1..]);
                return self.next(State::TableLength);
            }
            State::TableLength => {
                let used = be64(self.gather.field(feed, 8)?);
                if let Some(left) = self.table_left.checked_sub(used) {
                    self.table_left = left;
                    self.blocks.length(used);
                    let state = match (facts.ignore_shared, self.block_page_sizes) {
                        (false, 0) => self.table_entry_done(),
                        (true, 0) => State::TableAddress,
                        (true, _) => State::TablePageSizeOrAddress,
                        (false, _) if left == 0 => State::TableLast,
                        (false, _) => State::TableNext,
                    };
                    return self.next(state);
                }
            }
            State::TableNext => {
                let n = usize::from(self.gather.field(feed, 1)?[0]);
                if n != 0 {
                    self.blocks.listed(&self.gather.field(feed, 1 + n)?[1..]);
                    return self.next(State::TableLength);
                }
                let value = be64(self.gather.field(feed, 8)?);
                if self.is_block_page_size(value) {
                    return self.next(State::TableNameLen);
                }
            }
            State::TableLast => {
                let (value, read) = self.record_value(feed)?;
                if !self.is_block_page_size(value) {
                    return self.judge(value, read, feed, facts);
                }
                return self.next(State::Record);
            }
            State::TablePageSizeOrAddress => {
                let value = be64(self.gather.field(feed, 8)?);
                let state = if self.is_block_page_size(value) {
                    State::TableAddress
                } else {
                    self.table_entry_done()
                };
                return self.next(state);
            }
            State::TableAddress => {
                field(&mut self.gather, feed, 8)?;
                let state = self.table_entry_done();
                return self.next(state);
            }
            State::Record | State::Body | State::Lost | State::Tail => {}
        }
        self.lost(feed, facts)
    }

    fn table_entry_done(&self) -> State {
        if self.table_left == 0 {
            State::Record
        } else {
            State::TableNameLen
        }
    }

    /// Whether the block table may carry `value` as the page size of a block.
    fn is_block_page_size(&self, value: u64) -> bool {
        // The field is left out for the host's base page, which is 4 KiB or more.
        value.is_power_of_two() && value & self.block_page_sizes != 0 && value > 4096
    }

    fn command(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        let head = be32(self.gather.field(feed, 4)?, 0);
        let (command, len) = (head >> 16, head & 0xffff);
        match (command, len) {
            (3, 16) => {
                self.block_page_sizes = be64(&self.gather.field(feed, 4 + 16)?[4..]);
                facts.postcopy = true;
            }
            (7, 4) => {
                let blob = be32(self.gather.field(feed, 4 + 4)?, 4);
                if blob > MAX_PACKAGED {
                    return self.lost(feed, facts);
                }
                self.skip = u64::from(blob);
                facts.postcopy_running = true;
                facts.vm_stopped_hint = true;
                // The destination runs the VM once it has the last byte of this.
                self.tail(feed, facts);
                // Behind opaque bytes the guest may have written what looks like this.
                if facts.resyncs == 0 {
                    facts.switch_end = facts.fed + feed.pos() as u64 + u64::from(blob);
                }
            }
            (1..=6 | 8..=11, _) => {
                match command {
                    1 => facts.return_path = true,
                    3 => facts.postcopy = true,
                    4 | 5 => facts.postcopy_running = true,
                    8 => facts.colo = true,
                    11 => facts.vm_stopped_hint = true,
                    _ => {}
                }
                self.skip = u64::from(len);
            }
            _ => return self.lost(feed, facts),
        }
        self.next(State::Tag)
    }

    fn section_head(&mut self, full: bool, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        let n = usize::from(self.gather.field(feed, 5)?[4]);
        let head = self.gather.field(feed, 5 + n + 8)?;
        let id = be32(head, 0);
        let name = &head[5..5 + n];
        let (instance, version) = (be32(head, 5 + n), be32(head, 5 + n + 4));
        if !full && name == b"ram" && (instance, version) == (0, 4) && self.ram.is_none() {
            return self.ram_section(id, Section::Start);
        }
        let known = self.others.iter().any(|other| other.0 == id) || self.ram == Some(id);
        match Handler::of(name) {
            Some(handler) if !full && !known && self.others.len() < MAX_OTHERS => {
                self.others.push((id, handler));
                self.footer = id;
                return self.next(State::Other { handler, at: At::Record });
            }
            _ => {}
        }
        if full && name.ends_with(b"virtio-mem-device-early") && self.section != Section::End {
            self.footer = id;
            return self.next(State::VirtioMem);
        }
        self.lost(feed, facts)
    }
}

/// How many whole zero records in a row `rest` begins with, the first of which has value `first`.
fn zero_run(rest: &[u8], first: u64, step: u64) -> u32 {
    let mut expected = first;
    let mut count = 0;
    for record in rest.chunks_exact(ZERO_RECORD_LEN) {
        if be64(record) != expected || record[8] != 0 || count == u32::MAX {
            break;
        }
        expected = expected.wrapping_add(step);
        count += 1;
    }
    count
}

/// How many whole page records in a row `rest` begins with, the first of which has value `first`.
fn page_run(rest: &[u8], first: u64, size: usize) -> u32 {
    let mut expected = first;
    let mut count = 0;
    for record in rest.chunks_exact(8 + size) {
        if be64(record) != expected || count == u32::MAX {
            break;
        }
        expected = expected.wrapping_add(size as u64);
        count += 1;
    }
    count
}
