//! The file header, and the configuration section with its subsections.

use super::state::{Main, State};
use crate::cursor::{be32, Feed};
use crate::facts::Facts;
use crate::layout::is_page_size;

/// Longest machine type name accepted; QEMU's have about 20 bytes.
const MAX_MACHINE_NAME: usize = 256;
/// Most capabilities accepted in a configuration section; QEMU has under 40.
const MAX_CAPABILITIES: u32 = 256;

impl Main {
    pub(super) fn file_header(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        if self.gather.field(feed, 8)? == b"QEVM\0\0\0\x03" {
            return self.next(State::Tag);
        }
        self.lost(feed, facts)
    }

    pub(super) fn configuration(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        match self.state {
            // One byte decides; it is not consumed here.
            State::AfterConfiguration if *feed.rest().first()? != 0x05 => {
                return self.next(State::Tag);
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
                self.gather.field(feed, 1)?;
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
            _ => {}
        }
        self.lost(feed, facts)
    }
}
