//! The messages of the handshake: the numbers of options and replies, and their encoding.

use crate::wire::OPTION_REPLY_MAGIC;

/// Takes numbers and bytes from the front.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn u16(&mut self) -> Option<u16> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*first))
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*first))
    }

    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }
}

pub(super) fn u32_of(len: usize) -> [u8; 4] {
    u32::try_from(len).expect("names are short").to_be_bytes()
}

pub(super) fn reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&u32_of(data.len()));
    out.extend_from_slice(data);
}

pub(super) const ALLOCATION: &[u8] = b"base:allocation";

pub(super) const EXPORT_NAME: u32 = 1;
pub(super) const ABORT: u32 = 2;
pub(super) const LIST: u32 = 3;
pub(super) const INFO: u32 = 6;
pub(super) const GO: u32 = 7;
pub(super) const STRUCTURED_REPLY: u32 = 8;
pub(super) const LIST_META_CONTEXT: u32 = 9;
pub(super) const SET_META_CONTEXT: u32 = 10;

pub(super) const ACK: u32 = 1;
pub(super) const SERVER: u32 = 2;
pub(super) const INFO_REPLY: u32 = 3;
pub(super) const META_CONTEXT: u32 = 4;
pub(super) const ERR_UNSUP: u32 = 1 << 31 | 1;
pub(super) const ERR_INVALID: u32 = 1 << 31 | 3;
pub(super) const ERR_UNKNOWN: u32 = 1 << 31 | 6;

pub(super) const INFO_NAME: u16 = 1;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;
