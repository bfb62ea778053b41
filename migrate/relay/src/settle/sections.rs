//! The sections of a source QEMU that has its PONG, by which it shows that it has seen it.

use std::time::{Duration, Instant};

/// The most bytes that are read at once.
pub(super) const ROOM: usize = 256 << 10;
/// So many bytes without [`SECTIONS`] are of huge pages, and are read as fast as they come. Bytes
/// of other pages come slowly before that: a source that has sent all cannot pause any more.
pub(super) const SHORT: u64 = 4 << 20;
/// Bytes that come this long after others count again: QEMU goes on.
pub(super) const ROUND: Duration = Duration::from_millis(125);
/// So many rounds take a second, in which the thread that reads the PONG has run.
pub(super) const ROUNDS: u32 = 8;
/// So many sections that begin behind that show that the migration thread has seen the PONG. One
/// would do, if QEMU wrote each byte at once: it collects some before a write.
const SECTIONS: u64 = 2;

/// Counts the rounds in which bytes have come from a source that has its PONG.
#[derive(Debug, Default)]
struct Rounds {
    count: u32,
    last: Option<Instant>,
}

impl Rounds {
    /// Records that bytes have come. Returns true once the source has certainly read its PONG.
    fn bytes_at(&mut self, now: Instant) -> bool {
        if self.last.is_none_or(|last| now.saturating_duration_since(last) >= ROUND) {
            self.last = Some(now);
            self.count += 1;
        }
        self.count > ROUNDS
    }
}

/// Finds that the migration thread of a source that has its PONG has seen it.
#[derive(Debug, Default)]
pub(crate) struct Sections {
    rounds: Rounds,
    /// Once the source has read its PONG: the bytes that had come by then, and an offset before
    /// which it may have written bytes earlier.
    old: Option<(u64, u64)>,
    /// Sections that have begun behind that offset.
    begun: u64,
}

impl Sections {
    /// Records that the bytes from offset `from` up to `to` have come, in which `begun` sections
    /// begin. `buffered`: the bytes that may wait in the kernel. Returns true once the migration
    /// thread has certainly seen the PONG.
    pub(crate) fn come(
        &mut self,
        now: Instant,
        (from, to): (u64, u64),
        begun: u64,
        buffered: impl FnOnce() -> u64,
    ) -> bool {
        match self.old {
            None if self.rounds.bytes_at(now) => {
                self.old = Some((to, to.saturating_add(buffered())));
            }
            Some((_, old)) if from >= old => self.begun += begun,
            _ => {}
        }
        self.begun >= SECTIONS
    }

    /// Whether the source has certainly read its PONG.
    #[cfg(test)]
    pub(super) fn is_old(&self) -> bool {
        self.old.is_some()
    }

    /// Whether the source, of which `read` bytes have come, has long sections.
    pub(super) fn are_long(&self, read: u64) -> bool {
        self.old.is_some_and(|(then, _)| read - then >= SHORT)
    }
}

/// Finds the heads of sections in bytes that begin anywhere: the end of a section of RAM (a record
/// EOS and a footer), then the type of a section that goes on or ends. A page of the guest may hold
/// such bytes, too.
#[derive(Debug)]
pub(super) struct Heads {
    /// The last bytes, fewer than a head, then room for more.
    bytes: Box<[u8]>,
    kept: usize,
}

impl Heads {
    const EOS_AND_FOOTER: [u8; 9] = [0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e];
    /// The section's number is between footer and type.
    const TYPE: usize = 13;

    pub(super) fn new() -> Self {
        Self { bytes: vec![0; Self::TYPE + ROOM].into(), kept: 0 }
    }

    /// The place for more bytes.
    pub(super) fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.kept..]
    }

    /// The `got` bytes that were put there.
    pub(super) fn fresh(&self, got: usize) -> &[u8] {
        &self.bytes[self.kept..self.kept + got]
    }

    /// Takes these bytes. Returns the number of heads that end in them, and whether one is that of
    /// RAM's last section.
    pub(super) fn take(&mut self, got: usize) -> (u64, bool) {
        let end = self.kept + got;
        let (mut count, mut is_last) = (0, false);
        for kind in Self::kinds(&self.bytes[..end]) {
            count += 1;
            is_last |= kind == 3;
        }
        self.kept = end.min(Self::TYPE);
        self.bytes.copy_within(end - self.kept..end, 0);
        (count, is_last)
    }

    /// Whether the head of RAM's last section ends in `bytes`, if these came next.
    pub(super) fn end_in(&self, bytes: &[u8]) -> bool {
        let all = [&self.bytes[..self.kept], bytes].concat();
        let mut kinds = Self::kinds(&all);
        kinds.any(|kind| kind == 3)
    }

    /// The types of the sections whose heads are in `bytes`.
    fn kinds(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
        let heads = bytes.windows(Self::TYPE + 1).filter(|bytes| {
            matches!(bytes[Self::TYPE], 2 | 3) && bytes.starts_with(&Self::EOS_AND_FOOTER)
        });
        heads.map(|head| head[Self::TYPE])
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const END: [u8; 14] = [0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 0];
    /// The end of a section, and the head of the next one.
    pub(in super::super) const NEXT: [u8; 18] =
        [0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 2, 0, 0, 0, 2];

    #[test]
    fn heads_of_sections_are_known_however_the_bytes_are_cut() {
        let last = [&NEXT[..13], &[3, 0, 0, 0, 2]].concat();
        let stream = [&[9; 40][..], &NEXT, &[7; 99], &NEXT, &NEXT, &last, &END].concat();
        for piece in 1..=stream.len() {
            let mut heads = Heads::new();
            let (mut count, mut ends) = (0, false);
            for bytes in stream.chunks(piece) {
                heads.room()[..bytes.len()].copy_from_slice(bytes);
                assert_eq!(heads.fresh(bytes.len()), bytes);
                let (more, last) = heads.take(bytes.len());
                (count, ends) = (count + more, ends | last);
            }
            assert_eq!((count, ends), (4, true), "in pieces of {piece}");
        }
    }

    /// Sections count only behind all that waited when the source had been seen for a second.
    #[test]
    fn sections_that_waited_show_nothing() {
        let mut sections = Sections::default();
        let begin = Instant::now();
        for round in 0..=ROUNDS {
            let at = u64::from(round);
            assert!(!sections.come(begin + ROUND * round, (at, at + 1), 50, || 7));
        }
        let later = begin + Duration::from_secs(60);
        // The last bytes above ended at 9, and 7 more waited.
        assert!(!sections.come(later, (9, 16), 50, || 0));
        assert!(!sections.are_long(8 + SHORT) && sections.are_long(9 + SHORT));
        assert!(!sections.come(later, (16, 17), SECTIONS - 1, || 0));
        assert!(!sections.come(later, (17, 90_000), 0, || 0));
        assert!(sections.come(later, (90_000, 90_001), 1, || 0));
    }
}
