//! Requests to the queue, and their results.

use device::{Errno, Op, Queue};
use rustix::event::{poll, PollFd, PollFlags};

use super::limits::{NOW, SLICES};
use super::state::Use;
use crate::slices::{borrowed, Slices};
use crate::wire::Error;

/// Records the result of a slice's request.
pub(super) fn arrived(
    slices: &mut Slices,
    uses: &mut [Option<Use>; SLICES],
    tag: u64,
    result: Result<(), Errno>,
) {
    let slice = usize::try_from(tag).expect("the number of a slice");
    slices.give_back(slice);
    let used = uses[slice].as_mut().expect("it was submitted");
    used.over = Some(result.map_err(Error::from));
}

/// Reads pages if all of them are in memory.
pub(super) fn at_once<Q: Queue>(
    queue: &mut Q,
    page: u64,
    pages: usize,
    bytes: &mut [u8],
) -> Option<Result<(), Errno>> {
    borrowed(bytes, |buffer| {
        let pages = u32::try_from(pages).expect("a small read");
        queue.read_at_once(device::Request { op: Op::Read, page, pages, buffer })
    })
}

/// Does a request that never waits for a disk, and waits for it; records other completions
/// meanwhile.
pub(super) fn now<Q: Queue>(
    queue: &mut Q,
    uses: &mut [Option<Use>; SLICES],
    slices: &mut Slices,
    op: Op,
    page: u64,
    pages: usize,
    bytes: &mut [u8],
) -> Result<(), Errno> {
    borrowed(bytes, |buffer| {
        let pages = u32::try_from(pages).expect("below 2^32 pages");
        let mut done = queue.submit(NOW, device::Request { op, page, pages, buffer });
        loop {
            if let Some(done) = done {
                return done;
            }
            if queue.arm() {
                // A spurious wake-up is harmless: the loop looks again.
                let _ = poll(&mut [PollFd::new(&queue.fd(), PollFlags::IN)], None);
            }
            queue.reap(&mut |tag, result| {
                if tag == NOW {
                    done = Some(result);
                } else {
                    arrived(slices, uses, tag, result);
                }
            });
        }
    })
}
