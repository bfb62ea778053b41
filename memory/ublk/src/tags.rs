//! The state of each tag of a queue, and the reaction to each completion. No I/O.
//!
//! ```text
//!            completion: OK               backend is done: commit
//!  Fetching ────────────────► Serving ─────────────────────────────► Fetching ...
//!     │ completion: abort
//!     └──────────────────────► Gone
//! ```
//!
//! A tag belongs to the kernel while it is fetching and to this server while it is served. A
//! completion out of that order is a [`Violation`]: this server ends, and the next takes over. An
//! invalid request is answered with EIO.

use crate::sys::{self, IoDescriptor, SECTOR};

/// Bytes of a page, the disk's block.
pub(crate) const PAGE: u64 = 4096;

/// The errno for an invalid request.
pub(crate) const EIO: i32 = 5;
/// The errno for an operation that is not offered.
pub(crate) const EOPNOTSUPP: i32 = 95;

/// A request's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

/// A valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) kind: Kind,
    /// The first page.
    pub(crate) page: u64,
    /// The number of pages; 0 only for a flush.
    pub(crate) pages: u32,
}

impl Asked {
    /// Bytes in the tag's buffer.
    pub(crate) fn bytes(&self) -> u32 {
        match self.kind {
            // Bounded by the largest request, which is a `u32`.
            Kind::Read | Kind::Write => self.pages * 4096,
            Kind::Flush | Kind::Discard | Kind::WriteZeroes => 0,
        }
    }
}

/// The action after a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Pass this request to the backend.
    Serve(u16, Asked),
    /// Answer at once.
    Commit(u16, i32),
    /// Nothing: the tag gets no more requests.
    Gone,
}

/// The kernel or the backend violated the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// There is no such tag.
    #[error("completion for tag {tag}, the queue has {depth}")]
    NoSuchTag {
        /// The tag.
        tag: u64,
        /// The number of tags.
        depth: u16,
    },
    /// A completion for a tag that is served or gone.
    #[error("completion for tag {tag}, which was not fetching")]
    NotFetching {
        /// The tag.
        tag: u16,
    },
    /// The backend completed a tag that it was not serving.
    #[error("the backend is done with tag {tag}, which it was not serving")]
    NotServing {
        /// The tag.
        tag: u64,
    },
    /// The kernel refused the fetch.
    #[error("fetching tag {tag} fails with error {errno}")]
    Fetch {
        /// The tag.
        tag: u16,
        /// The kernel's errno.
        errno: i32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Fetching,
    /// Served; with the result of a success.
    Serving(i32),
    Gone,
}

/// The tags of one queue.
#[derive(Debug)]
pub(crate) struct Tags {
    states: Box<[State]>,
    pages: u64,
    max_io: u32,
    alive: u16,
}

impl Tags {
    /// The tags of a queue, for a disk of `pages` pages.
    pub(crate) fn new(depth: u16, pages: u64, max_io: u32) -> Self {
        let states = vec![State::Idle; usize::from(depth)].into_boxed_slice();
        Self { states, pages, max_io, alive: depth }
    }

    fn depth(&self) -> u16 {
        u16::try_from(self.states.len()).expect("made from an u16")
    }

    /// Whether all tags are gone, because the disk was stopped.
    pub(crate) fn ended(&self) -> bool {
        self.alive == 0
    }

    /// All tags, to be fetched now.
    pub(crate) fn fetch_all(&mut self) -> impl Iterator<Item = u16> {
        self.states.fill(State::Fetching);
        0..self.depth()
    }

    /// Handles a completion; `describe` reads the descriptor of a tag's request.
    pub(crate) fn arrived(
        &mut self,
        tag: u64,
        result: i32,
        describe: impl FnOnce(u16) -> IoDescriptor,
    ) -> Result<Step, Violation> {
        let depth = self.depth();
        let known = u16::try_from(tag).ok().filter(|&tag| tag < depth);
        let tag = known.ok_or(Violation::NoSuchTag { tag, depth })?;
        let state = &mut self.states[usize::from(tag)];
        if *state != State::Fetching {
            return Err(Violation::NotFetching { tag });
        }
        match result {
            0 => {}
            sys::ABORT => {
                *state = State::Gone;
                self.alive -= 1;
                return Ok(Step::Gone);
            }
            other => return Err(Violation::Fetch { tag, errno: other.wrapping_neg() }),
        }
        match parse(&describe(tag), self.pages, self.max_io) {
            Ok(asked) => {
                let success = i32::try_from(asked.bytes()).expect("at most a buffer's length");
                *state = State::Serving(success);
                Ok(Step::Serve(tag, asked))
            }
            Err(errno) => Ok(Step::Commit(tag, -errno)),
        }
    }

    /// The backend has completed a request; returns the tag and result to commit.
    pub(crate) fn done(
        &mut self,
        tag: u64,
        result: Result<(), i32>,
    ) -> Result<(u16, i32), Violation> {
        let known = u16::try_from(tag).ok().filter(|&tag| tag < self.depth());
        let known = known.ok_or(Violation::NotServing { tag })?;
        let state = &mut self.states[usize::from(known)];
        let State::Serving(success) = *state else { return Err(Violation::NotServing { tag }) };
        *state = State::Fetching;
        // The kernel would take any other number for bytes done.
        let failure = |errno: i32| if (1..4096).contains(&errno) { -errno } else { -EIO };
        Ok((known, result.map_or_else(failure, |()| success)))
    }
}

/// Checks a descriptor; the error is the errno to answer with.
fn parse(descriptor: &IoDescriptor, pages: u64, max_io: u32) -> Result<Asked, i32> {
    let [op, ..] = descriptor.op_flags.to_le_bytes();
    let kind = match op {
        sys::OP_READ => Kind::Read,
        sys::OP_WRITE => Kind::Write,
        sys::OP_FLUSH => return Ok(Asked { kind: Kind::Flush, page: 0, pages: 0 }),
        sys::OP_DISCARD => Kind::Discard,
        sys::OP_WRITE_ZEROES => Kind::WriteZeroes,
        _ => return Err(EOPNOTSUPP),
    };
    const SECTORS: u64 = PAGE / SECTOR;
    let (start, sectors) = (descriptor.start, u64::from(descriptor.sectors));
    let whole = start % SECTORS == 0 && sectors % SECTORS == 0 && sectors > 0;
    let (page, count) = (start / SECTORS, sectors / SECTORS);
    let inside = page.checked_add(count).is_some_and(|end| end <= pages);
    let carried = matches!(kind, Kind::Read | Kind::Write);
    let fits = !carried || count * PAGE <= u64::from(max_io);
    if !(whole && inside && fits) {
        return Err(EIO);
    }
    // Sectors are a `u32`, and pages are fewer.
    Ok(Asked { kind, page, pages: u32::try_from(count).map_err(|_| EIO)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 100;
    const MAX: u32 = 8 * 4096;

    fn descriptor(op: u8, start: u64, sectors: u32) -> IoDescriptor {
        // Flags may be set, and have no meaning here.
        IoDescriptor { op_flags: u32::from(op) | 1 << 16, sectors, start, addr: 0 }
    }

    fn fetching() -> Tags {
        let mut tags = Tags::new(4, PAGES, MAX);
        assert_eq!(tags.fetch_all().collect::<Vec<_>>(), [0, 1, 2, 3]);
        tags
    }

    #[test]
    fn a_write_is_served_and_committed_with_its_bytes() {
        let mut tags = fetching();
        let step = tags.arrived(2, 0, |_| descriptor(sys::OP_WRITE, 16, 24)).unwrap();
        assert_eq!(step, Step::Serve(2, Asked { kind: Kind::Write, page: 2, pages: 3 }));
        assert_eq!(tags.done(2, Ok(())), Ok((2, 3 * 4096)));
        // The tag is the kernel's again.
        tags.arrived(2, 0, |_| descriptor(sys::OP_READ, 0, 8)).unwrap();
        assert_eq!(tags.done(2, Err(28)), Ok((2, -28)));
    }

    #[test]
    fn a_request_without_bytes_is_committed_with_none() {
        for op in [sys::OP_DISCARD, sys::OP_WRITE_ZEROES] {
            let mut tags = fetching();
            // More than a buffer holds.
            let step = tags.arrived(0, 0, |_| descriptor(op, 0, 800)).unwrap();
            assert!(matches!(step, Step::Serve(0, Asked { pages: 100, .. })), "{step:?}");
            assert_eq!(tags.done(0, Ok(())), Ok((0, 0)));
        }
        let mut tags = fetching();
        let step = tags.arrived(0, 0, |_| descriptor(sys::OP_FLUSH, 7, 3)).unwrap();
        assert_eq!(step, Step::Serve(0, Asked { kind: Kind::Flush, page: 0, pages: 0 }));
    }

    #[test]
    fn invalid_descriptors_are_answered_and_the_tag_is_reused() {
        let cases = [
            (descriptor(sys::OP_READ, 1, 8), -EIO),
            (descriptor(sys::OP_READ, 0, 7), -EIO),
            (descriptor(sys::OP_READ, 0, 0), -EIO),
            (descriptor(sys::OP_WRITE, 0, 72), -EIO),
            (descriptor(sys::OP_WRITE, 800, 8), -EIO),
            (descriptor(sys::OP_DISCARD, 792, 16), -EIO),
            (descriptor(sys::OP_READ, !7, 8), -EIO),
            (descriptor(4, 0, 8), -EOPNOTSUPP),
            (descriptor(255, 0, 8), -EOPNOTSUPP),
        ];
        let mut tags = fetching();
        for (bad, answer) in cases {
            assert_eq!(tags.arrived(1, 0, |_| bad), Ok(Step::Commit(1, answer)), "{bad:?}");
        }
        let last = descriptor(sys::OP_READ, 792, 8);
        assert!(matches!(tags.arrived(1, 0, |_| last), Ok(Step::Serve(1, _))));
    }

    #[test]
    fn completions_out_of_order_are_violations() {
        let mut tags = fetching();
        let read = |_| descriptor(sys::OP_READ, 0, 8);
        assert_eq!(tags.arrived(4, 0, read), Err(Violation::NoSuchTag { tag: 4, depth: 4 }));
        assert!(matches!(tags.arrived(1 << 40, 0, read), Err(Violation::NoSuchTag { .. })));
        tags.arrived(0, 0, read).unwrap();
        assert_eq!(tags.arrived(0, 0, read), Err(Violation::NotFetching { tag: 0 }));
        assert_eq!(tags.done(1, Ok(())), Err(Violation::NotServing { tag: 1 }));
        assert_eq!(tags.done(9, Ok(())), Err(Violation::NotServing { tag: 9 }));
        tags.done(0, Ok(())).unwrap();
        assert_eq!(tags.done(0, Ok(())), Err(Violation::NotServing { tag: 0 }));
        assert_eq!(tags.arrived(3, -22, read), Err(Violation::Fetch { tag: 3, errno: 22 }));
    }

    #[test]
    fn the_queue_ends_when_every_tag_has_ended() {
        let mut tags = fetching();
        tags.arrived(0, 0, |_| descriptor(sys::OP_READ, 0, 8)).unwrap();
        for tag in 1..4 {
            assert_eq!(tags.arrived(tag, sys::ABORT, |_| unreachable!()), Ok(Step::Gone));
        }
        assert!(!tags.ended());
        tags.done(0, Ok(())).unwrap();
        tags.arrived(0, sys::ABORT, |_| unreachable!()).unwrap();
        assert!(tags.ended());
        assert_eq!(tags.arrived(0, 0, |_| unreachable!()), Err(Violation::NotFetching { tag: 0 }));
    }

    #[test]
    fn a_backend_cannot_answer_with_an_invalid_error_number() {
        for (errno, answer) in [(0, -EIO), (-3, -EIO), (4096, -EIO), (i32::MIN, -EIO), (12, -12)] {
            let mut tags = fetching();
            tags.arrived(0, 0, |_| descriptor(sys::OP_WRITE, 0, 8)).unwrap();
            assert_eq!(tags.done(0, Err(errno)), Ok((0, answer)));
        }
    }
}
