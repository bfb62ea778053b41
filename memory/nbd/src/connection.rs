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
//! If the client is gone, its reads that still wait for the backing device will complete into our
//! buffers. After a while the server takes them over with their buffers, and the connection ends.
//!
//! The kernel's client supports only simple replies. With these, a read's data must be contiguous,
//! so a reply starts only when as many of the read's slices as fit at a time (1.5 MiB) are
//! complete; an error after that ends the connection.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use device::guard::IoPath;
use device::{Errno, Op, Queue, PAGE};
use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::buffers::{split, Input, Output, Parts};
mod large;
mod small;

use crate::slices::{borrowed, Slices};
use crate::wire::{
    data_chunk, empty_chunk, error_chunk, simple_reply, status_chunk, Broken, Command, Error,
    Parsed, Request, Session, CHUNK, DATA_CHUNK, REQUEST, STATE_HOLE, STATE_ZERO,
};

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
        /// The byte of the export.
        offset: u64,
    },
    /// An error of the socket or of the queue.
    #[error("socket failed")]
    Io(#[from] io::Error),
}

/// Bytes of a slice of a large request.
const SLICE: usize = 256 << 10;
/// Slices in flight at a time.
const SLICES: usize = 8;
/// Slices for reads. The others are for writes, which need only workers to complete and must never
/// wait for reads.
const READS: usize = SLICES - 2;
/// Reads that may wait for a slice. The kernel's client has 128 requests in flight on a connection.
const WAITING: usize = 512;
/// Large requests at a time: those with slices in flight, and one of each kind between two slices.
const LARGES: usize = SLICES + 2;
/// Requests up to this length need no slice.
const SMALL: usize = 32 << 10;
const INPUT: usize = 128 << 10;
const OUTPUT: usize = 256 << 10;
/// Space in `output` reserved for reply headers of large requests in flight and of waiting reads,
/// all of which may fail at once.
const RESERVE: usize = (2 * SLICES + WAITING) * DATA_CHUNK;
/// Extents in one reply of block status.
const EXTENTS: usize = 512;
/// Pages examined for one reply of block status.
const LOOKED_AT: u64 = 1 << 18;
/// The tag of a request that the thread waits for.
const NOW: u64 = u64::MAX;

static ZEROS: [u8; PAGE] = [0; PAGE];

/// A request done in slices.
#[derive(Clone, Copy, Debug)]
struct Large {
    cookie: u64,
    write: bool,
    /// Slices in flight.
    slices: usize,
    /// The last slice is in flight or done.
    complete: bool,
    error: Option<Error>,
}

/// A read that waits for slices.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    cookie: u64,
    offset: u64,
    left: usize,
    /// Its place in `larges`, once a slice of it was submitted.
    large: Option<usize>,
}

/// The use of a slice.
#[derive(Clone, Copy, Debug)]
struct Use {
    large: usize,
    /// The byte of the export.
    offset: u64,
    /// The bytes in use, from `start`.
    start: usize,
    len: usize,
    first: bool,
    last: bool,
    /// The result, when the slice is complete.
    over: Option<Result<(), Error>>,
}

/// A request whose bytes are being received.
#[derive(Clone, Copy, Debug)]
enum Current {
    Write { large: usize, offset: u64, left: usize, slice: Option<(usize, usize)> },
    Skip { left: usize },
}

/// The parser's next requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// More bytes.
    Input,
    /// A free slice, or space for replies.
    Room,
    /// Nothing: the client has disconnected.
    End,
}

/// Memory of a connection in bytes, without its queue.
pub const CONNECTION_MEMORY: usize =
    INPUT + OUTPUT + SLICES * (SLICE + 2 * PAGE) + SMALL + 2 * PAGE + (64 << 10);

/// How long a connection waits for reads after its client has gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Serves requests until the client disconnects; returns the reason if the connection ended early.
/// `input` has the bytes received after the handshake. `others` is called before received requests
/// are done: it may block, and returns whether the client has given this connection up.
///
/// Reads that do not complete are handed over with their slices if `leave` has room: the queue
/// still uses the slices, and reports by its tags when it no longer does.
pub(crate) fn serve<Q: Queue>(
    stream: &UnixStream,
    queue: &mut Q,
    session: Session,
    input: &[u8],
    others: &dyn Fn() -> bool,
    leave: &dyn Fn() -> bool,
) -> (Result<(), ConnectionError>, Option<Slices>) {
    let mut connection = Connection {
        stream,
        queue,
        session,
        input: Input { bytes: vec![0; INPUT].into_boxed_slice(), start: 0, end: input.len() },
        output: Output { bytes: vec![0; OUTPUT].into_boxed_slice(), len: 0 },
        slices: Slices::new(SLICES, SLICE + 2 * PAGE),
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
    // The device owns slices while their requests are in flight. Writes complete soon, and have to
    // be waited for: the client may send them again on another connection.
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
    /// The client reads no more replies.
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

    /// The client has closed its sending side.
    fn left(&mut self) -> Result<(), ConnectionError> {
        if self.current.is_some() || self.input.len() > 0 {
            return Err(ConnectionError::Cut);
        }
        // It may still read the replies; if it does not, that is no error.
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

    fn request(&mut self) -> Result<Option<Need>, ConnectionError> {
        let Some(bytes) = self.input.front().first_chunk::<REQUEST>() else {
            return Ok(Some(Need::Input));
        };
        // There must be room for the reply to a small request.
        if self.output.room() < RESERVE + DATA_CHUNK + SMALL {
            return Ok(Some(Need::Room));
        }
        let request = match self.session.parse(bytes) {
            Parsed::Do(request) => request,
            Parsed::Refuse { cookie, error, skip, structured } => {
                self.input.take(REQUEST);
                self.fail(cookie, error, structured);
                self.current = Some(Current::Skip { left: skip as usize });
                return Ok(None);
            }
            Parsed::Disconnect => return Ok(Some(Need::End)),
            Parsed::Broken(why) => return Err(why.into()),
        };
        let Request { command, cookie, offset, length } = request;
        if self.deserted && matches!(command, Command::Write | Command::Trim | Command::Zero { .. })
        {
            return Err(ConnectionError::Cut);
        }
        let len = length as usize;
        let write = command == Command::Write;
        if matches!(command, Command::Read { .. }) {
            if self.waiting.len() == WAITING {
                return Ok(Some(Need::Room));
            }
            self.input.take(REQUEST);
            // A slice ends at a page boundary.
            let one = split(offset).1 + len <= SLICE;
            if command == (Command::Read { whole: true }) && !one {
                self.fail(cookie, Error::Overflow, true);
            } else if len > SMALL || !self.read_small(cookie, offset, len) {
                self.waiting.push_back(Waiting { cookie, offset, left: len, large: None });
                self.give_out();
            }
            return Ok(None);
        }
        // If the thread waited here, this write and each after it would take the device's full
        // latency.
        if write && (len > SMALL || len > 0 && self.queue.defers_writes()) {
            let large = self.enter(cookie, true);
            self.input.take(REQUEST);
            self.current = Some(Current::Write { large, offset, left: len, slice: None });
            return Ok(None);
        }
        if write && self.input.len() < REQUEST + len {
            return Ok(Some(Need::Input));
        }
        self.input.take(REQUEST);
        let done = match command {
            Command::Read { .. } => unreachable!("it was done above"),
            Command::Status { one } => {
                self.status(cookie, offset, u64::from(length), one);
                return Ok(None);
            }
            Command::Flush => Ok(()),
            Command::Write => {
                let done = self.write_small(offset, len);
                self.input.take(len);
                done
            }
            Command::Trim => self.trim(offset, u64::from(length)),
            Command::Zero { keep } => self.zero(offset, u64::from(length), keep),
        };
        self.output.put(&simple_reply(cookie, done.err().map(Error::from)));
        Ok(None)
    }

    fn fail(&mut self, cookie: u64, error: Error, structured: bool) {
        if structured && self.session.structured {
            self.output.put(&error_chunk(cookie, error));
        } else {
            self.output.put(&simple_reply(cookie, Some(error)));
        }
    }

    // Socket I/O.

    fn flush(&mut self) -> Result<(), ConnectionError> {
        if self.within.is_some() || self.output.len == 0 {
            return Ok(());
        }
        self.send(None)
    }

    /// Sends `output`, if allowed now, and then the bytes of a slice.
    fn send(&mut self, slice: Option<(usize, Use)>) -> Result<(), ConnectionError> {
        let output =
            if self.within.is_some() { &[][..] } else { &self.output.bytes[..self.output.len] };
        let data = slice.map_or(&[][..], |(slice, used)| {
            &self.slices.bytes(slice)[used.start..used.start + used.len]
        });
        let mut parts = [IoSlice::new(output), IoSlice::new(data)];
        let mut parts = &mut parts[..];
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            match (&mut &*self.stream).write_vectored(parts) {
                Ok(0) => return Err(io::Error::from(ErrorKind::WriteZero).into()),
                Ok(sent) => IoSlice::advance_slices(&mut parts, sent),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        if self.within.is_none() {
            self.output.len = 0;
        }
        Ok(())
    }

    /// Receives available bytes; `false` at the end of the stream.
    fn receive(&mut self) -> Result<bool, ConnectionError> {
        let got = self.read()?;
        // A client that has given this connection up may have sent the same writes again on another
        // one, and later writes after them; the bytes that are still here must not undo those. No
        // reply has been sent for them.
        if (self.others)() {
            self.deserted = true;
            if matches!(self.current, Some(Current::Write { .. })) {
                return Err(ConnectionError::Cut);
            }
        }
        Ok(got)
    }

    fn read(&mut self) -> Result<bool, ConnectionError> {
        let stream = &mut &*self.stream;
        // Directly to its place, if that is known.
        if let Some(Current::Write { large, offset, left, slice: Some((slice, filled)) }) =
            self.current
        {
            let size = left.min(SLICE - split(offset).1);
            let got = read(stream, &mut self.slices.bytes_mut(slice)[filled..size])?;
            let slice = Some((slice, filled + got));
            self.current = Some(Current::Write { large, offset, left, slice });
            return Ok(got > 0);
        }
        let got = read(stream, self.input.back())?;
        self.input.end += got;
        Ok(got > 0)
    }

    /// Sleeps until a request completes or, with `input`, the socket is readable; returns whether
    /// it is. Without `input`, a client that is gone is an error.
    fn sleep(&mut self, input: bool) -> Result<bool, ConnectionError> {
        if !self.queue.arm() {
            return Ok(false);
        }
        let queue = PollFd::from_borrowed_fd(self.queue.fd(), PollFlags::IN);
        // Poll always reports a full hang-up.
        let wanted = if input { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = [queue, PollFd::new(self.stream, wanted)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if !input && fds[1].revents().contains(PollFlags::HUP) {
            return Err(ConnectionError::Cut);
        }
        Ok(input && !fds[1].revents().is_empty())
    }

    /// Sleeps until a request completes, or briefly.
    fn doze(&mut self) {
        if self.queue.arm() {
            let moment = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            // The caller looks again, whatever poll returns.
            let _ = poll(&mut [PollFd::new(&self.queue.fd(), PollFlags::IN)], Some(&moment));
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

/// Records the result of a slice's request.
fn arrived(
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
fn at_once<Q: Queue>(
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
fn now<Q: Queue>(
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

fn read(stream: &mut &UnixStream, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(into) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

const _: () = assert!(INPUT >= 2 * (REQUEST + SMALL) && INPUT > 2 * crate::handshake::INPUT);
const _: () = assert!(OUTPUT >= RESERVE + DATA_CHUNK + SMALL + CHUNK + 8 * EXTENTS);

#[cfg(test)]
mod tests {
    use super::*;
    use codec::Settings;
    use device::{Device, DeviceOptions};
    use std::net::Shutdown;
    use store::{Options, Store};

    /// The contents of page 3 after a client has sent a write of it, of `length` bytes, and shut
    /// its socket down as in `way`, all before the server looked.
    fn after(length: usize, way: Shutdown) -> (Result<(), ConnectionError>, Vec<u8>) {
        let store = Store::create(256, Options::default()).unwrap();
        let options = DeviceOptions {
            settings: Settings::default(),
            workers: 0,
            depth: 4,
            ..DeviceOptions::default()
        };
        let device = Device::new(&store, &options).unwrap();
        let mut queue = device.queue().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
        request.extend([0, 0, 0, 1]);
        request.extend(7_u64.to_be_bytes());
        request.extend((3 * PAGE as u64).to_be_bytes());
        request.extend(u32::try_from(length).unwrap().to_be_bytes());
        request.extend((0..length).map(|at| (at / 5).to_le_bytes()[0]));
        theirs.write_all(&request).unwrap();
        theirs.shutdown(way).unwrap();
        let session = Session { size: 1 << 20, structured: false, allocation: false };
        let given_up = || crate::server::hung_up(&ours, Duration::ZERO);
        let (served, _) = serve(&ours, &mut queue, session, &[], &given_up, &|| false);
        let mut page = vec![0; PAGE];
        queue.read_now(3, &mut page).unwrap();
        (served, page)
    }

    /// A queue whose pages from [`BAD`] on need a wait, and then fail.
    struct Failing(device::DeviceQueue);

    const BAD: u64 = 128;

    impl Queue for Failing {
        fn submit(&mut self, tag: u64, request: device::Request) -> Option<Result<(), Errno>> {
            match request.op {
                Op::Read if request.page >= BAD => Some(Err(Errno::Io)),
                _ => self.0.submit(tag, request),
            }
        }

        fn read_at_once(&mut self, request: device::Request) -> Option<Result<(), Errno>> {
            if request.page >= BAD {
                return None;
            }
            self.0.read_at_once(request)
        }

        fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
            self.0.reap(each)
        }

        fn in_flight(&self) -> usize {
            self.0.in_flight()
        }

        fn arm(&mut self) -> bool {
            self.0.arm()
        }

        fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
            self.0.fd()
        }

        fn patch(&mut self, page: u64, at: usize, bytes: &[u8]) -> Result<(), Errno> {
            self.0.patch(page, at, bytes)
        }

        fn extent(&mut self, page: u64, most: u64) -> Result<device::Extent, Errno> {
            self.0.extent(page, most)
        }
    }

    /// All reads that may wait fail, while the output has as many immediate replies as it can hold.
    #[test]
    fn there_is_room_for_the_answers_of_all_that_fail_at_once() {
        let store = Store::create(256, Options::default()).unwrap();
        let options = DeviceOptions { workers: 0, depth: 4, ..DeviceOptions::default() };
        let device = Device::new(&store, &options).unwrap();
        for structured in [false, true] {
            let head = if structured { DATA_CHUNK } else { simple_reply(0, None).len() };
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let mut asked = Vec::new();
            let mut ask = |offset: u64, length: usize| {
                asked.extend([&0x2560_9513_u32.to_be_bytes()[..], &[0; 4], &[0; 8]].concat());
                asked.extend(offset.to_be_bytes());
                asked.extend(u32::try_from(length).unwrap().to_be_bytes());
            };
            let fails = WAITING + READS - 1;
            (0..fails).for_each(|_| ask(BAD * PAGE as u64, PAGE));
            // The last one has exactly the space that it needs.
            let mut answers = 0;
            let spare = OUTPUT - (RESERVE + DATA_CHUNK + SMALL);
            let mut left = spare;
            while left > head {
                let length = (left - head).min(SMALL);
                ask(0, length);
                answers += head + length;
                left -= head + length;
            }
            ask(0, SMALL);
            answers += head + SMALL;
            let failed = if structured { error_chunk(0, Error::Io).len() } else { head };
            theirs.write_all(&asked).unwrap();
            theirs.shutdown(Shutdown::Write).unwrap();
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                theirs.read_to_end(&mut all).map(|_| all.len())
            });
            let session = Session { size: 1 << 20, structured, allocation: false };
            let mut queue = Failing(device.queue().unwrap());
            serve(&ours, &mut queue, session, &[], &|| false, &|| false).0.unwrap();
            drop(ours);
            assert_eq!(reader.join().unwrap().unwrap(), answers + fails * failed);
        }
    }

    /// One chunk exactly, or an error: also for a read that starts in the middle of a page.
    #[test]
    fn a_read_that_may_not_be_in_parts_is_not() {
        let store = Store::create(256, Options::default()).unwrap();
        let options = DeviceOptions { workers: 0, depth: 4, ..DeviceOptions::default() };
        let device = Device::new(&store, &options).unwrap();
        for (offset, length, one) in [
            (0, SLICE, true),
            (512, SLICE, false),
            (512, SLICE - 512, true),
            (0, SLICE + 512, false),
        ] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let mut asked = 0x2560_9513_u32.to_be_bytes().to_vec();
            // A read with the flag DF.
            asked.extend([0, 4, 0, 0]);
            asked.extend(7_u64.to_be_bytes());
            asked.extend(u64::try_from(offset).unwrap().to_be_bytes());
            asked.extend(u32::try_from(length).unwrap().to_be_bytes());
            theirs.write_all(&asked).unwrap();
            theirs.shutdown(Shutdown::Write).unwrap();
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                theirs.read_to_end(&mut all).map(|_| all)
            });
            let session = Session { size: 1 << 20, structured: true, allocation: false };
            let mut queue = device.queue().unwrap();
            serve(&ours, &mut queue, session, &[], &|| false, &|| false).0.unwrap();
            drop(ours);
            let answer = reader.join().unwrap().unwrap();
            let chunks =
                if one { DATA_CHUNK + length } else { error_chunk(7, Error::Overflow).len() };
            assert_eq!(answer.len(), chunks, "{length} bytes from {offset}");
        }
    }

    #[test]
    fn what_lies_in_a_connection_that_was_given_up_is_not_done() {
        for length in [PAGE, 16 * PAGE] {
            let (served, page) = after(length, Shutdown::Both);
            assert!(matches!(served, Err(ConnectionError::Cut)), "{length}: {served:?}");
            assert!(page == vec![0; PAGE], "{length}");
            // A client that only closed its sending side still wants the write.
            let (served, page) = after(length, Shutdown::Write);
            assert!(served.is_ok() && page[5] == 1, "{length}: {served:?}");
        }
    }
}
