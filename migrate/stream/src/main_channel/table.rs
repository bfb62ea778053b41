//! The table of RAM blocks at the start of the RAM section.

use super::state::{Main, State};
use crate::cursor::{be64, Feed};
use crate::facts::Facts;

impl Main {
    pub(super) fn table(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        match self.state {
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
                self.gather.field(feed, 8)?;
                let state = self.table_entry_done();
                return self.next(state);
            }
            _ => {}
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
        // QEMU omits the field for the host's base page size, which is 4 KiB or more.
        value.is_power_of_two() && value & self.block_page_sizes != 0 && value > 4096
    }
}
