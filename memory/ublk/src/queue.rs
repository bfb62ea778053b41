//! A queue's thread: passes requests from the kernel to the backend and completions back, in
//! batches.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use device::{Buffer, Op, Queue, Request};

use crate::buffers::Buffers;
use crate::ring::{Arrival, Ring};
use crate::tags::{Asked, Kind, Step, Tags, Violation};

/// Why a queue's thread ended before the disk was stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// An error of the kernel's ring or of the backend.
    #[error("the queue cannot go on")]
    Io(#[from] io::Error),
    /// The kernel or the backend violated the protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
}

/// Fetches the first request of each tag: when this returns, the driver has all fetches.
///
/// # Errors
///
/// The kernel's error.
pub(crate) fn fetch<R: Ring>(ring: &mut R, tags: &mut Tags) -> io::Result<()> {
    for tag in tags.fetch_all() {
        ring.fetch(tag)?;
    }
    ring.submit()
}

/// Serves one queue until the disk is stopped. Does not allocate once requests flow. Sets `ended`
/// when the driver ends a command.
///
/// # Errors
///
/// The kernel accepts no more commands, or violates the protocol.
pub(crate) fn serve<R: Ring, Q: Queue>(
    ring: &mut R,
    backend: &mut Q,
    tags: &mut Tags,
    buffers: &Buffers,
    queue: u16,
    arrivals: &mut Vec<Arrival>,
    ended: &AtomicBool,
) -> Result<(), QueueError> {
    let mut broken = None;
    while !tags.ended() {
        // Completions that are already there do not wake the thread; then `arm` returns false.
        while !backend.arm() {
            reap(ring, backend, tags, &mut broken)?;
        }
        arrivals.clear();
        ring.wait(arrivals)?;
        for arrival in arrivals.drain(..) {
            let Arrival::Tag(tag, result) = arrival else { continue };
            match tags.arrived(tag, result, |tag| ring.descriptor(tag))? {
                Step::Gone => ended.store(true, Ordering::Release),
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

/// The request in the backend's terms.
fn request(asked: &Asked, buffers: &Buffers, queue: u16, tag: u16) -> Request {
    let op = match asked.kind {
        Kind::Read => Op::Read,
        Kind::Write => Op::Write,
        Kind::Flush => Op::Flush,
        Kind::Discard => Op::Discard,
        // A page of zeros takes no memory, with or without NOUNMAP.
        Kind::WriteZeroes => Op::WriteZeroes { keep: false },
    };
    let buffer = match asked.bytes() {
        0 => Buffer::NONE,
        len => buffers.request(queue, tag, len as usize),
    };
    Request { op, page: asked.page, pages: asked.pages, buffer }
}

#[cfg(test)]
mod tests;
