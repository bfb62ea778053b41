//! A queue's thread: takes requests from the kernel to the backend and completions back, in batches.

use device::{Buffer, Op, Queue, Request};

use crate::buffers::Buffers;
use crate::ring::{Arrival, Ring};
use crate::server::QueueError;
use crate::tags::{Asked, Kind, Step, Tags};

/// Serves one queue until the disk is gone. Nothing in here allocates once requests flow.
///
/// # Errors
///
/// The kernel takes no commands any more, or says what cannot be.
pub(crate) fn serve<R: Ring, Q: Queue>(
    ring: &mut R,
    backend: &mut Q,
    tags: &mut Tags,
    buffers: &Buffers,
    queue: u16,
    arrivals: &mut Vec<Arrival>,
) -> Result<(), QueueError> {
    for tag in tags.fetch_all() {
        ring.fetch(tag)?;
    }
    let mut broken = None;
    while !tags.ended() {
        // Nobody wakes us for what is over already; `arm` says so.
        while !backend.arm() {
            reap(ring, backend, tags, &mut broken)?;
        }
        arrivals.clear();
        ring.wait(arrivals)?;
        for arrival in arrivals.drain(..) {
            let Arrival::Tag(tag, result) = arrival else { continue };
            match tags.arrived(tag, result, |tag| ring.descriptor(tag))? {
                Step::Gone => {}
                Step::Commit(tag, result) => ring.commit(tag, result)?,
                Step::Serve(tag, asked) => {
                    let request = request(&asked, buffers, queue, tag);
                    if let Some(result) = backend.submit(tag.into(), request) {
                        let (tag, result) =
                            tags.done(tag.into(), result.map_err(device::Errno::raw))?;
                        ring.commit(tag, result)?;
                    }
                }
            }
        }
        reap(ring, backend, tags, &mut broken)?;
    }
    Ok(())
}

fn reap<R: Ring, Q: Queue>(
    ring: &mut R,
    backend: &mut Q,
    tags: &mut Tags,
    broken: &mut Option<QueueError>,
) -> Result<(), QueueError> {
    backend.reap(&mut |tag, result| {
        let answered = match tags.done(tag, result.map_err(device::Errno::raw)) {
            Ok((tag, result)) => ring.commit(tag, result).map_err(QueueError::from),
            Err(violation) => Err(violation.into()),
        };
        if let Err(error) = answered {
            broken.get_or_insert(error);
        }
    });
    broken.take().map_or(Ok(()), Err)
}

/// The request as the backend wants it.
fn request(asked: &Asked, buffers: &Buffers, queue: u16, tag: u16) -> Request {
    let op = match asked.kind {
        Kind::Read => Op::Read,
        Kind::Write => Op::Write,
        Kind::Flush => Op::Flush,
        Kind::Discard => Op::Discard,
        // A page of zeros that was asked for without a hole costs no memory either way.
        Kind::WriteZeroes => Op::WriteZeroes { keep: false },
    };
    let buffer = match asked.bytes() {
        0 => Buffer::NONE,
        len => buffers.request(queue, tag, len as usize),
    };
    Request { op, page: asked.page, pages: asked.pages, buffer }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Geometry;
    use crate::sys::{self, IoDescriptor};
    use crate::tags::Violation;
    use device::{Errno, Extent};
    use std::collections::VecDeque;
    use std::io;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    /// A kernel that plays a script: what comes at each wait.
    struct Script {
        waits: VecDeque<Vec<Arrival>>,
        descriptors: Vec<IoDescriptor>,
        fetched: Vec<u16>,
        committed: Vec<(u16, i32)>,
    }

    impl Script {
        fn new(descriptors: Vec<IoDescriptor>, waits: Vec<Vec<Arrival>>) -> Self {
            Self { waits: waits.into(), descriptors, fetched: Vec::new(), committed: Vec::new() }
        }
    }

    impl Ring for Script {
        fn fetch(&mut self, tag: u16) -> io::Result<()> {
            self.fetched.push(tag);
            Ok(())
        }
        fn commit(&mut self, tag: u16, result: i32) -> io::Result<()> {
            self.committed.push((tag, result));
            Ok(())
        }
        fn wait(&mut self, out: &mut Vec<Arrival>) -> io::Result<()> {
            let next = self.waits.pop_front();
            out.extend(next.ok_or_else(|| io::Error::other("would sleep for ever"))?);
            Ok(())
        }
        fn descriptor(&self, tag: u16) -> IoDescriptor {
            self.descriptors[usize::from(tag)]
        }
    }

    /// A backend that does small requests at once and large ones when it is next asked; its buffers are
    /// looked at only for their length.
    struct Later {
        wake: OwnedFd,
        waiting: Vec<u64>,
        seen: Vec<(Op, u64, u32, usize)>,
        answer: Result<(), Errno>,
    }

    impl Later {
        fn new(answer: Result<(), Errno>) -> Self {
            let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            Self { wake, waiting: Vec::new(), seen: Vec::new(), answer }
        }
    }

    impl Queue for Later {
        fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
            self.seen.push((request.op, request.page, request.pages, request.buffer.len()));
            if request.pages < 4 {
                return Some(self.answer);
            }
            self.waiting.push(tag);
            None
        }
        fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
            let over = std::mem::take(&mut self.waiting);
            over.iter().rev().for_each(|&tag| each(tag, self.answer));
            over.len()
        }
        fn in_flight(&self) -> usize {
            self.waiting.len()
        }
        fn arm(&mut self) -> bool {
            self.waiting.is_empty()
        }
        fn fd(&self) -> BorrowedFd<'_> {
            self.wake.as_fd()
        }
        fn patch(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), Errno> {
            unreachable!("the disk has blocks of a page")
        }
        fn extent(&mut self, _: u64, _: u64) -> Result<Extent, Errno> {
            unreachable!("the kernel does not ask")
        }
    }

    const GEOMETRY: Geometry = Geometry { size: 1 << 20, queues: 1, depth: 4, max_io: 8 * 4096 };

    fn run(script: &mut Script, backend: &mut Later) -> Result<(), QueueError> {
        let buffers = Buffers::new(&GEOMETRY).unwrap();
        let mut tags = Tags::new(GEOMETRY.depth, GEOMETRY.size / 4096, GEOMETRY.max_io);
        let mut arrivals = Vec::with_capacity(8);
        serve(script, backend, &mut tags, &buffers, 0, &mut arrivals)
    }

    fn descriptor(op: u8, page: u64, pages: u32) -> IoDescriptor {
        IoDescriptor { op_flags: op.into(), sectors: pages * 8, start: page * 8, addr: 0 }
    }

    fn gone() -> Vec<Arrival> {
        (0..4).map(|tag| Arrival::Tag(tag, sys::ABORT)).collect()
    }

    #[test]
    fn small_and_large_requests_are_answered_once_each_and_then_the_queue_ends() {
        let descriptors = vec![
            descriptor(sys::OP_READ, 0, 1),
            descriptor(sys::OP_WRITE, 8, 8),
            descriptor(sys::OP_DISCARD, 0, 256),
            descriptor(sys::OP_FLUSH, 0, 0),
        ];
        let all = (0..4).map(|tag| Arrival::Tag(tag, 0)).collect();
        let waits = vec![all, vec![Arrival::Backend], gone()];
        let (mut script, mut backend) = (Script::new(descriptors, waits), Later::new(Ok(())));
        run(&mut script, &mut backend).unwrap();
        assert_eq!(script.fetched, [0, 1, 2, 3]);
        // Large ones after small ones, in the order in which the backend was done.
        assert_eq!(script.committed, [(0, 4096), (3, 0), (2, 0), (1, 8 * 4096)]);
        let seen = [
            (Op::Read, 0, 1, 4096),
            (Op::Write, 8, 8, 8 * 4096),
            (Op::Discard, 0, 256, 0),
            (Op::Flush, 0, 0, 0),
        ];
        assert_eq!(backend.seen, seen);
    }

    #[test]
    fn a_backend_s_errors_reach_the_kernel() {
        let descriptors = vec![
            descriptor(sys::OP_WRITE, 0, 1),
            descriptor(sys::OP_WRITE, 0, 8),
            descriptor(9, 0, 1),
            descriptor(sys::OP_READ, 256, 1),
        ];
        let all = (0..4).map(|tag| Arrival::Tag(tag, 0)).collect();
        let mut script = Script::new(descriptors, vec![all, gone()]);
        run(&mut script, &mut Later::new(Err(Errno::NoSpace))).unwrap();
        assert_eq!(script.committed, [(0, -28), (2, -95), (3, -5), (1, -28)]);
    }

    #[test]
    fn a_kernel_that_gives_a_tag_twice_ends_the_queue() {
        let descriptors = vec![descriptor(sys::OP_WRITE, 0, 8); 4];
        let twice = vec![Arrival::Tag(1, 0), Arrival::Tag(1, 0)];
        let mut script = Script::new(descriptors, vec![twice]);
        let error = run(&mut script, &mut Later::new(Ok(()))).unwrap_err();
        let expected = Violation::NotFetching { tag: 1 };
        assert!(matches!(error, QueueError::Violation(v) if v == expected), "{error}");
    }
}
