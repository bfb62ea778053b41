//! Grammar of a multifd channel: init packet, then packets of a header and a payload.
//!
//! The header of a RAM packet has one length per migration, which follows from `pages_alloc` in the
//! first packet. The payload's length is never derived from `next_packet_size` alone: QEMU up to
//! 8.1 leaves a stale value there in packets without pages.

use crate::blocks::BlockTable;
use crate::cursor::{be32, Feed, Gather};
use crate::facts::Facts;
use crate::layout::{is_page_size, multifd_header_len, MULTIFD_PACKET_SIZE};
use crate::places::Places;
use crate::token::Token;

const INIT_LEN: usize = 64;
const MAGIC_AND_VERSION: [u8; 8] = [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1];
const DEVICE_HEADER_LEN: usize = 276;
/// Fields up to and including `zero_pages`.
const FIELDS_LEN: usize = 36;

const FLAG_SYNC: u32 = 0x01;
const METHOD_MASK: u32 = 0x3e;
const FLAG_DEVICE: u32 = 0x40;

/// The most bytes of a compressed payload: twice the pages, more than any method's bound.
const MAX_PAYLOAD: u32 = 2 * 512 * 1024;
/// The most bytes of a device-state packet; VFIO sends at most 1 MiB.
const MAX_DEVICE_STATE: u32 = 64 << 20;

#[derive(Clone, Debug)]
pub(crate) struct Channel {
    state: State,
    gather: Gather,
    /// Bytes to skip before `state` continues.
    skip: u64,
    /// Whether the header length is known.
    sized: bool,
    /// Whether the current packet has SYNC set.
    sync: bool,
    /// Ends of the SYNC packets completed in this feed, counted from its first byte.
    sync_ends: Vec<usize>,
    /// Pages with bytes of the current packet.
    normal: u32,
    /// The addresses of pages, if they are wanted.
    places: Option<Places>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Init,
    Header,
    Pages { left: u64 },
    End,
    Opaque,
}

impl Default for Channel {
    fn default() -> Self {
        Channel {
            state: State::Init,
            gather: Gather::new(),
            skip: 0,
            sized: false,
            sync: false,
            sync_ends: Vec::new(),
            normal: 0,
            places: None,
        }
    }
}

impl Channel {
    pub(crate) fn run(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) {
        self.sync_ends.clear();
        if let Some(places) = &mut self.places {
            places.begin();
        }
        while feed.skip(&mut self.skip) && self.step(feed, facts).is_some() {}
    }

    /// See [`crate::Tokeniser::sync_ends`].
    pub(crate) fn sync_ends(&self) -> &[usize] {
        &self.sync_ends
    }

    /// See [`crate::Tokeniser::find_places`].
    pub(crate) fn find_places(&mut self, blocks: &BlockTable) {
        self.places.get_or_insert_with(|| Places::new(blocks.clone()));
    }

    /// See [`crate::Tokeniser::places`].
    pub(crate) fn places(&self) -> &[u64] {
        self.places.as_ref().map_or(&[], Places::of_feed)
    }

    /// One transition; `None` when it needs bytes of the next feed.
    fn step(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        match self.state {
            State::Init => {
                let b = self.gather.field(feed, INIT_LEN)?;
                if b[..8] != MAGIC_AND_VERSION {
                    return self.opaque(facts);
                }
                facts.uuid = b[8..24].try_into().ok();
                facts.channel = Some(b[24]);
                self.next(State::Header)
            }
            State::Header => self.header(feed, facts),
            State::Pages { left } => self.pages(left, feed, facts),
            State::End => {
                if self.sync {
                    facts.syncs += 1;
                    self.sync_ends.push(feed.pos());
                }
                self.next(State::Header)
            }
            State::Opaque => {
                feed.advance(feed.rest().len());
                None
            }
        }
    }

    fn next(&mut self, state: State) -> Option<()> {
        self.gather.done();
        self.state = state;
        Some(())
    }

    fn opaque(&mut self, facts: &mut Facts) -> Option<()> {
        facts.opaque = true;
        self.next(State::Opaque)
    }

    fn header(&mut self, feed: &mut Feed<'_>, facts: &mut Facts) -> Option<()> {
        let rest = feed.rest();
        if self.gather.is_empty() && rest.len() >= FIELDS_LEN {
            if let Some(packet) = Packet::parse(rest, self.sized, facts.page_size) {
                let len = multifd_header_len(packet.page_size);
                if rest.len() >= len {
                    feed.take(Token::MultifdHeader, len);
                    return self.packet(packet, Some(&rest[..len]), facts);
                }
            }
        }
        let b = self.gather.field(feed, FIELDS_LEN)?;
        if b[..8] != MAGIC_AND_VERSION {
            return self.opaque(facts);
        }
        if be32(b, 8) == FLAG_DEVICE {
            let size = be32(self.gather.field(feed, DEVICE_HEADER_LEN)?, 272);
            if size == 0 || size > MAX_DEVICE_STATE {
                return self.opaque(facts);
            }
            facts.device_packets += 1;
            self.skip = u64::from(size);
            return self.next(State::Header);
        }
        let Some(packet) = Packet::parse(b, self.sized, facts.page_size) else {
            return self.opaque(facts);
        };
        self.skip = (multifd_header_len(packet.page_size) - FIELDS_LEN) as u64;
        self.packet(packet, None, facts)
    }

    /// Continues behind the header of `packet`, or behind the part that `skip` covers. `header` are
    /// its bytes, if one feed has them all.
    fn packet(&mut self, packet: Packet, header: Option<&[u8]>, facts: &mut Facts) -> Option<()> {
        self.sized = true;
        self.sync = packet.sync;
        self.normal = packet.normal;
        if let Some(places) = &mut self.places {
            places.packet(header, packet.normal);
        }
        facts.page_size = packet.page_size;
        facts.packets += 1;
        facts.normal += u64::from(packet.normal);
        facts.duplicate += u64::from(packet.zero);
        if packet.method != 0 {
            facts.multifd_method = packet.method;
        }
        if packet.normal == 0 {
            return self.next(State::End);
        }
        if packet.method == 0 {
            let left = u64::from(packet.normal) * packet.page_size as u64;
            return self.next(State::Pages { left });
        }
        self.skip += u64::from(packet.payload);
        self.next(State::End)
    }

    /// The payload of method none: whole bodies, and parts of bodies that feeds split.
    fn pages(&mut self, mut left: u64, feed: &mut Feed<'_>, facts: &Facts) -> Option<()> {
        let size = facts.page_size as u64;
        let mut cut = left % size;
        if cut > 0 {
            let before = cut;
            feed.skip(&mut cut);
            left -= before - cut;
        }
        let count = left.min(feed.rest().len() as u64) / size;
        if cut == 0 && count > 0 {
            let count = u32::try_from(count).unwrap_or(u32::MAX);
            if let Some(places) = &mut self.places {
                let first = self.normal as usize - usize::try_from(left / size).unwrap_or(0);
                places.bodies(first..first + count as usize);
            }
            feed.take(Token::Bodies { count }, count as usize * facts.page_size);
            left -= u64::from(count) * size;
        }
        if left > 0 {
            // The first part of a body: the rest comes with the next feed.
            feed.skip(&mut left);
            self.state = State::Pages { left };
            return None;
        }
        self.next(State::End)
    }
}

/// The fields of a RAM packet header that determine the payload.
struct Packet {
    sync: bool,
    method: u32,
    normal: u32,
    zero: u32,
    payload: u32,
    page_size: usize,
}

impl Packet {
    /// Parses at least [`FIELDS_LEN`] bytes. Returns `None` for a header that no QEMU writes, and
    /// for a device-state packet. `sized`: the page size is known.
    fn parse(b: &[u8], sized: bool, page_size: usize) -> Option<Packet> {
        if b[..8] != MAGIC_AND_VERSION {
            return None;
        }
        let flags = be32(b, 8);
        let (alloc, normal) = (be32(b, 12), be32(b, 16));
        let (payload, zero) = (be32(b, 20), be32(b, 32));
        let method = flags & METHOD_MASK;
        if flags & !(FLAG_SYNC | METHOD_MASK) != 0 || !(method == 0 || method.is_power_of_two()) {
            return None;
        }
        let page_size = match MULTIFD_PACKET_SIZE.checked_div(alloc as usize) {
            // SYNC packets of 9.2 and later carry 0 here.
            None => page_size,
            Some(size)
                if !sized && is_page_size(size) && size * alloc as usize == MULTIFD_PACKET_SIZE =>
            {
                size
            }
            Some(size) if size == page_size && size * alloc as usize == MULTIFD_PACKET_SIZE => size,
            Some(_) => return None,
        };
        if normal > alloc || zero > alloc - normal {
            return None;
        }
        if normal > 0 {
            let plain = u64::from(normal) * page_size as u64;
            let sane = match method {
                0 => u64::from(payload) == plain,
                _ => payload <= MAX_PAYLOAD,
            };
            if !sane {
                return None;
            }
        }
        Some(Packet { sync: flags & FLAG_SYNC != 0, method, normal, zero, payload, page_size })
    }
}
