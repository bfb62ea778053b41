//! The receiving half of one stream and direction: puts frames into the order of `seq`, compares
//! them with the sender's running hash (W12) and acknowledges them (W14).

use pages::Slot;
use pipeline::{Popped, Reorder, Results};
use session::{Header, RunningHash, Session, SessionError};
use std::sync::mpsc::Receiver;
use std::sync::Arc;
use std::time::Instant;

/// Frames of one stream that may wait here, in or out of order. The links refuse more than 1024
/// (W11).
const WINDOW: usize = 2048;

/// A chunk that gets pages of the destination's seed (W29b).
pub(crate) type Filling = Receiver<Result<Slot, SessionError>>;

/// A sequenced frame, decoded.
pub(crate) struct Arrived {
    pub(crate) header: Header,
    /// DATA: the chunk in the first `plain_len` bytes, or the error from decoding it.
    pub(crate) chunk: Option<Result<Slot, SessionError>>,
    /// In place of `chunk`: other threads still put pages into it.
    pub(crate) filling: Option<Filling>,
    /// The checksum of those bytes, if a codec thread has computed it.
    pub(crate) checksum: Option<u64>,
}

/// The queue of a stream's frames for the thread that writes them to QEMU.
pub(crate) fn queue() -> Arc<Results<Arrived>> {
    Results::new(WINDOW)
}

/// The fields of the ACK that is due once a frame was written to QEMU.
#[derive(Clone, Copy)]
pub(crate) struct Receipt {
    /// Frames below this one were written.
    seq: u64,
    /// Plain bytes before `seq`.
    offset: u64,
    /// Running hash of those bytes.
    hash: u64,
}

/// The frames of one stream, in order. Owned by one thread.
pub(crate) struct Inbox<'a> {
    stream: u16,
    queue: &'a Results<Arrived>,
    reorder: Reorder<Arrived>,
    hash: RunningHash,
    /// Plain bytes so far, as counted here.
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

    /// The next frame; `None` once the queue is closed.
    ///
    /// # Errors
    /// A frame comes twice, or too far ahead of the others.
    pub(crate) fn next(&mut self) -> Result<Option<Arrived>, SessionError> {
        self.next_by(None)
    }

    /// As [`next`](Self::next), with a deadline; `None` also if `deadline` passes first.
    ///
    /// # Errors
    /// As for `next`.
    pub(crate) fn next_by(
        &mut self,
        deadline: Option<Instant>,
    ) -> Result<Option<Arrived>, SessionError> {
        loop {
            if let Some(arrived) = self.reorder.pop() {
                return Ok(Some(arrived));
            }
            let Popped::Item(arrived) = self.queue.pop_until(deadline) else { return Ok(None) };
            let seq = arrived.header.seq;
            self.reorder.insert(seq, arrived).map_err(|error| SessionError::Sequence {
                stream: self.stream,
                seq,
                detail: error.to_string(),
            })?;
        }
    }

    /// Compares the running hash after a DATA frame's `bytes` with the sender's. `checksum` is the
    /// checksum of `bytes`; this function computes it if it is `None`. The caller acknowledges the
    /// receipt once the bytes are written.
    ///
    /// # Errors
    /// The hashes differ: none of these bytes may be written.
    pub(crate) fn check(
        &mut self,
        header: &Header,
        bytes: &[u8],
        checksum: Option<u64>,
    ) -> Result<Receipt, SessionError> {
        let (stream, seq) = (self.stream, header.seq);
        if header.offset != self.offset {
            let detail = format!(
                "it says it begins at byte {}, and comes at {}",
                header.offset, self.offset
            );
            return Err(SessionError::Sequence { stream, seq, detail });
        }
        self.offset += bytes.len() as u64;
        self.hash.add(checksum.unwrap_or_else(|| codec::checksum(bytes)));
        let (ours, theirs) = (self.hash.value(), header.hash);
        if ours != theirs {
            return Err(SessionError::HashMismatch { stream, seq, ours, theirs });
        }
        Ok(self.receipt(header))
    }

    /// The receipt of the frame of `header`, the latest in order.
    pub(crate) fn receipt(&self, header: &Header) -> Receipt {
        Receipt { seq: header.seq + 1, offset: self.offset, hash: self.hash.value() }
    }

    /// Acknowledges the frame of `receipt` and all frames before it.
    pub(crate) fn acknowledge(&self, session: &Session, receipt: Receipt) {
        session.delivered(self.stream, receipt.seq, receipt.offset, receipt.hash);
    }
}
