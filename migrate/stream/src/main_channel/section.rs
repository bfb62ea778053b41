//! Parses everything around RAM's records: tags, commands, section heads, the bodies of handlers
//! other than RAM, and footers.

use super::state::{Form, Main, Section, State};
use crate::cursor::{be32, be64, Feed};
use crate::facts::Facts;
use crate::handlers::{self, At, Handler, Step};

/// Largest PACKAGED blob: QEMU's own limit (MAX_VM_CMD_PACKAGED_SIZE).
const MAX_PACKAGED: u32 = 512 << 20;
/// Most 64-bit words in a virtio-mem bitmap: 2^32 blocks.
const MAX_BITMAP_WORDS: u64 = 1 << 26;
/// Most sections of other handlers recorded; one a VFIO device, one each for the others.
const MAX_OTHERS: usize = 64;

impl Main {
    pub(super) fn section(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        match self.state {
            // One byte decides; it is not consumed here.
            State::Footer if *feed.rest().first()? != 0x7e && self.gather.is_empty() => {
                // The source writes no footers (send-section-footer=off).
                return self.next(State::Tag);
            }
            State::Tag if *feed.rest().first()? == 0x00 => {
                self.tail(feed, facts);
                facts.opaque = true;
                return self.next(State::Tail);
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
            State::Command => return self.command(feed, facts),
            State::SectionHead { full } => return self.section_head(full, feed, facts),
            State::SectionId { end } => {
                let id = be32(self.gather.field(feed, 4)?, 0);
                if facts.switch_end > 0 {
                    facts.switched = true;
                    facts.tail = false;
                }
                // In postcopy only RAM is iterated, apart from block bitmaps, which do not survive
                // a pause.
                if self.form == Form::Recovery && self.ram.is_none() {
                    self.ram = Some(id);
                }
                if self.ram == Some(id) {
                    facts.vm_stopped_hint |= end;
                    facts.sections += 1;
                    facts.set_up = true;
                    facts.ram_end |= end;
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
            _ => {}
        }
        self.lost(feed, facts)
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
                // The destination runs the VM once it has the last byte of this state.
                self.tail(feed, facts);
                // Behind opaque bytes the guest may have written bytes that look like this.
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
