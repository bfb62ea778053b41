//! The calls of the session into a source relay.

use super::shared::{Event, Shared};
use crate::inbox::Arrived;
use codec::Codec;
use session::{Header, Incoming, SessionError, Sink};
use std::sync::atomic::{fence, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock, PoisonError, Weak};

/// The session needs the sink before the [`Shared`] exists, which refers to the session.
pub(super) struct SourceSink {
    shared: OnceLock<Weak<Shared>>,
    events: Sender<Event>,
}

impl SourceSink {
    pub(super) fn new(events: Sender<Event>) -> Arc<Self> {
        Arc::new(Self { shared: OnceLock::new(), events })
    }

    /// Frames that arrive before this call are dropped: no stream is open.
    pub(super) fn set(&self, shared: &Arc<Shared>) {
        let _ = self.shared.set(Arc::downgrade(shared));
    }

    fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

impl Sink for SourceSink {
    fn frame(&self, frame: Incoming) -> Result<(), SessionError> {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return Ok(()) };
        let (stream, seq) = (frame.header.stream, frame.header.seq);
        let bad = |detail: &str| SessionError::Sequence { stream, seq, detail: detail.into() };
        let results = shared
            .stream(stream)
            .and_then(|stream| stream.results.get().cloned())
            .ok_or_else(|| bad("this end has no such return path"))?;
        let chunk = match frame.unit {
            // The return path is small and urgent: it is sent uncompressed (W10), neither packed
            // nor as a part of a history.
            Some((unit, _))
                if unit.codec != Codec::Raw
                    || frame.header.flags != 0
                    || frame.header.table_len > 0 =>
            {
                return Err(bad("the return path is never compressed"));
            }
            unit => unit.map(|(_, slot)| Ok(slot)),
        };
        let _ =
            results.push(Arrived { header: frame.header, chunk, filling: None, checksum: None });
        Ok(())
    }

    fn seed(&self, offer: &[u8]) -> Result<(), SessionError> {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return Ok(()) };
        let bad = |detail| SessionError::Offer { detail };
        if !shared.seed.is_wanted {
            return Err(bad(format!("{} bytes, not asked for", offer.len())));
        }
        let mut known = shared.seed.known.write().unwrap_or_else(PoisonError::into_inner);
        // A peer may repeat its last offer, and each notice takes memory until the user has it.
        let was_complete = known.is_complete();
        known.learn(offer).map_err(|error| bad(error.to_string()))?;
        let pages = known.len();
        shared.counters.seed_offered.store(pages as u64, Ordering::Relaxed);
        if known.is_complete() && !was_complete && pages > 0 {
            self.notice(&format!("the receiver has offered {pages} pages that it has"));
        }
        Ok(())
    }

    fn finish(&self, report: &[u8]) {
        self.send(Event::Finished(report.to_vec()));
    }

    fn closed(&self, error: &Arc<SessionError>) {
        self.send(Event::Closed(error.clone()));
    }

    /// A STILL_OPEN may be sent long after QEMU's socket was checked, and again after an outage, so
    /// the socket is checked here (W20, W25).
    fn still_open(&self, header: &Header) -> bool {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return false };
        let stream = shared.stream(header.stream);
        let open = stream.is_some_and(|stream| shared.is_open(stream.socket()));
        // Without a return path the source closes its socket when it has written all bytes, and EOF
        // reports that. In postcopy for good the source does not start its VM any more, and the
        // destination needs the bytes behind this frame (W20h).
        if !open && shared.return_path.load(Ordering::Acquire) && shared.withhold(header) {
            // The bytes that wait in the socket of a source that turns to postcopy may show that it
            // was there for good. Its reader comes to them, or to the end, and decides.
            if !shared.turns_to_postcopy() {
                self.send(Event::SourceEof { is_main: true });
            }
            return false;
        }
        // Sets the flag first, then reads the session's state; `decision` does both in the other
        // order. So either the frame is not sent because the session has failed, or `decision` sees
        // the flag and assumes that the destination may run the VM.
        if !shared.commit(header) {
            return false;
        }
        fence(Ordering::SeqCst);
        shared.session.failure().is_none()
    }

    /// In doubt the relay asks (`doubt::hold`), unless it is ending.
    fn may_ask(&self) -> bool {
        // As in `still_open`: a STILL_OPEN that was sent before the session failed is visible here.
        fence(Ordering::SeqCst);
        let shared = self.shared.get().and_then(Weak::upgrade);
        shared.is_some_and(|shared| {
            !shared.over.load(Ordering::Acquire)
                && shared.return_path.load(Ordering::Acquire)
                && shared.may_run_there()
        })
    }

    fn notice(&self, text: &str) {
        self.send(Event::Notice(text.into()));
    }
}
