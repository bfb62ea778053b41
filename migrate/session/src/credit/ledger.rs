//! The grants of a receiver, the bytes in flight on each stream, and the room for more.

use crate::frame::{Header, MAX_STREAMS};
use crate::frame_type::FrameType;
use crate::hash::RunningHash;
use crate::pacing::Pacing;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Sequenced frames of one stream and direction that may be in flight (W13; less than W11's
/// window).
pub(super) const MAX_FRAMES_IN_FLIGHT: usize = 512;
/// The least to read from QEMU at once: with smaller chunks the headers cost too much.
pub(super) const LEAST_CHUNK: u64 = 64 << 10;

/// The receiver's grants (W3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grants {
    /// Bytes of one buffer, the largest chunk.
    pub chunk_bytes: usize,
    /// Buffers that each stream owns.
    pub stream_frames: u32,
    /// Buffers that all streams share.
    pub shared_frames: u32,
}

impl Grants {
    /// Buffers that a receiver needs for `MAX_STREAMS` streams.
    pub fn buffers(&self) -> usize {
        MAX_STREAMS * self.stream_frames as usize + self.shared_frames as usize
    }
}

impl Default for Grants {
    /// A chunk of 544 KiB holds one multifd packet of 128 pages with its header, or 128 page
    /// records, and has room to end on a record. Each stream owns two buffers: one is being written
    /// to QEMU, one waits. 120 shared buffers are 64 MiB, enough for 25 Gbit/s.
    fn default() -> Self {
        Self { chunk_bytes: 557_056, stream_frames: 2, shared_frames: 120 }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    pub(super) hash: u64,
    pub(super) plain_len: u32,
    pub(super) is_data: bool,
    pub(super) at: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Outbound {
    open: bool,
    pub(super) next_seq: u64,
    sent_bytes: u64,
    pub(super) hash: RunningHash,
    pub(super) acked_seq: u64,
    pub(super) acked_bytes: u64,
    /// DATA frames in flight, including the one being read.
    pub(super) data_frames: u32,
    /// Invariant: one record per frame in `acked_seq..next_seq`.
    pub(super) records: VecDeque<Record>,
}

pub(super) struct Ledger {
    pub(super) streams: Vec<Outbound>,
    /// Plain bytes in flight over all streams.
    pub(super) in_flight: u64,
    pub(super) pacing: Pacing,
    /// The time from the reading of the DATA frame acknowledged last to its acknowledgement.
    pub(super) last_delay: Duration,
}

impl Ledger {
    /// Whether the receiver has a buffer for one more DATA frame of `stream` (W13).
    pub(super) fn has_buffer(&self, stream: u16, grants: &Grants) -> bool {
        let out = &self.streams[usize::from(stream)];
        // Those of streams that have ended, too: the receiver still has them.
        let beyond = |out: &Outbound| out.data_frames.saturating_sub(grants.stream_frames);
        let shared: u32 = self.streams.iter().map(beyond).sum();
        out.records.len() < MAX_FRAMES_IN_FLIGHT
            && (out.data_frames < grants.stream_frames || shared < grants.shared_frames)
    }

    /// Bytes that `stream` may read now for one more DATA frame; `None` without room.
    pub(super) fn room(&self, stream: u16, grants: &Grants) -> Option<usize> {
        if !self.has_buffer(stream, grants) {
            return None;
        }
        let out = &self.streams[usize::from(stream)];
        let active = self.streams.iter().filter(|out| out.open).count() as u64;
        // The window keeps downtime low and is not a limit of the receiver. A stream's own share of
        // it keeps streams from blocking each other.
        let window = self.pacing.window();
        let in_flight_here = out.sent_bytes - out.acked_bytes;
        let of_all = window.saturating_sub(self.in_flight);
        let of_own = (window / active.max(1)).max(LEAST_CHUNK).saturating_sub(in_flight_here);
        let chunks = self.pacing.chunks();
        let chunk = (window / active.max(chunks)).clamp(LEAST_CHUNK, grants.chunk_bytes as u64);
        let room = of_all.max(of_own);
        // Only whole chunks are read, unless the stream has nothing in flight: a small chunk would
        // cost compression ratio, and small chunks would follow it for ever.
        if room < chunk && out.data_frames > 0 {
            return None;
        }
        usize::try_from(chunk).ok()
    }
}

impl Outbound {
    /// Whether all that was read is acknowledged.
    pub(super) fn is_idle(&self) -> bool {
        self.acked_seq == self.next_seq && self.data_frames == 0
    }

    pub(super) fn issue(&mut self, stream: u16, kind: FrameType, plain_len: u32) -> Header {
        let header = Header {
            kind,
            flags: 0,
            stream,
            payload_len: 0,
            seq: self.next_seq,
            offset: self.sent_bytes,
            plain_len,
            channels: 0,
            hash: self.hash.value(),
            table_len: 0,
        };
        self.open = kind != FrameType::Eof;
        self.next_seq += 1;
        self.sent_bytes += u64::from(plain_len);
        let is_data = kind == FrameType::Data;
        self.records.push_back(Record {
            hash: header.hash,
            plain_len,
            is_data,
            at: Instant::now(),
        });
        header
    }
}
