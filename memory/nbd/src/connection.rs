//! One connection after its handshake: requests in, replies out, on one thread.
//!
//! ```text
//!  socket ─► input (128 KiB) ─┬─ up to 32 KiB: done directly from input, or into output ─► socket
//!                             │    a read that needs a wait ─╮  a write that the device defers ─╮
//!                             └─ longer, or one of these two: in slices of 256 KiB, at most 8 in flight
//!                                  write: slice filled, submitted; reply after the last slice
//!                                  read: queued, submitted when a slice is free; sent when complete
//! ```
//!
//! Reads do not hold up writes: a read that waits for the backing device is a queue entry of a few
//! bytes until it gets one of the six slices for reads, and meanwhile the thread handles the
//! requests behind it. On a disk that is swapped to, writes free memory. (A write of a *part* of an
//! existing page does wait; the kernel writes whole pages.)
//!
//! Replies collect in `output` until there is nothing more to parse, so that many small requests of
//! a client need two system calls together. These buffers bound the memory of a connection: a
//! client that does not read its replies is not read from either.
//!
//! If the client is gone, its reads that still wait for the backing device will complete into the
//! connection's buffers. After a while the server takes over these reads with their buffers, and
//! the connection ends.
//!
//! The kernel's client supports only simple replies. With these, a read's data must be contiguous,
//! so a reply starts only when as many of the read's slices as fit at a time (1.5 MiB) are
//! complete; an error after that ends the connection.
//!
//! On a machine with little memory the slices have 48 KiB, and six of them 288
//! ([`MAX_SIMPLE_READ`]).

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use device::guard::IoPath;
use device::{Errno, Op, Queue, PAGE};
use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::buffers::{split, Input, Output, Parts};
use crate::slices::Slices;
use crate::wire::{
    data_chunk, empty_chunk, error_chunk, simple_reply, status_chunk, Broken, Command, Error,
    Parsed, Request, Session, DATA_CHUNK, REQUEST, STATE_HOLE, STATE_ZERO,
};

mod large;
mod limits;
mod queue;
mod requests;
mod small;
mod socket;
mod state;
#[cfg(test)]
mod tests;

pub(crate) use self::limits::Sizes;
pub use self::limits::{connection_memory, MAX_SIMPLE_READ};
use self::limits::{
    EXTENTS, INPUT, LARGES, LOOKED_AT, READS, RESERVE, SLICES, SMALL, WAITING, ZEROS,
};
use self::queue::{arrived, at_once, now};
use self::state::{Current, Large, Need, Use, Waiting};

/// Why a connection ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The client's bytes violate the protocol.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// The client disconnected in the middle of a request.
    #[error("connection cut in the middle of a request")]
    Cut,
    /// A page of a long read is damaged, and a simple reply that has begun cannot report an error.
    #[error("read at byte {offset} failed after its reply had begun")]
    Late {
        /// The offset of the byte in the export.
        offset: u64,
    },
    /// An error of the socket or of the queue.
    #[error("socket failed")]
    Io(#[from] io::Error),
}

/// How long a connection waits for reads after its client has gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Serves requests until the client disconnects; returns the reason if the connection ended early.
/// `input` has the bytes received after the handshake. `others` is called once all memory of the
/// connection is allocated, and before received requests are done: it may block, and returns
/// whether the client has given this connection up.
///
/// Reads that do not complete are handed over with their slices if `leave` has room: the queue
/// still uses the slices, and reports by its tags when it no longer does.
pub(crate) fn serve<Q: Queue>(
    stream: &UnixStream,
    queue: &mut Q,
    session: Session,
    sizes: Sizes,
    input: &[u8],
    others: &dyn Fn() -> bool,
    leave: &dyn Fn() -> bool,
) -> (Result<(), ConnectionError>, Option<Slices>) {
    let mut connection = Connection {
        stream,
        queue,
        session,
        input: Input { bytes: vec![0; INPUT].into_boxed_slice(), start: 0, end: input.len() },
        output: Output { bytes: vec![0; sizes.output].into_boxed_slice(), len: 0 },
        slices: Slices::new(SLICES, sizes.slice + 2 * PAGE),
        slice: sizes.slice,
        uses: [None; SLICES],
        larges: [None; LARGES],
        waiting: VecDeque::with_capacity(WAITING),
        outgoing: VecDeque::with_capacity(SLICES),
        within: None,
        edge: vec![0; SMALL + 2 * PAGE].into_boxed_slice(),
        current: None,
        deserted: false,
        others,
    };
    connection.input.bytes[..input.len()].copy_from_slice(input);
    let _path = IoPath::enter();
    let _ = others();
    let result = connection.run();
    // The device owns slices while their requests are in flight. Writes complete soon, and this
    // thread has to wait for them: the client may send them again on another connection.
    let begun = Instant::now();
    while connection.queue.in_flight() > 0 {
        if begun.elapsed() >= PATIENCE && !connection.is_writing() && leave() {
            return (result, Some(connection.slices));
        }
        connection.doze();
        connection.reap();
    }
    (result, None)
}

struct Connection<'a, Q> {
    stream: &'a UnixStream,
    queue: &'a mut Q,
    session: Session,
    input: Input,
    output: Output,
    slices: Slices,
    /// Bytes of a slice that are a request's: a buffer of `slices` has two pages more.
    slice: usize,
    uses: [Option<Use>; SLICES],
    larges: [Option<Large>; LARGES],
    /// Reads with slices yet to be submitted, in turn.
    waiting: VecDeque<Waiting>,
    /// Slices of reads that are not yet sent; those of one read in order.
    outgoing: VecDeque<usize>,
    /// The large request whose simple reply is partly sent: no other reply may be sent.
    within: Option<usize>,
    /// Pages of which a client reads a part.
    edge: Box<[u8]>,
    current: Option<Current>,
    /// Whether the client reads no more replies.
    deserted: bool,
    /// Waits for requests of other connections that must complete before received requests are
    /// done.
    others: &'a dyn Fn() -> bool,
}

impl<Q: Queue> Connection<'_, Q> {
    fn run(&mut self) -> Result<(), ConnectionError> {
        loop {
            let need = self.parse()?;
            let advanced = self.advance()?;
            match need {
                Need::End => return self.finish(),
                // There may be room now.
                _ if advanced => {}
                Need::Room if self.queue.in_flight() > 0 => {
                    self.flush()?;
                    self.sleep(false)?;
                }
                Need::Room => self.flush()?,
                Need::Input => {
                    self.flush()?;
                    let readable = self.queue.in_flight() == 0 || self.sleep(true)?;
                    if readable && !self.receive()? {
                        return self.left();
                    }
                }
            }
        }
    }

    /// Returns when all requests in flight are answered, or the client reads no more replies.
    fn finish(&mut self) -> Result<(), ConnectionError> {
        loop {
            let advanced = self.advance()?;
            let idle = self.queue.in_flight() == 0;
            if idle && self.outgoing.is_empty() && self.waiting.is_empty() {
                return self.flush();
            }
            if !advanced && !idle {
                match self.sleep(false) {
                    Err(ConnectionError::Cut) => return Ok(()),
                    other => other?,
                };
            }
        }
    }

    /// Records completions, sends replies and submits waiting reads; returns whether it did
    /// anything.
    fn advance(&mut self) -> Result<bool, ConnectionError> {
        let reaped = self.reap();
        let sent = self.send_slices()?;
        Ok(self.give_out() | reaped | sent)
    }

    /// Handles that the client has closed its sending side.
    fn left(&mut self) -> Result<(), ConnectionError> {
        if self.current.is_some() || self.input.len() > 0 {
            return Err(ConnectionError::Cut);
        }
        // The client may still read the replies. If it does not, that is no error.
        match self.finish() {
            Err(ConnectionError::Io(_)) => Ok(()),
            other => other,
        }
    }

    /// Handles received requests until something is missing.
    fn parse(&mut self) -> Result<Need, ConnectionError> {
        loop {
            let need = match self.current {
                Some(Current::Skip { left }) => self.skip(left),
                Some(Current::Write { large, offset, left, slice }) => {
                    self.take_in(large, offset, left, slice)
                }
                None => self.request()?,
            };
            if let Some(need) = need {
                return Ok(need);
            }
        }
    }

    /// Whether the device is writing from slices.
    fn is_writing(&self) -> bool {
        self.uses.iter().enumerate().any(|(slice, used)| {
            let write = used.and_then(|used| self.larges[used.large]).is_some_and(|of| of.write);
            write && self.slices.is_lent(slice)
        })
    }
}
