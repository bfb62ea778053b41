//! The receiving half: the frames that have arrived, and how far each stream was written to QEMU.

use crate::arrivals::{Arrivals, WINDOW};
use crate::error::SessionError;
use crate::frame::{AckEntry, Header, MAX_STREAMS};
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};

/// How far one stream and direction was written to QEMU, for the next ACK.
#[derive(Debug, Default)]
struct Progress {
    seq: AtomicU64,
    offset: AtomicU64,
    hash: AtomicU64,
    /// Odd while [`Inbound::delivered`] writes: the three fields form one value (a sequence lock
    /// with one writer).
    version: AtomicU32,
    /// The sequence number in the last ACK collected.
    acked: AtomicU64,
    /// Sequenced frames that have arrived.
    arrivals: Arrivals,
}

/// The receiving half of a session.
#[derive(Debug)]
pub(crate) struct Inbound {
    streams: Box<[Progress]>,
    /// An ACK is queued and not collected yet.
    ack_is_queued: AtomicBool,
}

impl Inbound {
    pub(crate) fn new() -> Self {
        Self {
            streams: (0..MAX_STREAMS).map(|_| Progress::default()).collect(),
            ack_is_queued: AtomicBool::new(false),
        }
    }

    /// Records that everything below `seq` of `stream` was written to QEMU. One writer per stream.
    /// True when the caller has to queue an ACK.
    #[must_use]
    pub(crate) fn delivered(&self, stream: u16, seq: u64, offset: u64, hash: u64) -> bool {
        let state = &self.streams[usize::from(stream)];
        // A sequence lock. A Release store of the odd version would allow the stores below to move
        // before it, so a full fence follows it.
        let version = state.version.load(Ordering::Relaxed);
        state.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::SeqCst);
        state.seq.store(seq, Ordering::Relaxed);
        state.offset.store(offset, Ordering::Relaxed);
        state.hash.store(hash, Ordering::Relaxed);
        state.version.store(version.wrapping_add(2), Ordering::Release);
        !self.ack_is_queued.swap(true, Ordering::AcqRel)
    }

    /// Makes the next ACK repeat everything written to QEMU. True when the caller has to queue an
    /// ACK.
    #[must_use]
    pub(crate) fn acknowledge_again(&self) -> bool {
        for state in &self.streams {
            state.acked.store(0, Ordering::Release);
        }
        !self.ack_is_queued.swap(true, Ordering::AcqRel)
    }

    /// Whether an arriving frame is new; a frame that arrived before is skipped (W11).
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

    /// Records a frame that has arrived in full; false when another link delivered it meanwhile.
    pub(crate) fn arrived(&self, header: &Header) -> bool {
        let state = &self.streams[usize::from(header.stream)];
        // `seq` may only be older than it was at `expects`; then the frame's cell decides.
        state.arrivals.take(header.seq, state.seq.load(Ordering::Acquire))
    }

    /// Appends an entry for every stream that has advanced since the last ACK.
    pub(crate) fn collect_acks(&self, out: &mut Vec<u8>) {
        // Cleared first: any later delivery queues another ACK.
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
