//! The relay's side of a session: the receiver of arriving frames.

use crate::error::SessionError;
use crate::frame::Header;
use codec::UnitHeader;
use pages::Slot;
use std::sync::Arc;

/// A sequenced frame as it arrived on a link, in no particular order.
#[derive(Debug)]
pub struct Incoming {
    /// The frame's header.
    pub header: Header,
    /// DATA: the unit's header, and its payload in the first `payload_len` bytes of a buffer.
    pub unit: Option<(UnitHeader, Slot)>,
}

/// Receives the frames of all links. The links' threads call it: it may wait for the codec threads,
/// never for a stream (W17).
pub trait Sink: Send + Sync + 'static {
    /// Takes a sequenced frame that has arrived.
    ///
    /// # Errors
    /// The frame is unacceptable; the session ends with this error.
    fn frame(&self, frame: Incoming) -> Result<(), SessionError>;
    /// Takes the peer's final report.
    fn finish(&self, report: &[u8]);
    /// Takes an offer of pages that the peer has already (W29b).
    ///
    /// # Errors
    /// The offer is invalid, or this end has not asked for any.
    fn seed(&self, offer: &[u8]) -> Result<(), SessionError> {
        Err(SessionError::Offer { detail: format!("{} bytes, not asked for", offer.len()) })
    }
    /// Whether the peer sends FINISH first (W24): true on a server. On a client a FINISH that comes
    /// before its own ends the session.
    fn answers_finish(&self) -> bool {
        false
    }
    /// Called once, when the session has ended early.
    fn closed(&self, error: &Arc<SessionError>);
    /// Whether a STILL_OPEN is true. Called just before the frame is sent, for the first time or
    /// again (W20, W25). After false the session has dropped it: the frames behind it are never
    /// delivered, unless the callee queues the frame again.
    fn still_open(&self, header: &Header) -> bool {
        let _ = header;
        true
    }
    /// Whether this end may ask the peer, after the session has ended, how far the peer got (W28).
    /// Called once the session has failed.
    fn may_ask(&self) -> bool {
        false
    }
    /// Reports to the user that links were lost or have come back.
    fn notice(&self, text: &str) {
        let _ = text;
    }
}

/// A sink that discards everything.
#[cfg(test)]
pub(crate) struct Discard;

#[cfg(test)]
impl Sink for Discard {
    fn frame(&self, _: Incoming) -> Result<(), SessionError> {
        Ok(())
    }

    fn finish(&self, _: &[u8]) {}

    fn closed(&self, _: &Arc<SessionError>) {}
}
