//! The frames that a link has written and the peer has not acknowledged (W25): they go again when
//! the link is lost.
//!
//! A sequenced frame has one owner at a time: a queue, the writer of a link, or this list. It
//! leaves the list for good when the peer has acknowledged it, and its buffer is free again. The
//! credits bound the length of the list.

use crate::frame::{Header, MAX_STREAMS};
use crate::outgoing::Outgoing;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
struct Stream {
    /// Everything below was written to QEMU over there.
    acked: u64,
    /// By sequence number: the link it was written to, and the frame.
    frames: BTreeMap<u64, (u64, Outgoing)>,
}

/// The frames in flight of all streams of one direction.
pub(crate) struct Unacked(Mutex<Vec<Stream>>);

impl Unacked {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(std::iter::repeat_with(Stream::default).take(MAX_STREAMS).collect()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a frame that link `link` has written, unless `is_dead` says that it has been lost
    /// since: the frame comes back then. What is acknowledged already is dropped, and what is not
    /// sequenced is not unacked.
    pub(crate) fn hold(
        &self,
        link: u64,
        frame: Outgoing,
        is_dead: impl FnOnce() -> bool,
    ) -> Option<Outgoing> {
        let (stream, seq) = frame.header().map(place)?;
        let mut streams = self.lock();
        // Asked under the lock: `take` marks the link before it looks for its frames.
        if is_dead() {
            return Some(frame);
        }
        let unacked = &mut streams[stream];
        if seq >= unacked.acked {
            unacked.frames.insert(seq, (link, frame));
        }
        None
    }

    /// Marks a link by `mark`, which says false when it was marked before, and gives what it had
    /// written.
    pub(crate) fn take(&self, link: u64, mark: impl FnOnce() -> bool) -> Option<Vec<Outgoing>> {
        let mut streams = self.lock();
        if !mark() {
            return None;
        }
        let mut taken = Vec::new();
        for stream in streams.iter_mut() {
            for (seq, (of, frame)) in std::mem::take(&mut stream.frames) {
                if of == link {
                    taken.push(frame);
                } else {
                    stream.frames.insert(seq, (of, frame));
                }
            }
        }
        Some(taken)
    }

    /// The peer has written everything of `stream` below `seq`; whether that is new.
    pub(crate) fn release(&self, stream: u16, seq: u64) -> bool {
        let mut streams = self.lock();
        let unacked = &mut streams[usize::from(stream)];
        let is_new = seq > unacked.acked;
        if is_new {
            unacked.acked = seq;
            unacked.frames = unacked.frames.split_off(&seq);
        }
        is_new
    }

    /// Whether the peer has had this frame: it need not go again.
    pub(crate) fn is_acked(&self, frame: &Outgoing) -> bool {
        let Some((stream, seq)) = frame.header().map(place) else { return false };
        seq < self.lock()[stream].acked
    }
}

fn place(header: &Header) -> (usize, u64) {
    (usize::from(header.stream), header.seq)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame_type::FrameType;

    fn frame(stream: u16, seq: u64) -> Outgoing {
        Outgoing::Bare(Header { stream, seq, ..Header::free(FrameType::Open, 0) })
    }

    fn seqs(frames: &[Outgoing]) -> Vec<u64> {
        frames.iter().filter_map(|frame| frame.header().map(|header| header.seq)).collect()
    }

    #[test]
    fn what_a_lost_link_had_written_comes_back_unless_it_was_acknowledged() {
        let unacked = Unacked::new();
        for seq in 0..6 {
            assert!(unacked.hold(seq % 2, frame(3, seq), || false).is_none());
        }
        unacked.release(3, 3);
        assert!(unacked.is_acked(&frame(3, 2)) && !unacked.is_acked(&frame(3, 3)));
        assert_eq!(seqs(&unacked.take(1, || true).unwrap()), [3, 5]);
        assert!(unacked.take(1, || false).is_none(), "lost once");
        // Written to a link that was lost meanwhile, and acknowledged before it could be unacked.
        assert!(unacked.hold(1, frame(3, 7), || true).is_some());
        assert!(unacked.hold(0, frame(3, 1), || false).is_none());
        assert_eq!(seqs(&unacked.take(0, || true).unwrap()), [4]);
    }

    #[test]
    fn an_old_acknowledgement_says_nothing_new() {
        let unacked = Unacked::new();
        assert!(unacked.release(0, 5));
        assert!(!unacked.release(0, 2));
        assert!(unacked.is_acked(&frame(0, 4)));
    }
}
