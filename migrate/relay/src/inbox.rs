//! The receiving half of one stream and direction: frames come in any order, leave in the order of
//! `seq`, are compared with the sender's running hash (W12) and acknowledged (W14).

use pages::Slot;
use pipeline::{Popped, Reorder, Results};
use session::{Header, RunningHash, Session, SessionError};
use std::sync::Arc;

/// Frames of one stream that may wait here, out of order or in order. The links refuse more than
/// 1024 (W11).
const WINDOW: usize = 2048;

/// A sequenced frame, decoded.
pub(crate) struct Arrived {
    pub(crate) header: Header,
    /// DATA: the chunk in the first `plain_len` bytes, or why it cannot be decoded.
    pub(crate) chunk: Option<Result<Slot, SessionError>>,
}

/// Where a stream's frames wait for the thread that writes them to QEMU.
pub(crate) fn queue() -> Arc<Results<Arrived>> {
    Results::new(WINDOW)
}

/// What an ACK says once a frame was written to QEMU.
#[derive(Clone, Copy)]
pub(crate) struct Receipt {
    /// Frames below this one were written.
    seq: u64,
    /// Plain bytes before `seq`.
    offset: u64,
    /// Running hash of those bytes.
    hash: u64,
}

/// The frames of one stream, in order. One thread has it.
pub(crate) struct Inbox<'a> {
    stream: u16,
    queue: &'a Results<Arrived>,
    reorder: Reorder<Arrived>,
    hash: RunningHash,
    /// Plain bytes so far, by this end's count.
    offset: u64,
}

impl<'a> Inbox<'a> {
    pub(crate) fn new(stream: u16, queue: &'a Results<Arrived>) -> Self {
        Self {
            stream,
            queue,
            reorder: Reorder::new(WINDOW),
            hash: RunningHash::default(),
            offset: 0,
        }
    }

    /// The next frame; `None` when the queue was closed.
    ///
    /// # Errors
    /// A frame comes twice, or too far ahead of the others.
    pub(crate) fn next(&mut self) -> Result<Option<Arrived>, SessionError> {
        loop {
            if let Some(arrived) = self.reorder.pop() {
                return Ok(Some(arrived));
            }
            let Popped::Item(arrived) = self.queue.pop_until(None) else { return Ok(None) };
            let seq = arrived.header.seq;
            self.reorder.insert(seq, arrived).map_err(|error| SessionError::Sequence {
                stream: self.stream,
                seq,
                detail: error.to_string(),
            })?;
        }
    }

    /// Compares the running hash after a DATA frame's `bytes` with the sender's. The receipt is to
    /// be acknowledged once the bytes were written.
    ///
    /// # Errors
    /// They differ: none of these bytes may be written.
    pub(crate) fn check(&mut self, header: &Header, bytes: &[u8]) -> Result<Receipt, SessionError> {
        let (stream, seq) = (self.stream, header.seq);
        if header.offset != self.offset {
            let detail = format!(
                "it says it begins at byte {}, and comes at {}",
                header.offset, self.offset
            );
            return Err(SessionError::Sequence { stream, seq, detail });
        }
        self.offset += bytes.len() as u64;
        self.hash.add(codec::checksum(bytes));
        let (ours, theirs) = (self.hash.value(), header.hash);
        if ours != theirs {
            return Err(SessionError::HashMismatch { stream, seq, ours, theirs });
        }
        Ok(self.receipt(header))
    }

    /// The receipt of the frame that came last.
    pub(crate) fn receipt(&self, header: &Header) -> Receipt {
        Receipt { seq: header.seq + 1, offset: self.offset, hash: self.hash.value() }
    }

    /// Has the session tell the sender that the frame of `receipt` was written, and all before it.
    pub(crate) fn acknowledge(&self, session: &Session, receipt: Receipt) {
        session.delivered(self.stream, receipt.seq, receipt.offset, receipt.hash);
    }
}
