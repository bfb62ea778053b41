//! Frames written to a link and not acknowledged yet (W25): they are sent again when the link is
//! lost.
//!
//! A sequenced frame has one owner at a time: a queue, the writer of a link, or this list. Once the
//! peer has acknowledged it, it is removed from the list and its buffer is freed. The credits limit
//! the length of the list.

use crate::frame::{Header, MAX_STREAMS};
use crate::outgoing::Outgoing;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

/// The unacknowledged frames of one stream, at index `seq - first`, each with the link that wrote
/// it. Their number is at most the frames that may be in flight.
#[derive(Debug, Default)]
struct Frames {
    /// Every frame below it is acknowledged; equal to `Stream::acked`.
    first: u64,
    frames: VecDeque<Option<(u64, Outgoing)>>,
}

#[derive(Debug, Default)]
struct Stream {
    /// The peer has written every frame below it to QEMU. Written under the lock.
    acked: AtomicU64,
    frames: Mutex<Frames>,
}

/// The frames in flight of all streams of one direction.
///
/// A frame takes the lock of its stream once, after a link has written it, and causes no
/// allocation: the deques retain their capacity.
#[derive(Debug)]
pub(crate) struct Unacked(Box<[Stream]>);

impl Unacked {
    pub(crate) fn new() -> Self {
        Self(std::iter::repeat_with(Stream::default).take(MAX_STREAMS).collect())
    }

    /// Stores a frame that link `link` has written. If `is_dead` returns true, the link was lost
    /// meanwhile, and this returns the frame instead. Drops a frame that is already acknowledged or
    /// has no sequence number.
    pub(crate) fn hold(
        &self,
        link: u64,
        frame: Outgoing,
        is_dead: impl FnOnce() -> bool,
    ) -> Option<Outgoing> {
        let (stream, seq) = frame.header().map(place)?;
        let mut frames = lock(&self.0[stream].frames);
        // Checked under the lock: `take` marks the link before it locks any stream.
        if is_dead() {
            return Some(frame);
        }
        // The frame was acknowledged meanwhile.
        let index = usize::try_from(seq.checked_sub(frames.first)?).ok()?;
        while frames.frames.len() <= index {
            frames.frames.push_back(None);
        }
        frames.frames[index] = Some((link, frame));
        None
    }

    /// Marks a link with `mark`, which returns false if the link was already marked. Returns the
    /// frames written to it.
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

    /// Removes everything of `stream` below `seq`, which the peer has written; returns whether that
    /// is new. The caller has checked that this many frames were sent.
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

    /// Whether the peer has acknowledged this frame, so that it need not be sent again.
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
    fn unacknowledged_frames_of_a_lost_link_return_to_the_outbox() {
        let unacked = Unacked::new();
        for seq in 0..6 {
            assert!(unacked.hold(seq % 2, frame(3, seq), || false).is_none());
        }
        unacked.release(3, 3);
        assert!(unacked.is_acked(&frame(3, 2)) && !unacked.is_acked(&frame(3, 3)));
        assert_eq!(seqs(&unacked.take(1, || true).unwrap()), [3, 5]);
        assert!(unacked.take(1, || false).is_none(), "lost once");
        // Written to a link that was lost meanwhile, and a frame acknowledged before it could be
        // stored.
        assert!(unacked.hold(1, frame(3, 7), || true).is_some());
        assert!(unacked.hold(0, frame(3, 1), || false).is_none());
        assert_eq!(seqs(&unacked.take(0, || true).unwrap()), [4]);
    }

    #[test]
    fn an_old_acknowledgement_changes_nothing() {
        let unacked = Unacked::new();
        assert!(unacked.release(0, 5));
        assert!(!unacked.release(0, 2));
        assert!(unacked.is_acked(&frame(0, 4)));
    }
}
