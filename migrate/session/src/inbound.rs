//! What comes in: which frames have arrived, and how far each stream was written to QEMU.

use crate::arrivals::{Arrivals, WINDOW};
use crate::error::SessionError;
use crate::frame::{AckEntry, Header, MAX_STREAMS};
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How far one stream and direction was written to QEMU here, for the next ACK.
#[derive(Debug, Default)]
struct Progress {
    seq: AtomicU64,
    offset: AtomicU64,
    hash: AtomicU64,
    /// Odd while [`Inbound::delivered`] writes; the three fields are one value (a sequence lock
    /// with one writer).
    version: AtomicU32,
    /// The last ACK that was collected said this sequence number.
    acked: AtomicU64,
    /// Sequenced frames taken off the links.
    arrivals: Arrivals,
}

/// The receiving half of a session.
#[derive(Debug)]
pub(crate) struct Inbound {
    streams: Box<[Progress]>,
    /// An ACK is on its way to be collected.
    ack_is_queued: AtomicBool,
}

impl Inbound {
    pub(crate) fn new() -> Self {
        Self {
            streams: (0..MAX_STREAMS).map(|_| Progress::default()).collect(),
            ack_is_queued: AtomicBool::new(false),
        }
    }

    /// Everything below `seq` of `stream` was written to QEMU here. One writer per stream. True
    /// when the caller has to queue an ACK.
    #[must_use]
    pub(crate) fn delivered(&self, stream: u16, seq: u64, offset: u64, hash: u64) -> bool {
        let state = &self.streams[usize::from(stream)];
        // A sequence lock: Release on the way in would let the stores move up, so a full fence
        // follows the odd version.
        let version = state.version.load(Ordering::Relaxed);
        state.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        state.seq.store(seq, Ordering::Relaxed);
        state.offset.store(offset, Ordering::Relaxed);
        state.hash.store(hash, Ordering::Relaxed);
        state.version.store(version.wrapping_add(2), Ordering::Release);
        !self.ack_is_queued.swap(true, Ordering::AcqRel)
    }

    /// Has the next ACK name everything that was written to QEMU once more. True when the caller
    /// has to queue one.
    #[must_use]
    pub(crate) fn acknowledge_again(&self) -> bool {
        for state in &self.streams {
            state.acked.store(0, Ordering::Release);
        }
        !self.ack_is_queued.swap(true, Ordering::AcqRel)
    }

    /// Whether an arriving frame is new; one that came before is passed over (W11).
    pub(crate) fn expects(&self, header: &Header) -> Result<bool, SessionError> {
        let state = &self.streams[usize::from(header.stream)];
        let written = state.seq.load(Ordering::Acquire);
        if header.seq >= written.saturating_add(WINDOW) {
            let (stream, seq) = (header.stream, header.seq);
            let detail = format!("it is {} ahead of what was written", seq - written);
            return Err(SessionError::Sequence { stream, seq, detail });
        }
        Ok(state.arrivals.expects(header.seq, written))
    }

    /// Takes note of a frame that is here in full; false when another link has brought it
    /// meanwhile.
    pub(crate) fn arrived(&self, header: &Header) -> bool {
        let state = &self.streams[usize::from(header.stream)];
        // Older than at `expects`, at most: then the frame's cell decides.
        state.arrivals.take(header.seq, state.seq.load(Ordering::Acquire))
    }

    /// Appends an entry for every stream that has moved since the last ACK.
    pub(crate) fn collect_acks(&self, out: &mut Vec<u8>) {
        // Cleared first: a delivery from here on queues another ACK.
        self.ack_is_queued.store(false, Ordering::Release);
        fence(Ordering::SeqCst);
        for (stream, state) in self.streams.iter().enumerate() {
            let entry = loop {
                let before = state.version.load(Ordering::Acquire);
                let entry = AckEntry {
                    stream: u16::try_from(stream).unwrap_or(u16::MAX),
                    seq: state.seq.load(Ordering::Relaxed),
                    offset: state.offset.load(Ordering::Relaxed),
                    hash: state.hash.load(Ordering::Relaxed),
                };
                fence(Ordering::Acquire);
                if before % 2 == 0 && state.version.load(Ordering::Relaxed) == before {
                    break entry;
                }
                std::hint::spin_loop();
            };
            if entry.seq > state.acked.fetch_max(entry.seq, Ordering::AcqRel) {
                entry.write(out);
            }
        }
    }
}
