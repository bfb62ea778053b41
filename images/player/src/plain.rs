//! The whole VM as the stream of an ordinary migration.

use std::io::{self, Write};
use std::sync::Arc;

use image::{Content, Extent, Image};

use crate::opening::can_play;
use crate::runs::Runs;
use crate::units_in_order::UnitsInOrder;
use crate::{wire, PlayError};

/// How a plain stream is written.
#[derive(Clone, Copy, Debug)]
pub struct PlainOptions {
    /// Decompression threads.
    pub threads: usize,
    /// The reader of the stream.
    pub reader: Reader,
    /// Whether a VM whose device state says `paused` runs in a QEMU that loads it without `-S`.
    pub runs: bool,
}

/// The reader of a plain stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Any program or QEMU, from a file or a pipe.
    Any,
    /// A QEMU at a socket. It reports at the end whether it loaded the VM.
    Qemu,
    /// A QEMU at a socket that has capability `postcopy-ram` on. It discards all of its RAM first,
    /// so that zero pages need not be sent. As [`Player::play`](crate::Player::play), this requires
    /// pages of 4096 bytes in the guest and on the host.
    EmptyQemu,
}

/// Maximum number of same-filled pages in a section: about as many bytes as a unit has.
const FILLED_PAGES: u64 = 32;
/// Length at which a section ends, bytes. A store may keep one page for all pages of RAM.
const SECTION: usize = 1 << 20;
/// Maximum number of zero pages in a section.
const ZERO_PAGES: u64 = 16384;

/// Writes all of `image` to `out`; returns the number of bytes. Each unit is checked before any of
/// its bytes are written, and the device state, without which QEMU runs nothing, comes last.
///
/// # Errors
///
/// A unit is damaged, `out` fails, or [`Reader::EmptyQemu`] cannot load the image.
pub fn plain(
    image: &Arc<Image>,
    out: &mut impl Write,
    how: PlainOptions,
) -> Result<u64, PlayError> {
    if how.reader == Reader::EmptyQemu {
        can_play(image)?;
    }
    let mut out = Counted { out, bytes: 0 };
    let state = image.state();
    let mut buffer = state.configuration.clone();
    if how.reader != Reader::Any {
        wire::command(&mut buffer, wire::OPEN_RETURN_PATH, &[]);
    }
    if how.reader == Reader::EmptyQemu {
        // QEMU prepares for postcopy by discarding every block, ROMs included. It then loads in
        // precopy, since no LISTEN follows.
        wire::advise(&mut buffer);
    }
    wire::start_of_ram(&mut buffer, image, false);
    buffer.extend_from_slice(&state.early);
    out.put(&mut buffer)?;
    let page_size = image.shape().page_size();
    let runs = Runs::new(image);
    let mut ahead = UnitsInOrder::new(image, how.threads)?;
    while let Some(unit) = ahead.next(|number| !runs.of(number).is_empty())? {
        wire::part(&mut buffer, state.ram_section);
        let mut last = None;
        for run in runs.of(unit.number) {
            let name = image.index().blocks[run.block].name.as_str();
            let slot = usize::try_from(run.slot % image.shape().unit_pages()).expect("in a unit");
            for (page, nth) in (run.page..run.page + run.pages).zip(slot..) {
                if buffer.len() >= SECTION {
                    wire::end_of_section(&mut buffer, state.ram_section);
                    out.put(&mut buffer)?;
                    wire::part(&mut buffer, state.ram_section);
                    last = None;
                }
                let bytes = &unit.bytes()[nth * page_size..(nth + 1) * page_size];
                let named = (last != Some(run.block)).then_some(name);
                wire::page(&mut buffer, page * page_size as u64, named, bytes);
                last = Some(run.block);
            }
        }
        wire::end_of_section(&mut buffer, state.ram_section);
        out.put(&mut buffer)?;
    }
    for block in &image.index().blocks {
        for extent in &block.extents {
            if extent.content != Content::Zero || how.reader != Reader::EmptyQemu {
                filled(image, &block.name, *extent, &mut buffer, &mut out)?;
            }
        }
    }
    wire::end_of_ram(&mut buffer, state.ram_section);
    let devices = how.runs.then(|| state.devices_that_run()).flatten();
    buffer.extend_from_slice(devices.as_ref().unwrap_or(&state.devices));
    wire::end_of_stream(&mut buffer, &state.description);
    out.put(&mut buffer)?;
    out.out.flush().map_err(PlayError::write)?;
    Ok(out.bytes)
}

/// Writes the pages of `extent` if they have no slots.
fn filled<W: Write>(
    image: &Image,
    name: &str,
    extent: Extent,
    buffer: &mut Vec<u8>,
    out: &mut Counted<'_, W>,
) -> Result<(), PlayError> {
    let page_size = image.shape().page_size();
    let (body, most) = match extent.content {
        Content::Slot(_) => return Ok(()),
        Content::Zero => (None, ZERO_PAGES),
        Content::Filled(word) => (Some(word.repeat(page_size / word.len())), FILLED_PAGES),
    };
    let end = extent.first + extent.pages;
    let mut first = extent.first;
    while first < end {
        let behind = end.min(first + most);
        wire::part(buffer, image.state().ram_section);
        for page in first..behind {
            let named = (page == first).then_some(name);
            let address = page * page_size as u64;
            match &body {
                None => wire::zero(buffer, address, named),
                Some(bytes) => wire::page(buffer, address, named, bytes),
            }
        }
        wire::end_of_section(buffer, image.state().ram_section);
        out.put(buffer)?;
        first = behind;
    }
    Ok(())
}

struct Counted<'a, W> {
    out: &'a mut W,
    bytes: u64,
}

impl<W: Write> Counted<'_, W> {
    /// Writes the buffer and empties it.
    fn put(&mut self, buffer: &mut Vec<u8>) -> Result<(), PlayError> {
        self.out.write_all(buffer).map_err(|error: io::Error| PlayError::write(error))?;
        self.bytes += buffer.len() as u64;
        buffer.clear();
        Ok(())
    }
}
