//! Grammar of the main channel: file header, configuration, commands, sections of RAM.
//!
//! A state machine over fields (`state`), in the parts of the grammar (`configuration`, `section`,
//! `table`, `ram`). A field that a feed splits is collected in [`Gather`](crate::cursor::Gather);
//! long fields (page bodies, blobs, names) are skipped by length and never copied. Every transition
//! that needs no more bytes is made at once, so that [`Facts`] are current at the end of each feed.

mod configuration;
mod ram;
mod section;
mod state;
mod table;

pub(crate) use state::Main;

use crate::cursor::Feed;
use crate::facts::Facts;
use crate::resync::Found;
use state::{Markers, Section, State};

impl Main {
    pub(crate) fn run(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) {
        self.blocks.begin();
        while feed.skip(&mut self.skip) && self.step(feed, facts).is_some() {}
    }

    /// One transition; `None` when it needs bytes of the next feed.
    fn step(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        match self.state {
            State::Record => self.record(feed, facts),
            State::Body => self.body(feed, facts),
            State::RecordNameLen { .. } | State::RecordBody { .. } => self.record_rest(feed, facts),
            State::TableNameLen
            | State::TableLength
            | State::TableNext
            | State::TableLast
            | State::TablePageSizeOrAddress
            | State::TableAddress => self.table(feed, facts),
            State::FileHeader => self.file_header(feed, facts),
            State::ConfigurationLen
            | State::ConfigurationName { .. }
            | State::AfterConfiguration
            | State::SubsectionName
            | State::TargetPageBits
            | State::CapabilityCount
            | State::Capability { .. }
            | State::Uuid => self.configuration(feed, facts),
            State::Tag
            | State::Command
            | State::SectionHead { .. }
            | State::SectionId { .. }
            | State::VirtioMem
            | State::Other { .. }
            | State::Footer => self.section(feed, facts),
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
                        facts.set_up = true;
                        self.ram_section(id, if end { Section::End } else { Section::Part })
                    }
                }
            }
            State::Tail => {
                feed.advance(feed.rest().len());
                None
            }
        }
    }
}
