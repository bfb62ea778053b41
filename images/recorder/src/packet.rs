//! Parses the packets of a multifd channel.

use std::io::Read;

use image::RamBlock;
use stream::multifd_header_len;

use crate::source::{refused, unknown, Source};
use crate::RecordError;

/// Length of a channel's first packet.
pub(crate) const INIT_LEN: usize = 64;
/// Magic and version, with which each packet begins.
const BEGIN: [u8; 8] = [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1];
/// Bytes of pages in a full packet; fixed in QEMU.
const FULL: usize = 512 << 10;
/// Offset of the block's name in a header, and offset of the pages' places.
const NAME: usize = 64;
const PLACES: usize = 320;

// Flags of a packet (`MULTIFD_FLAG_*`).
const SYNC: u32 = 0x01;
const METHODS: u32 = 0x3e;
const DEVICE_STATE: u32 = 0x40;

/// The RAM that the main channel has announced.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) page_size: usize,
    pub(crate) blocks: Vec<RamBlock>,
}

/// A channel's first packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Init {
    pub(crate) uuid: [u8; 16],
    pub(crate) channel: u8,
}

impl Init {
    pub(crate) fn parse<E>(bytes: &[u8; INIT_LEN]) -> Result<Self, RecordError<E>> {
        if bytes[..8] != BEGIN {
            return Err(unknown(0, "it does not begin as a multifd channel of version 1 does"));
        }
        let uuid = bytes[8..24].try_into().expect("16 bytes");
        Ok(Self { uuid, channel: bytes[24] })
    }
}

/// The header of a packet. Its payload has the pages that are not zero.
#[derive(Debug, Default)]
pub(crate) struct Packet {
    /// Whether a barrier follows the packet's pages.
    pub(crate) sync: bool,
    /// Index of the block to which the pages belong.
    pub(crate) block: usize,
    /// Numbers of the pages in the block: first those in the payload, then those that are zero.
    pub(crate) pages: Vec<u64>,
    /// How many of the pages are in the payload.
    pub(crate) normal: usize,
}

impl Packet {
    /// Reads the next header. A packet without pages may have a block, places and a payload length
    /// left over from the packet before, which mean nothing.
    pub(crate) fn read<R: Read, E>(
        &mut self,
        source: &mut Source<R>,
        table: &Table,
    ) -> Result<(), RecordError<E>> {
        let at = source.at();
        let fault = |what: String| Err(unknown(at, what));
        let word = |bytes: &[u8], at: usize| {
            u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
        };
        // The packets of a device's state have a shorter header.
        let begin: [u8; 12] = source.peek(12)?.try_into().expect("12 bytes");
        if begin[..8] != BEGIN {
            return fault("no packet begins here".into());
        }
        let flags = word(&begin, 8);
        if flags & DEVICE_STATE != 0 {
            return Err(refused(
                "a device sends its state through multifd channels (VFIO), which platen does not save: detach the device",
            ));
        }
        if flags & !(SYNC | METHODS) != 0 {
            return fault(format!("a packet with flags {flags:#x}"));
        }
        if flags & METHODS != 0 {
            return Err(refused(
                "multifd-compression is on: set it to none (migrate-set-parameters)",
            ));
        }
        let header = source.take(multifd_header_len(table.page_size))?;
        let page_size = table.page_size;
        let (capacity, normal) = (word(header, 12) as usize, word(header, 16) as usize);
        let zeros = word(header, 32) as usize;
        self.sync = flags & SYNC != 0;
        self.normal = normal;
        self.pages.clear();
        // A SYNC of QEMU 9.2 and later has no capacity.
        let full = FULL / page_size;
        if capacity != full && (capacity, normal, zeros) != (0, 0, 0) {
            return fault(format!("a packet with room for {capacity} pages"));
        }
        if normal.saturating_add(zeros) > full {
            return fault(format!("a packet with {normal} and {zeros} pages"));
        }
        if normal + zeros == 0 {
            return Ok(());
        }
        let payload = word(header, 20) as usize;
        if normal > 0 && payload != normal * page_size {
            return fault(format!("a packet with {normal} pages in {payload} bytes"));
        }
        let name = &header[NAME..PLACES];
        let name = &name[..name.iter().position(|&byte| byte == 0).unwrap_or(name.len())];
        let found = table.blocks.iter().position(|block| block.name.as_bytes() == name);
        let Some(block) = found else {
            let name = name.escape_ascii();
            return fault(format!("pages of block '{name}', which is not in the block table"));
        };
        self.block = block;
        let len = table.blocks[block].len;
        for place in header[PLACES..].chunks_exact(8).take(normal + zeros) {
            let place = u64::from_be_bytes(place.try_into().expect("8 bytes"));
            let page = place / page_size as u64;
            if place >= len || page * page_size as u64 != place {
                let name = table.blocks[block].name.escape_default();
                return fault(format!("page {place:#x} of block '{name}' of {len} bytes"));
            }
            self.pages.push(page);
        }
        Ok(())
    }
}
