//! Parses the stream from its first to its last byte.

use std::io::{Read, Seek};

use image::{State, MAX_STATE};

use crate::configuration::{self, Configuration};
use crate::error::DEVICE_STATE;
use crate::ram::Ram;
use crate::section::{footer, head};
use crate::source::{refused, unknown, Source};
use crate::tail::{Collector, FOOTER};
use crate::target::{Alone, Target};
use crate::{RecordError, Sink};

/// The mark of a stream's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// End of file: the stream is in a file.
    Closed,
    /// End of the vmdescription: the stream comes from a QEMU with a return path, which then waits
    /// for SHUT.
    Described,
}

/// Device state and counts of a recorded stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Device state, with empty facts.
    pub state: State,
    /// Pages sent with their bytes, each version counted.
    pub pages: u64,
    /// Pages sent as zero, each version counted.
    pub zeros: u64,
    /// Length of the stream, bytes.
    pub bytes: u64,
    /// Whether the stream had OPEN_RETURN_PATH: QEMU then waits for SHUT at the end.
    pub return_path: bool,
    /// Whether the stream had a record with which multifd orders its channels.
    pub flushes: bool,
    /// Whether the stream was a mapped-ram file: pages that were not passed to the sink are zero.
    pub mapped_ram: bool,
}

// Section types (`QEMU_VM_*`).
const END_OF_STREAM: u8 = 0x00;
const START: u8 = 0x01;
const PART: u8 = 0x02;
const END: u8 = 0x03;
const FULL: u8 = 0x04;
const COMMAND: u8 = 0x08;

// Commands (`MIG_CMD_*`).
const OPEN_RETURN_PATH: u16 = 1;
const PING: u16 = 2;
const POSTCOPY_ADVISE: u16 = 3;
const ENABLE_COLO: u16 = 8;
const SWITCHOVER_START: u16 = 11;

/// Maximum length of all device sections and the description, bytes. The rest of an image's state
/// is for its other records.
const MAX_SECTIONS: u64 = MAX_STATE - (1 << 20);
/// Maximum number of words in a virtio-mem bitmap: 2^32 blocks.
const MAX_BITMAP_WORDS: u64 = 1 << 26;

/// Records one stream: passes its pages to `sink` and returns the rest.
///
/// # Errors
///
/// The stream is defective, with the offset of the defect; the stream cannot be saved; or the sink
/// fails.
pub fn record<R: Read, S: Sink>(
    reader: R,
    sink: &mut S,
    ending: Ending,
) -> Result<Recorded, RecordError<S::Error>> {
    Ok(parse(&mut Source::new(reader), &mut Alone(sink), ending)?.0)
}

/// Records the stream that begins at the file's position and ends at its end: a plain stream, or a
/// mapped-ram file. The pages of the latter are read once the rest is known to be whole.
///
/// # Errors
///
/// The errors of [`record`]. Offsets are those of the file.
pub fn record_file<F: Read + Seek, S: Sink>(
    file: F,
    sink: &mut S,
) -> Result<Recorded, RecordError<S::Error>> {
    let mut source = Source::of_file(file)?;
    let (mut recorded, ram) = parse(&mut source, &mut Alone(&mut *sink), Ending::Closed)?;
    recorded.pages += ram.mapped_pages(&mut source.into_reader(), sink)?;
    Ok(recorded)
}

/// Parses a stream. The pages of a mapped-ram file are still to be read.
pub(crate) fn parse<R: Read, T: Target>(
    source: &mut Source<R>,
    sink: &mut T,
    ending: Ending,
) -> Result<(Recorded, Ram), RecordError<T::Error>> {
    let first = source.at();
    let Configuration { page_size, kept, mapped_ram } = configuration::read(source)?;
    let mut this = Recording {
        ram: Ram::new(page_size, mapped_ram),
        state: State { configuration: kept, ..State::default() },
        section: None,
        ended: false,
        return_path: false,
    };
    while this.element(source, sink)? {}
    if !this.ended && !this.ram.is_complete() {
        return Err(unknown(source.at(), "device state before the end of RAM"));
    }
    if !this.ram.has_blocks() {
        return Err(unknown(source.at(), "RAM without a block table"));
    }
    if !mapped_ram {
        agree(source, &this.ram, sink.is_multifd())?;
    }
    source.during = DEVICE_STATE;
    let mut tail = Collector::default();
    let tail = loop {
        if ending == Ending::Described {
            if let Some(tail) = tail.whole(&this.state.early) {
                break tail;
            }
        }
        match source.rest()? {
            Some(bytes) => tail.push(bytes),
            None => match tail.whole(&this.state.early) {
                Some(tail) => break tail,
                None => return Err(RecordError::Ends { at: source.at(), during: source.during }),
            },
        }
        if (this.state.early.len() + tail.len()) as u64 > MAX_SECTIONS {
            return Err(too_much_state());
        }
    };
    (this.state.devices, this.state.description) = (tail.devices, tail.description);
    let recorded = Recorded {
        state: this.state,
        pages: this.ram.pages,
        zeros: this.ram.zeros,
        bytes: source.at() - first,
        return_path: this.return_path,
        flushes: this.ram.flushes,
        mapped_ram,
    };
    Ok((recorded, this.ram))
}

struct Recording {
    ram: Ram,
    state: State,
    /// Section id of the RAM section, once it has begun.
    section: Option<u32>,
    /// Whether the end of the RAM section was read.
    ended: bool,
    return_path: bool,
}

impl Recording {
    /// Reads one element before the device state; false where the device state begins.
    fn element<R: Read, T: Target>(
        &mut self,
        source: &mut Source<R>,
        sink: &mut T,
    ) -> Result<bool, RecordError<T::Error>> {
        source.during = "between sections";
        let at = source.at();
        match source.peek(1)?[0] {
            COMMAND => self.command(source)?,
            START => {
                source.take(1)?;
                let (section, name, instance, version) = head(source)?;
                if name != "ram" {
                    return Err(refused(format!(
                        "'{}' is sent in parts beside RAM, which platen does not save: detach the device, or turn the capability off",
                        name.escape_default()
                    )));
                }
                if self.section.is_some() || (instance, version) != (0, 4) {
                    return Err(unknown(at, format!("RAM in version {version}, or twice")));
                }
                self.section = Some(section);
                (self.state.ram_section, self.state.ram_version) = (section, version);
                source.during = "in its RAM";
                self.ram.body(source, sink)?;
                footer(source, section)?;
            }
            tag @ (PART | END) => {
                source.take(1)?;
                let section = source.u32()?;
                if self.section != Some(section) || self.ended {
                    return Err(unknown(
                        at,
                        format!("a part of section {section}, which is not RAM's"),
                    ));
                }
                source.during = "in its RAM";
                self.ram.body(source, sink)?;
                footer(source, section)?;
                self.ended = tag == END;
                if self.ended && sink.is_multifd() && !self.ram.at_barrier {
                    return Err(unknown(at, "an end of RAM without a barrier for multifd"));
                }
            }
            // A background-snapshot has no end of RAM: device state follows the last page.
            FULL if self.ended || self.ram.is_complete() => return Ok(false),
            FULL => self.early(source)?,
            END_OF_STREAM if self.ended => return Ok(false),
            tag => return Err(unknown(at, format!("an element with tag {tag:#x}"))),
        }
        Ok(true)
    }

    fn command<R: Read, E>(&mut self, source: &mut Source<R>) -> Result<(), RecordError<E>> {
        let at = source.at();
        source.take(1)?;
        let (command, len) = (source.u16()?, source.u16()?);
        match (command, len) {
            (OPEN_RETURN_PATH, 0) => self.return_path = true,
            (PING, 4) => {
                source.take(4)?;
            }
            (POSTCOPY_ADVISE, 16) => {
                self.ram.host_pages = source.u64()?;
                source.take(8)?;
            }
            (SWITCHOVER_START, 0) => {}
            (ENABLE_COLO, _) => return Err(refused("x-colo is on: turn it off")),
            _ => {
                let what = format!("command {command} of {len} bytes, which no plain save has");
                return Err(unknown(at, what));
            }
        }
        Ok(())
    }

    /// Reads a device section that precedes the pages. Only virtio-mem has one.
    fn early<R: Read, E>(&mut self, source: &mut Source<R>) -> Result<(), RecordError<E>> {
        source.during = "in a section before its pages";
        let at = source.at();
        source.take(1)?;
        let (section, name, instance, version) = head(source)?;
        if !name.ends_with("virtio-mem-device-early") {
            if self.ram.is_mapped() {
                return Err(refused(
                    "with background-snapshot on, QEMU does not mark the pages of a mapped-ram file: turn background-snapshot off and save again",
                ));
            }
            let what = format!("device '{}' before the end of RAM", name.escape_default());
            return Err(unknown(at, what));
        }
        let fixed: [u8; 36] = source.array()?;
        let word = |at: usize| u64::from_be_bytes(fixed[at..at + 8].try_into().expect("8 bytes"));
        let words = word(8).checked_div(word(16)).map(|blocks| blocks.div_ceil(64));
        let words = words.filter(|&words| words <= MAX_BITMAP_WORDS);
        let words = words.ok_or_else(|| unknown(at, "a bitmap of virtio-mem without bounds"))?;
        let early = &mut self.state.early;
        early.push(FULL);
        early.extend(section.to_be_bytes());
        early.push(u8::try_from(name.len()).expect("read from one byte"));
        early.extend(name.as_bytes());
        early.extend(instance.to_be_bytes());
        early.extend(version.to_be_bytes());
        early.extend(fixed);
        for _ in 0..words {
            early.extend(source.array::<8, E>()?);
            if early.len() as u64 > MAX_SECTIONS {
                return Err(too_much_state());
            }
        }
        footer(source, section)?;
        early.push(FOOTER);
        early.extend(section.to_be_bytes());
        Ok(())
    }
}

fn too_much_state<E>() -> RecordError<E> {
    refused(format!("it has more than {MAX_SECTIONS} bytes of device state, an image's limit"))
}

/// Compares the counts of the grammar and of the tokeniser.
fn agree<R: Read, E>(source: &Source<R>, ram: &Ram, multifd: bool) -> Result<(), RecordError<E>> {
    let facts = source.judge();
    // Without multifd, the end of a section is a barrier only for the tokeniser.
    let barriers = if multifd { facts.barriers } else { 0 };
    for (what, ours, theirs) in [
        ("pages", ram.pages, facts.normal),
        ("zero pages", ram.zeros, facts.duplicate),
        ("deltas", 0, facts.xbzrle + facts.compressed_records),
        ("gaps", 0, facts.resyncs),
        ("barriers", ram.barriers, barriers),
    ] {
        if ours != theirs {
            return Err(RecordError::Disagree { what, ours, theirs });
        }
    }
    Ok(())
}
