//! Records of RAM: pages, zero pages, barrier markers, and the end of a section's body.

use super::state::{Form, Main, Markers, Section, State};
use crate::cursor::{be32, be64, Feed};
use crate::facts::Facts;
use crate::token::{
    Token, FLAG_COMPRESS_PAGE, FLAG_CONTINUE, FLAG_EOS, FLAG_FLUSH, FLAG_MEM_SIZE, FLAG_PAGE,
    FLAG_XBZRLE, FLAG_ZERO, PAGE_FLAGS, ZERO_FLAGS, ZERO_RECORD_LEN,
};

impl Main {
    pub(super) fn record(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
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

    pub(super) fn body(&mut self, feed: &mut Feed<'_>, facts: &Facts) -> Option<()> {
        let size = facts.page_size;
        if feed.rest().len() >= size {
            feed.take(Token::Bodies { count: 1 }, size);
        } else {
            self.skip = size as u64;
        }
        self.next(State::Record)
    }

    /// Parses the fields that follow a record's `u64`, for records outside runs.
    pub(super) fn record_rest(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        let size = facts.page_size as u64;
        match self.state {
            State::RecordNameLen { kind } => {
                let n = usize::from(self.gather.field(feed, 1)?[0]);
                let name = &self.gather.field(feed, 1 + n)?[1..];
                self.blocks.named(name, feed.pos());
                return self.next(Self::body_state(kind));
            }
            State::RecordBody { kind: FLAG_ZERO } => {
                self.gather.field(feed, 1)?;
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
            _ => {}
        }
        self.lost(feed, facts)
    }

    /// Reads the next `u64`; returns it and the number of its bytes in this feed.
    pub(super) fn record_value(&mut self, feed: &mut Feed<'_>) -> Option<(u64, usize)> {
        let before = feed.pos();
        let value = be64(self.gather.field(feed, 8)?);
        self.gather.done();
        Some((value, feed.pos() - before))
    }

    /// Continues behind a record's `u64`, by its flags.
    pub(super) fn judge(
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
                facts.set_up |= self.form != Form::Preempt;
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
            facts.ram = self.table_left;
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

    /// Counts a barrier marker if `kind` marks barriers in this stream. Its last `len` bytes were
    /// just read.
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

    fn body_state(kind: u64) -> State {
        if kind == FLAG_PAGE {
            State::Body
        } else {
            State::RecordBody { kind }
        }
    }
}

/// How many whole consecutive zero records `rest` begins with; the first has value `first`.
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

/// How many whole consecutive page records `rest` begins with; the first has value `first`.
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
