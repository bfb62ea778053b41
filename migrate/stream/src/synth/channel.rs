//! A synthetic multifd channel.

use super::style::Style;
use crate::layout::{multifd_header_len, MULTIFD_PACKET_SIZE};

const SYNC: u32 = 0x01;
const DEVICE_STATE: u32 = 0x40;

/// Writes a multifd channel, packet by packet.
///
/// Like QEMU it reuses one packet header, so that fields which a version leaves stale are stale
/// here.
#[derive(Debug)]
pub struct ChannelStream {
    out: Vec<u8>,
    style: Style,
    page_size: usize,
    header: Vec<u8>,
}

impl ChannelStream {
    /// Creates a channel with its init packet written; the VM's UUID is 00 01 02 ...
    pub fn new(style: Style, page_size: usize, id: u8) -> Self {
        let mut out = b"\x11\x22\x33\x44\0\0\0\x01".to_vec();
        out.extend(0..16);
        out.push(id);
        out.resize(64, 0);
        let mut header = vec![0; multifd_header_len(page_size)];
        header[..8].copy_from_slice(b"\x11\x22\x33\x44\0\0\0\x01");
        ChannelStream { out, style, page_size, header }
    }

    /// Returns the bytes written since the last call.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Bytes not taken yet.
    pub fn len(&self) -> usize {
        self.out.len()
    }

    /// Whether all bytes written have been taken.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Writes a packet of pages of one block in ascending order; `None` is a zero page. No
    /// compression.
    pub fn packet(
        &mut self,
        number: u64,
        block: &str,
        pages: &[(u64, Option<&[u8]>)],
        sync: bool,
    ) -> &mut Self {
        let offsets: Vec<_> = pages.iter().map(|page| (page.0, page.1.is_none())).collect();
        let order = partition(&offsets);
        let normal = pages.iter().filter(|page| page.1.is_some()).count();
        let payload: Vec<u8> = order[..normal]
            .iter()
            .flat_map(|offset| {
                let page = pages.iter().find(|page| page.0 == *offset).and_then(|page| page.1);
                page.expect("a normal page has bytes").to_vec()
            })
            .collect();
        self.put(number, u32::from(sync) * SYNC, block, &order, normal, &payload)
    }

    /// Writes a packet whose payload a compression method made (2 zlib, 4 zstd ...).
    pub fn compressed(
        &mut self,
        number: u64,
        method: u32,
        block: &str,
        offsets: &[u64],
        payload: &[u8],
    ) -> &mut Self {
        self.put(number, method, block, offsets, offsets.len(), payload)
    }

    /// Writes a SYNC packet without pages, in this style.
    pub fn sync(&mut self, number: u64) -> &mut Self {
        self.without_pages(number, SYNC)
    }

    /// Writes the empty packet that 7.2 sends after a SYNC set on a packet with pages, with the
    /// same number.
    pub fn empty(&mut self, number: u64) -> &mut Self {
        self.without_pages(number, 0)
    }

    /// Writes a device-state packet (10.0 and later).
    pub fn device_state(&mut self, name: &str, instance: u32, state: &[u8]) -> &mut Self {
        let mut header = vec![0; 276];
        header[..8].copy_from_slice(b"\x11\x22\x33\x44\0\0\0\x01");
        header[8..12].copy_from_slice(&DEVICE_STATE.to_be_bytes());
        header[12..12 + name.len()].copy_from_slice(name.as_bytes());
        header[268..272].copy_from_slice(&instance.to_be_bytes());
        let len = u32::try_from(state.len()).expect("made state is short");
        header[272..276].copy_from_slice(&len.to_be_bytes());
        self.out.extend(header);
        self.out.extend_from_slice(state);
        self
    }

    fn without_pages(&mut self, number: u64, flags: u32) -> &mut Self {
        match self.style {
            // Size, id and offsets of the previous packet remain.
            Style::Qemu72 => {
                self.field(12, self.capacity());
                self.field(16, 0);
            }
            Style::Qemu90 => {
                self.field(12, self.capacity());
                for at in [16, 20, 32] {
                    self.field(at, 0);
                }
            }
            Style::Qemu92 => self.header[8..].fill(0),
        }
        self.field(8, flags);
        self.header[24..32].copy_from_slice(&number.to_be_bytes());
        self.out.extend_from_slice(&self.header);
        self
    }

    fn put(
        &mut self,
        number: u64,
        flags: u32,
        block: &str,
        order: &[u64],
        normal: usize,
        payload: &[u8],
    ) -> &mut Self {
        if self.style == Style::Qemu92 {
            self.header[8..].fill(0);
        }
        self.field(8, flags);
        self.field(12, self.capacity());
        self.field(16, u32::try_from(normal).expect("at most a packet's pages"));
        self.field(20, u32::try_from(payload.len()).expect("at most a packet's bytes"));
        self.header[24..32].copy_from_slice(&number.to_be_bytes());
        self.field(32, u32::try_from(order.len() - normal).expect("at most a packet's pages"));
        self.header[64..320].fill(0);
        self.header[64..64 + block.len()].copy_from_slice(block.as_bytes());
        for (slot, offset) in self.header[320..].chunks_exact_mut(8).zip(order) {
            slot.copy_from_slice(&offset.to_be_bytes());
        }
        self.out.extend_from_slice(&self.header);
        self.out.extend_from_slice(payload);
        self
    }

    fn capacity(&self) -> u32 {
        u32::try_from(MULTIFD_PACKET_SIZE / self.page_size).expect("at most 512")
    }

    fn field(&mut self, at: usize, value: u32) {
        self.header[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
}

/// The order in which QEMU leaves offsets after moving zero pages (true) behind the others.
///
/// Implemented from the description, independently of the decoder, so that the two check each
/// other.
fn partition(pages: &[(u64, bool)]) -> Vec<u64> {
    let mut pages = pages.to_vec();
    let mut i = 0isize;
    let mut j = pages.len().cast_signed() - 1;
    while i <= j {
        if pages[i.cast_unsigned()].1 {
            pages.swap(i.cast_unsigned(), j.cast_unsigned());
            j -= 1;
        } else {
            i += 1;
        }
    }
    pages.into_iter().map(|page| page.0).collect()
}
