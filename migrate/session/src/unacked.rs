//! The frames that a link has written and the peer has not acknowledged (W25): they go again when
//! the link is lost.
//!
//! A sequenced frame has one owner at a time: a queue, the writer of a link, or this list. It
//! leaves the list for good when the peer has acknowledged it, and its buffer is free again. The
//! credits bound the length of the list.

use crate::frame::{Header, MAX_STREAMS};
use crate::outgoing::Outgoing;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

/// The unacknowledged frames of one stream, at index `seq - first`, each with the link that has
/// written it. At most as many as may be in flight.
#[derive(Debug, Default)]
struct Frames {
    /// Everything below was acknowledged; the same as `Stream::acked`.
    first: u64,
    frames: VecDeque<Option<(u64, Outgoing)>>,
}

#[derive(Debug, Default)]
struct Stream {
    /// Everything below was written to QEMU over there. Written under the lock.
    acked: AtomicU64,
    frames: Mutex<Frames>,
}

/// The frames in flight of all streams of one direction.
///
/// A frame costs the lock of its stream once, when a link has written it, and no allocation: the
/// rings keep what they have grown to.
#[derive(Debug)]
pub(crate) struct Unacked(Box<[Stream]>);

impl Unacked {
    pub(crate) fn new() -> Self {
        Self(std::iter::repeat_with(Stream::default).take(MAX_STREAMS).collect())
    }

    /// Holds a frame that link `link` has written, unless `is_dead` says that the link was lost
    /// since: the frame comes back then. A frame that is acknowledged already is dropped, and one
    /// that is not sequenced as well.
    pub(crate) fn hold(
        &self,
        link: u64,
        frame: Outgoing,
        is_dead: impl FnOnce() -> bool,
    ) -> Option<Outgoing> {
        let (stream, seq) = frame.header().map(place)?;
        let mut frames = lock(&self.0[stream].frames);
        // Asked under the lock: `take` marks the link before it locks any stream.
        if is_dead() {
            return Some(frame);
        }
        // Acknowledged meanwhile.
        let index = usize::try_from(seq.checked_sub(frames.first)?).ok()?;
        while frames.frames.len() <= index {
            frames.frames.push_back(None);
        }
        frames.frames[index] = Some((link, frame));
        None
    }

    /// Marks a link by `mark`, which says false when it was marked before, and gives what it had
    /// written.
    pub(crate) fn take(&self, link: u64, mark: impl FnOnce() -> bool) -> Option<Vec<Outgoing>> {
        if !mark() {
            return None;
        }
        let mut taken = Vec::new();
        for stream in &self.0 {
            let mut frames = lock(&stream.frames);
            let of_link = |cell: &mut Option<(u64, Outgoing)>| {
                cell.take_if(|(of, _)| *of == link).map(|(_, frame)| frame)
            };
            taken.extend(frames.frames.iter_mut().filter_map(of_link));
        }
        Some(taken)
    }

    /// The peer has written everything of `stream` below `seq`; whether that is new. The caller has
    /// checked that so many were sent.
    pub(crate) fn release(&self, stream: u16, seq: u64) -> bool {
        let stream = &self.0[usize::from(stream)];
        let mut frames = lock(&stream.frames);
        if seq <= frames.first {
            return false;
        }
        let acked = usize::try_from(seq - frames.first).unwrap_or(usize::MAX);
        let held = frames.frames.len().min(acked);
        frames.frames.drain(..held);
        frames.first = seq;
        stream.acked.store(seq, Ordering::Release);
        true
    }

    /// Whether the peer has had this frame: it need not go again.
    pub(crate) fn is_acked(&self, frame: &Outgoing) -> bool {
        let Some((stream, seq)) = frame.header().map(place) else { return false };
        seq < self.0[stream].acked.load(Ordering::Acquire)
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
