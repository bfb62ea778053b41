//! The end of a channel: its requests are taken back, its session ends, or its memory is leaked.

#![expect(unsafe_code, reason = "the C interface of libqat")]

use super::{slot_of, Channel};
use crate::calls::Call;
use crate::memory::Pinned;
use qat_abi as abi;
use std::sync::Arc;

impl Channel {
    /// Polls and takes back all callbacks, ignoring their results; returns the requests still in
    /// flight.
    pub(crate) fn drain(&mut self) -> usize {
        if self.owned > 0 {
            self.poll();
        }
        for word in 0..self.words() {
            let mut done = self.instance.mailbox.take_done(word);
            while done != 0 {
                self.take_back(slot_of(word, done));
                done &= done - 1;
            }
        }
        self.owned
    }

    /// Ends the session and releases the instance. Returns the channel as `Err` while the device
    /// still has requests.
    #[expect(
        clippy::result_large_err,
        reason = "the channel is what is given back, once in its life"
    )]
    pub(crate) fn close(mut self) -> Result<(), Self> {
        if self.drain() > 0 || !self.take_turn() {
            self.rest();
            return Err(self.orphaned());
        }
        let calls = Arc::clone(&self.calls);
        let inside = calls.enter(Call::Close);
        // SAFETY: the session was initialised, and nothing is submitted to it any more.
        let status = unsafe {
            (self.api.remove_session)(self.instance.handle(), self.session.start().cast())
        };
        self.rest();
        // A dead device refuses (qatlib 24.02 returns FAIL in its state ERROR), and may still write
        // to the memory of its requests: the answers that came were the library's own.
        drop(inside);
        if status == abi::CPA_STATUS_SUCCESS {
            self.instance.release();
            Ok(())
        } else {
            Err(self.orphaned())
        }
    }

    /// The channel with a record of calls that no watchdog sees: other threads close it from now
    /// on, and its engine may record calls of its next channel.
    fn orphaned(mut self) -> Self {
        self.calls = Arc::default();
        self
    }

    /// Leaks the memory of requests that never came back: the device may still write to it.
    pub(crate) fn abandon(self) -> usize {
        let bytes = self.slots.iter().map(Pinned::len).sum();
        std::mem::forget(self);
        bytes
    }
}
