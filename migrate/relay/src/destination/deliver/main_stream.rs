//! Writes a main stream, and holds the bytes back that may start the VM (W20).

use super::{Delivery, Held, Stop};
use crate::inbox::{Inbox, Receipt};
use pages::Slot;
use session::Header;
use std::sync::atomic::Ordering;
use stream::Token;

impl Delivery<'_> {
    /// Writes a chunk of a main stream that was just fed, up to the bytes that may start the VM.
    /// `before`: the chunk's offset in the stream.
    pub(super) fn main_data(
        &mut self,
        inbox: &mut Inbox<'_>,
        header: Header,
        chunk: Slot,
        receipt: Receipt,
        before: u64,
    ) -> Result<(), Stop> {
        let facts = self.tokeniser.facts();
        let (tail, tail_at) = (facts.tail, facts.tail_at);
        let (page_size, switched) = (facts.page_size, facts.switched);
        // The bytes of a packaged state that ends with a PING start the VM, whatever follows them.
        // The bytes behind that state do not.
        let tail = if self.awaits_pong { before < facts.switch_end } else { tail };
        let markers = self.markers_in(page_size);
        if !tail && !self.awaits_pong {
            // Behind a switch to postcopy, the source no longer starts its VM: a missing STILL_OPEN
            // does not matter.
            self.release(inbox)?;
            // From here on the destination may run the VM, or already did: the answer of W28 has to
            // state that.
            if switched && !self.shared.session.commit() {
                return Err(Stop::Over);
            }
        }
        let len = header.plain_len as usize;
        let free = if tail {
            usize::try_from(tail_at.saturating_sub(before)).unwrap_or(len).min(len)
        } else if self.held.is_empty() {
            len
        } else {
            0
        };
        self.note_state(header.offset, free);
        self.write_main(&chunk, 0, free, &markers, header.channels)?;
        // Not before: a table of a channel may be behind the barriers of this chunk.
        if self.tokeniser.facts().postcopy_running {
            self.shared.end_channel_deltas();
        }
        if free < len {
            self.held.push_back(Held { header, chunk, from: free, markers, receipt });
        } else {
            drop(chunk);
            self.written(inbox, receipt);
        }
        Ok(())
    }

    /// The barrier markers in the chunk just fed.
    fn markers_in(&mut self, page_size: usize) -> Vec<(usize, u64)> {
        // Not allocated without markers, which is the usual case.
        let mut markers = Vec::new();
        let mut at = 0;
        for token in &self.tokens {
            if let Token::Barrier { .. } = token {
                self.markers += 1;
                markers.push((at, self.markers));
            }
            at += token.len(page_size);
        }
        markers
    }

    /// STILL_OPEN has arrived: writes the held bytes.
    pub(super) fn release(&mut self, inbox: &Inbox<'_>) -> Result<(), Stop> {
        while let Some(held) = self.held.pop_front() {
            let Held { header, chunk, from, markers, receipt } = held;
            // Recorded before the first such byte is written, so that an ABORT never claims too
            // little.
            if !self.shared.session.commit() {
                return Err(Stop::Over);
            }
            self.note_state(header.offset, header.plain_len as usize);
            self.write_main(&chunk, from, header.plain_len as usize, &markers, header.channels)?;
            drop(chunk);
            self.written(inbox, receipt);
        }
        Ok(())
    }

    /// Records that the bytes to be written now, up to `len` of the chunk at `offset`, may end the
    /// packaged state of postcopy; does nothing if they cannot.
    fn note_state(&self, offset: u64, len: usize) {
        let facts = self.tokeniser.facts();
        if facts.postcopy_running && offset + len as u64 >= facts.switch_end {
            self.shared.state_given.store(true, Ordering::Release);
        }
    }
}
