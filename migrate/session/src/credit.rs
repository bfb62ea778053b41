//! The sender's accounts: the bytes in flight on each stream, the permits to send more, and the
//! peer's acknowledgements (W13 to W16).

mod ledger;

use crate::error::SessionError;
use crate::frame::{AckEntry, Header, MAX_STREAMS};
use crate::frame_type::FrameType;
use crate::pacing::{Delivery, Pacing};
use ledger::{Ledger, Outbound, LEAST_CHUNK, MAX_FRAMES_IN_FLIGHT};
use ring::EventCount;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use ledger::Grants;

/// The accounts of one direction of a session.
pub struct Credits {
    ledger: Mutex<Ledger>,
    returned: EventCount,
    closed: AtomicBool,
    grants: Grants,
}

/// Permission to read up to `bytes` from QEMU and send them as one DATA frame. Request it when
/// QEMU's socket has bytes, so that an idle stream holds none. Pass it to [`Credits::issue_data`]
/// or [`Credits::give_back`].
#[derive(Debug)]
#[must_use]
pub struct Permit {
    stream: u16,
    /// The most that may be read.
    pub bytes: usize,
}

impl std::fmt::Debug for Credits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credits").field("grants", &self.grants).finish_non_exhaustive()
    }
}

impl Credits {
    /// Creates the accounts for a receiver that grants `grants`.
    pub fn new(grants: Grants) -> Self {
        let cap = grants.shared_frames as u64 * grants.chunk_bytes as u64;
        let pacing = Pacing::new(Instant::now(), cap.max(LEAST_CHUNK));
        let streams = std::iter::repeat_with(Outbound::default).take(MAX_STREAMS).collect();
        Self {
            ledger: Mutex::new(Ledger {
                streams,
                in_flight: 0,
                pacing,
                last_delay: Duration::ZERO,
            }),
            returned: EventCount::new(),
            closed: AtomicBool::new(false),
            grants,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        // A panic aborts the process in release builds; in tests the accounts under a poisoned lock
        // are still consistent.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a DATA frame of `stream` may be read and sent; `None` once the session is
    /// closed.
    pub fn permit(&self, stream: u16) -> Option<Permit> {
        self.permit_by(stream, None).flatten()
    }

    /// As [`permit`](Self::permit), with a deadline: `Some(None)` once the session is closed,
    /// `None` at `deadline`.
    pub fn permit_by(&self, stream: u16, deadline: Option<Instant>) -> Option<Option<Permit>> {
        let mut first = true;
        self.returned.wait_until(deadline, || {
            if self.closed.load(Ordering::Acquire) {
                return Some(None);
            }
            let mut ledger = self.lock();
            let bytes = ledger.room(stream, &self.grants);
            if bytes.is_none() && first {
                ledger.pacing.waited();
                first = false;
            }
            let bytes = bytes?;
            ledger.streams[usize::from(stream)].data_frames += 1;
            Some(Some(Permit { stream, bytes }))
        })
    }

    /// A permit for a DATA frame of `stream` that the window would delay, within the receiver's
    /// buffers: for the last bytes of a QEMU that has closed. `None` without a buffer, and once the
    /// session is closed.
    pub fn permit_beyond_window(&self, stream: u16) -> Option<Permit> {
        let mut ledger = self.lock();
        if self.closed.load(Ordering::Acquire) || !ledger.has_buffer(stream, &self.grants) {
            return None;
        }
        ledger.streams[usize::from(stream)].data_frames += 1;
        Some(Permit { stream, bytes: self.grants.chunk_bytes })
    }

    /// Returns a permit with which nothing was read.
    pub fn give_back(&self, permit: Permit) {
        let mut ledger = self.lock();
        ledger.streams[usize::from(permit.stream)].data_frames -= 1;
        drop(ledger);
        self.returned.notify_all();
    }

    /// Charges `plain_len` bytes with checksum `checksum` to the permit, and returns the frame's
    /// header, which still lacks payload length and flags.
    pub fn issue_data(
        &self,
        permit: Permit,
        plain_len: usize,
        checksum: u64,
        channels: u32,
    ) -> Header {
        let mut ledger = self.lock();
        ledger.in_flight += plain_len as u64;
        let out = &mut ledger.streams[usize::from(permit.stream)];
        out.hash.add(checksum);
        let plain_len = u32::try_from(plain_len).unwrap_or(u32::MAX);
        let mut header = out.issue(permit.stream, FrameType::Data, plain_len);
        header.channels = channels;
        header
    }

    /// Charges a sequenced frame without payload; waits while too many are in flight. `None` once
    /// closed.
    pub fn issue(&self, stream: u16, kind: FrameType, flags: u8) -> Option<Header> {
        self.returned.wait_until(None, || {
            if self.closed.load(Ordering::Acquire) {
                return Some(None);
            }
            let mut ledger = self.lock();
            let out = &mut ledger.streams[usize::from(stream)];
            if out.records.len() >= MAX_FRAMES_IN_FLIGHT {
                return None;
            }
            let mut header = out.issue(stream, kind, 0);
            header.flags = flags;
            Some(Some(header))
        })?
    }

    /// Processes the peer's acknowledgement of bytes written.
    ///
    /// # Errors
    /// The peer acknowledges frames or bytes that were not sent, or its hash differs from the
    /// sender's (W15).
    pub fn acknowledge(&self, entry: &AckEntry, now: Instant) -> Result<(), SessionError> {
        let mut ledger = self.lock();
        let out = &mut ledger.streams[usize::from(entry.stream)];
        if entry.seq > out.next_seq {
            let (stream, seq, sent) = (entry.stream, entry.seq, out.next_seq);
            return Err(SessionError::AckBeyond { stream, seq, sent });
        }
        // Links overtake each other: an ACK older than the last one adds nothing.
        if entry.seq <= out.acked_seq {
            return Ok(());
        }
        // Compared before it counts: what a wrong ACK acknowledges is never delivered (W15, W22).
        let count = usize::try_from(entry.seq - out.acked_seq).unwrap_or(usize::MAX);
        let count = count.min(out.records.len());
        let data = out.records.iter().take(count).filter(|record| record.is_data);
        let bytes: u64 = data.map(|record| u64::from(record.plain_len)).sum();
        let hash =
            count.checked_sub(1).and_then(|last| out.records.get(last)).map(|last| last.hash);
        let (stream, seq) = (entry.stream, entry.seq - 1);
        let (ours, theirs) = (hash.unwrap_or_default(), entry.hash);
        if ours != theirs {
            return Err(SessionError::HashMismatch { stream, seq, ours, theirs });
        }
        let (ours, theirs) = (out.acked_bytes + bytes, entry.offset);
        if ours != theirs {
            return Err(SessionError::AckOffset { stream, seq, ours, theirs });
        }
        let (mut first, mut last) = (None, None);
        for record in out.records.drain(..count).filter(|record| record.is_data) {
            out.data_frames -= 1;
            let delay = now.saturating_duration_since(record.at);
            first = first.or(Some((delay, u64::from(record.plain_len))));
            last = Some(delay);
        }
        (out.acked_seq, out.acked_bytes) = (entry.seq, ours);
        ledger.in_flight -= bytes;
        ledger.last_delay = last.unwrap_or(ledger.last_delay);
        if let Some((latency, first_bytes)) = first {
            let in_flight = ledger.in_flight;
            ledger.pacing.delivered(Delivery { now, bytes, latency, first_bytes, in_flight });
        }
        drop(ledger);
        self.returned.notify_all();
        Ok(())
    }

    /// Waits until every frame sent on every stream is acknowledged (W22) and no permit is in use:
    /// a reader with a permit may hold bytes that are no frame yet. False at the deadline or when
    /// closed.
    pub fn drained(&self, deadline: Instant) -> bool {
        let done = self.returned.wait_until(Some(deadline), || {
            let idle = self.lock().streams.iter().all(Outbound::is_idle);
            (idle || self.closed.load(Ordering::Acquire)).then_some(idle)
        });
        done.unwrap_or(false)
    }

    /// Whether all that was read of `stream` is acknowledged, and no permit for it is in use.
    pub fn is_idle(&self, stream: u16) -> bool {
        self.lock().streams[usize::from(stream)].is_idle()
    }

    /// Plain bytes in flight, and the drain rate in plain bytes per second, for a progress line.
    pub fn flow(&self) -> (u64, f64) {
        let ledger = self.lock();
        (ledger.in_flight, ledger.pacing.rate())
    }

    /// The drain rate of bytes like those sent lately, in plain bytes per second, measured while
    /// the path, and not the source QEMU, was the limit; 0 while unknown.
    pub fn recent_rate(&self) -> f64 {
        self.lock().pacing.recent_rate()
    }

    /// How long the bytes delivered last were under way, from their reading here to the report of
    /// the peer that the socket of its QEMU has them. Once everything is acknowledged, this is the
    /// most that the relays and the link added to the downtime.
    pub fn last_delay(&self) -> Duration {
        self.lock().last_delay
    }

    /// Wakes all waiting threads; they get `None`.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.returned.notify_all();
    }
}

#[cfg(test)]
mod tests;
