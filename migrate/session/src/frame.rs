//! Frames: the 48-byte header (W7) and its limits (W8), and the entries of an ACK (W14).

use crate::error::SessionError;
use crate::frame_type::FrameType;

/// Streams that a session can hold: 255 multifd channels, the main channel, the preempt channel,
/// and a few spare.
pub const MAX_STREAMS: usize = 264;
/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 48;
/// Bytes of an ACK entry.
pub(crate) const ACK_ENTRY_BYTES: usize = 26;
/// The largest payload of a free frame (ACK, ABORT, FINISH, SEED).
pub const MAX_FREE_PAYLOAD: usize = 16384;
/// The largest `chunk-bytes` that either side accepts.
pub(crate) const MAX_CHUNK_BYTES: usize = 1 << 20;

/// DATA: the unit holds a packed chunk.
pub const FLAG_PACKED: u8 = 1;
/// DATA: the unit's payload is a part of a history (W29a).
pub const FLAG_HISTORY: u8 = 2;
/// DATA: the pages of a run of the delta table follow each other without bytes between them (W29c).
pub const FLAG_BODIES: u8 = 4;

/// A frame header; the fields are those of W7.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The type of frame.
    pub kind: FrameType,
    /// OPEN: the kind of stream. DATA: [`FLAG_PACKED`], [`FLAG_HISTORY`],
    /// [`FLAG_BODIES`].
    pub flags: u8,
    /// The stream, below [`MAX_STREAMS`].
    pub stream: u16,
    /// Bytes that follow the header.
    pub payload_len: u32,
    /// Position among the sequenced frames of this stream and direction.
    pub seq: u64,
    /// Plain bytes of this stream and direction before this frame.
    pub offset: u64,
    /// Plain bytes in this frame.
    pub plain_len: u32,
    /// DATA of a main stream: multifd streams opened when the chunk was read.
    pub channels: u32,
    /// Running hash after this frame.
    pub hash: u64,
    /// DATA: bytes of the delta table at the end of the payload (W29).
    pub table_len: u32,
}

impl Header {
    /// The header of a free frame, which has no sequence number and no stream.
    pub fn free(kind: FrameType, payload_len: u32) -> Self {
        Self {
            kind,
            flags: 0,
            stream: 0,
            payload_len,
            seq: 0,
            offset: 0,
            plain_len: 0,
            channels: 0,
            hash: 0,
            table_len: 0,
        }
    }

    /// Encodes the header as the 48 bytes of W7.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[2..4].copy_from_slice(&self.stream.to_be_bytes());
        out[4..8].copy_from_slice(&self.payload_len.to_be_bytes());
        out[8..16].copy_from_slice(&self.seq.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..28].copy_from_slice(&self.plain_len.to_be_bytes());
        out[28..32].copy_from_slice(&self.channels.to_be_bytes());
        out[32..40].copy_from_slice(&self.hash.to_be_bytes());
        out[40..44].copy_from_slice(&self.table_len.to_be_bytes());
        let crc = crc32c::crc32c(&out[..44]);
        out[44..48].copy_from_slice(&crc.to_be_bytes());
        out
    }

    /// Reads and checks a header (W8). `chunk_bytes` is the largest chunk agreed for the session.
    ///
    /// # Errors
    /// A field is out of bounds. The error names the field and its value.
    pub fn from_bytes(raw: &[u8; HEADER_BYTES], chunk_bytes: usize) -> Result<Self, SessionError> {
        let crc = u32::from_be_bytes(field(raw, 44));
        let computed = crc32c::crc32c(&raw[..44]);
        if crc != computed {
            return Err(SessionError::HeaderChecksum { got: crc, computed });
        }
        let kind = FrameType::from_wire(raw[0]).ok_or(SessionError::FrameType { got: raw[0] })?;
        let header = Self {
            kind,
            flags: raw[1],
            stream: u16::from_be_bytes(field(raw, 2)),
            payload_len: u32::from_be_bytes(field(raw, 4)),
            seq: u64::from_be_bytes(field(raw, 8)),
            offset: u64::from_be_bytes(field(raw, 16)),
            plain_len: u32::from_be_bytes(field(raw, 24)),
            channels: u32::from_be_bytes(field(raw, 28)),
            hash: u64::from_be_bytes(field(raw, 32)),
            table_len: u32::from_be_bytes(field(raw, 40)),
        };
        if usize::from(header.stream) >= MAX_STREAMS {
            return Err(SessionError::StreamId { got: header.stream, limit: MAX_STREAMS });
        }
        let plain = header.plain_len as usize;
        if plain > chunk_bytes {
            return Err(SessionError::PlainLength { got: plain, limit: chunk_bytes });
        }
        if header.offset.checked_add(u64::from(header.plain_len)).is_none() {
            return Err(SessionError::Offset { got: header.offset, plain: header.plain_len });
        }
        let flags = match kind {
            FrameType::Open => 5,
            FrameType::Data => FLAG_PACKED | FLAG_HISTORY | FLAG_BODIES,
            _ => 0,
        };
        if header.flags > flags {
            return Err(SessionError::Flags { kind, got: header.flags });
        }
        let payload = header.payload_len as usize;
        let limit = match kind {
            FrameType::Data => chunk_bytes + codec::UnitHeader::LEN,
            FrameType::Open | FrameType::StillOpen | FrameType::Eof | FrameType::Heartbeat => 0,
            FrameType::Ack | FrameType::Abort | FrameType::Finish | FrameType::Seed => {
                MAX_FREE_PAYLOAD
            }
        };
        if payload > limit {
            return Err(SessionError::PayloadLength { kind, got: payload, limit });
        }
        if kind == FrameType::Data && (payload < codec::UnitHeader::LEN || plain == 0) {
            return Err(SessionError::PayloadLength { kind, got: payload, limit });
        }
        let room = match kind {
            FrameType::Data => {
                (payload - codec::UnitHeader::LEN).min(chunk_bytes - plain).min(delta::TABLE_ROOM)
            }
            _ => 0,
        };
        let table = header.table_len as usize;
        if table > room {
            return Err(SessionError::TableLength { kind, got: table, limit: room });
        }
        if usize::try_from(header.channels).map_or(true, |n| n > MAX_STREAMS) {
            return Err(SessionError::Channels { got: header.channels, limit: MAX_STREAMS });
        }
        Ok(header)
    }
}

/// One entry of an ACK (W14).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckEntry {
    /// The stream.
    pub stream: u16,
    /// All frames below this one were written to QEMU.
    pub seq: u64,
    /// Plain bytes written.
    pub offset: u64,
    /// The receiver's running hash there.
    pub hash: u64,
}

impl AckEntry {
    /// Appends the 26 bytes of W14.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.stream.to_be_bytes());
        out.extend_from_slice(&self.seq.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.hash.to_be_bytes());
    }

    /// Reads all entries of an ACK's payload.
    ///
    /// # Errors
    /// The length is not a multiple of the length of an entry, or a stream is out of bounds.
    pub fn read_all(payload: &[u8]) -> Result<impl Iterator<Item = AckEntry> + '_, SessionError> {
        if !payload.len().is_multiple_of(ACK_ENTRY_BYTES) {
            return Err(SessionError::AckLength { got: payload.len() });
        }
        let entries = payload.chunks_exact(ACK_ENTRY_BYTES);
        for raw in entries.clone() {
            let stream = u16::from_be_bytes(field(raw, 0));
            if usize::from(stream) >= MAX_STREAMS {
                return Err(SessionError::StreamId { got: stream, limit: MAX_STREAMS });
            }
        }
        Ok(entries.map(|raw| AckEntry {
            stream: u16::from_be_bytes(field(raw, 0)),
            seq: u64::from_be_bytes(field(raw, 2)),
            offset: u64::from_be_bytes(field(raw, 10)),
            hash: u64::from_be_bytes(field(raw, 18)),
        }))
    }
}

/// The `N` bytes at `at`, which must lie within `raw`.
fn field<const N: usize>(raw: &[u8], at: usize) -> [u8; N] {
    *raw[at..].first_chunk().expect("the caller checks the length")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            kind: FrameType::Data,
            flags: FLAG_PACKED | FLAG_HISTORY | FLAG_BODIES,
            stream: 7,
            payload_len: 4000,
            seq: 1 << 40,
            offset: 1 << 50,
            plain_len: 500_000,
            channels: 8,
            hash: 0x0123_4567_89ab_cdef,
            table_len: 700,
        }
    }

    #[test]
    fn a_header_survives_the_wire() {
        assert_eq!(Header::from_bytes(&sample().to_bytes(), 557_056).unwrap(), sample());
    }

    #[test]
    fn any_flipped_bit_is_refused() {
        let good = sample().to_bytes();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::from_bytes(&bad, 557_056).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_and_ids_out_of_bounds_are_named() {
        let with = |change: fn(&mut Header)| {
            let mut header = sample();
            change(&mut header);
            Header::from_bytes(&header.to_bytes(), 557_056).unwrap_err().to_string()
        };
        assert!(with(|h| h.stream = 264).contains("264"));
        assert!(with(|h| h.plain_len = 557_057).contains("557057"));
        assert!(with(|h| h.payload_len = 600_000).contains("600000"));
        assert!(with(|h| h.offset = u64::MAX - 499_999).contains("18446744073709051616"));
        assert!(with(|h| h.payload_len = 3).contains('3'));
        assert!(with(|h| h.channels = 100_000).contains("100000"));
        assert!(with(|h| h.flags = 8).contains("flags 0x8"));
        assert!(with(|h| h.table_len = 2049).contains("2049"));
        assert!(with(|h| (h.payload_len, h.table_len) = (100, 81)).contains("limit 80"));
        assert!(with(|h| h.plain_len = 0).contains("4000"));
        assert!(with(|h| {
            h.kind = FrameType::Eof;
            h.flags = 0;
            h.payload_len = 1;
        })
        .contains("limit 0"));
    }

    #[test]
    fn ack_entries_survive_the_wire_and_odd_lengths_do_not() {
        let entry = AckEntry { stream: 3, seq: 9, offset: 1 << 33, hash: 42 };
        let mut payload = Vec::new();
        entry.write(&mut payload);
        entry.write(&mut payload);
        assert_eq!(AckEntry::read_all(&payload).unwrap().collect::<Vec<_>>(), [entry, entry]);
        assert!(AckEntry::read_all(&payload[1..]).is_err());
        payload[0] = 0xff;
        assert!(AckEntry::read_all(&payload).is_err());
    }
}
