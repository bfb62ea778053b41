//! Reads pages only to see whether they can be read.

use std::ops::Range;

use crate::entry::MAX_OBJECT;
use crate::group_buffer::GroupBuffer;
use crate::page::Page;
use crate::worker::Worker;
use crate::writeback::BackBuffer;

/// The result of [`Worker::check`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Pages that are stored and readable.
    pub sound: u64,
    /// Pages that cannot be read.
    pub damaged: u64,
}

impl Worker {
    /// Reads these pages to count which can be read. Their ages do not change.
    pub fn check(&self, pages: Range<u64>) -> Checked {
        let mut out = [0; MAX_OBJECT];
        let mut buffer = GroupBuffer::new();
        let mut block = BackBuffer::new();
        let mut checked = Checked::default();
        for index in pages.start..pages.end.min(self.store().pages()) {
            let mut found = self.look(index, &mut out);
            loop {
                let there = match found {
                    Ok(Page::Grouped) => self.look_group(index, &mut buffer).map(|at| at.is_some()),
                    Ok(Page::Backed) => {
                        self.read_back(index, &mut block, &mut out).map(|page| page.is_some())
                    }
                    _ => break,
                };
                match there {
                    Ok(true) => break,
                    // The page changed meanwhile.
                    Ok(false) => found = self.look(index, &mut out),
                    Err(error) => found = Err(error),
                }
            }
            match found {
                Ok(Page::Absent) => {}
                Ok(_) => checked.sound += 1,
                Err(_) => checked.damaged += 1,
            }
        }
        checked
    }
}
