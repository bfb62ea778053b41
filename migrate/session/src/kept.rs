//! What has been written to a link and is not acknowledged yet (W25): it goes again when the link
//! is lost.
//!
//! A sequenced frame has one owner at a time: a queue, the writer of a link, or this. It leaves for
//! good when the peer has acknowledged it, and its buffer is free again. The credits bound what is
//! in here.

use crate::frame::{Header, MAX_STREAMS};
use crate::session::Outgoing;
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
pub(crate) struct Kept(Mutex<Vec<Stream>>);

impl Kept {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(std::iter::repeat_with(Stream::default).take(MAX_STREAMS).collect()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a frame that link `link` has written, unless `is_dead` says that it has been lost
    /// since: the frame comes back then. What is acknowledged already is dropped, and what is not
    /// sequenced is not kept.
    pub(crate) fn keep(
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
        let kept = &mut streams[stream];
        if seq >= kept.acked {
            kept.frames.insert(seq, (link, frame));
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
        let kept = &mut streams[usize::from(stream)];
        let is_new = seq > kept.acked;
        if is_new {
            kept.acked = seq;
            kept.frames = kept.frames.split_off(&seq);
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

/// Which frames of one stream and direction have come off the links (W11): each is taken once,
/// whichever link brings it first in full.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// Everything below has arrived.
    base: u64,
    /// Bit i of the whole: `base + i` has arrived.
    ahead: [u64; WORDS],
}

/// Frames that may be ahead of what was written to QEMU (W11).
pub(crate) const WINDOW: u64 = 64 * WORDS as u64;
const WORDS: usize = 16;

impl Arrivals {
    /// Whether `seq` has not arrived yet.
    pub(crate) fn expects(&self, seq: u64) -> bool {
        match seq.checked_sub(self.base) {
            None => false,
            Some(ahead) => ahead >= WINDOW || self.ahead[word(ahead)] & bit(ahead) == 0,
        }
    }

    /// Takes note of `seq`, which is less than [`WINDOW`] beyond the base; false when it has
    /// arrived before.
    pub(crate) fn take(&mut self, seq: u64) -> bool {
        if !self.expects(seq) {
            return false;
        }
        let ahead = seq - self.base;
        if ahead >= WINDOW {
            return false;
        }
        self.ahead[word(ahead)] |= bit(ahead);
        while self.ahead[0] & 1 == 1 {
            let mut carry = 0;
            for word in self.ahead.iter_mut().rev() {
                let low = *word & 1;
                *word = *word >> 1 | carry << 63;
                carry = low;
            }
            self.base += 1;
        }
        true
    }
}

fn word(ahead: u64) -> usize {
    // Below 16, as `ahead` is below the window.
    usize::try_from(ahead / 64).unwrap_or(0)
}

fn bit(ahead: u64) -> u64 {
    1 << (ahead % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameType;
    use std::collections::HashSet;

    fn frame(stream: u16, seq: u64) -> Outgoing {
        Outgoing::Bare(Header { stream, seq, ..Header::free(FrameType::Open, 0) })
    }

    fn seqs(frames: &[Outgoing]) -> Vec<u64> {
        frames.iter().filter_map(|frame| frame.header().map(|header| header.seq)).collect()
    }

    #[test]
    fn what_a_lost_link_had_written_comes_back_unless_it_was_acknowledged() {
        let kept = Kept::new();
        for seq in 0..6 {
            assert!(kept.keep(seq % 2, frame(3, seq), || false).is_none());
        }
        kept.release(3, 3);
        assert!(kept.is_acked(&frame(3, 2)) && !kept.is_acked(&frame(3, 3)));
        assert_eq!(seqs(&kept.take(1, || true).unwrap()), [3, 5]);
        assert!(kept.take(1, || false).is_none(), "lost once");
        // Written to a link that was lost meanwhile, and acknowledged before it could be kept.
        assert!(kept.keep(1, frame(3, 7), || true).is_some());
        assert!(kept.keep(0, frame(3, 1), || false).is_none());
        assert_eq!(seqs(&kept.take(0, || true).unwrap()), [4]);
    }

    #[test]
    fn an_old_acknowledgement_says_nothing_new() {
        let kept = Kept::new();
        assert!(kept.release(0, 5));
        assert!(!kept.release(0, 2));
        assert!(kept.is_acked(&frame(0, 4)));
    }

    #[test]
    fn each_frame_is_taken_once_in_whatever_order_it_comes() {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut arrivals = Arrivals::default();
        let mut model = HashSet::new();
        let mut base = 0;
        for _ in 0..40_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let seq = (base + state % WINDOW).saturating_sub(state >> 60);
            assert_eq!(arrivals.expects(seq), !model.contains(&seq), "{seq}");
            assert_eq!(arrivals.take(seq), model.insert(seq), "{seq}");
            while model.contains(&base) {
                base += 1;
            }
            assert_eq!(arrivals.base, base);
        }
        assert!(base > 1000, "{base}");
        assert!(!arrivals.take(base + WINDOW), "beyond the window");
    }
}
