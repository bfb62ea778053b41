//! One connection after its handshake: requests in, replies out, on one thread.
//!
//! ```text
//!  socket ─► input (128 KiB) ─┬─ up to 32 KiB: done straight from input, or into output ─► output ─► socket
//!                             │    a read of what is not in memory ─╮ a write that the device defers
//!                             └─ longer: in slices of 256 KiB, 8 at most on the way
//!                                  write: slice filled, submitted, answered with the last one
//!                                  read: noted, and submitted when a slice is free; sent when it is over
//! ```
//!
//! Nothing that is read holds up what is written: a read that waits for the backing device is a
//! note of a few bytes until it gets one of the six slices that reads may have, and the thread goes
//! on with what comes after it. On a disk that is swapped to, memory is got back by writing. (What
//! does wait is a write of a *part* of a page that is there; the kernel writes whole pages.)
//!
//! Replies collect in `output` until there is nothing more to parse, so that a client with many
//! small requests on the way costs two system calls for many of them. Memory is bounded by these
//! buffers whatever a client does: one that does not read is not read from either.
//!
//! A client that is gone is not served: reads that wait for the backing device then are nobody's,
//! but fill buffers of ours when they are over. After a while they are left to the server with
//! these, and the connection ends.
//!
//! The kernel's own client knows simple replies only. There, the slices of one read follow each
//! other without anything between, so that the first one is sent when those that fit at a time are
//! all over, 1.5 MiB; a failure after that ends the connection.

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

/// Why a connection ended that should not have.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// What came is not the protocol.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// The client went away in the middle of a request.
    #[error("connection cut in the middle of a request")]
    Cut,
    /// A page of a long read is damaged, and simple replies cannot say so in the middle.
    #[error("read at byte {offset} failed after its reply had begun")]
    Late {
        /// Where.
        offset: u64,
    },
    /// The socket's or the queue's.
    #[error("socket failed")]
    Io(#[from] io::Error),
}

/// Bytes of one slice of a large request.
const SLICE: usize = 256 << 10;
/// Slices on the way at a time.
const SLICES: usize = 8;
/// Those that reads may have: what is written needs no more than workers to be over, and must
/// always get one.
const READS: usize = SLICES - 2;
/// Reads that may wait for a slice. The kernel's client has 128 requests on the way on a
/// connection.
const WAITING: usize = 512;
/// Requests that are there at a time: with slices on the way, and one of each kind between two
/// slices.
const LARGES: usize = SLICES + 2;
/// Requests up to here go without a slice.
const SMALL: usize = 32 << 10;
const INPUT: usize = 128 << 10;
const OUTPUT: usize = 256 << 10;
/// Room in `output` kept for the headers of replies to large requests on the way, and to reads that
/// wait, all of which may fail at once.
const RESERVE: usize = (2 * SLICES + WAITING) * DATA_CHUNK;
/// Extents in one reply of block status.
const EXTENTS: usize = 512;
/// Pages looked at for one reply of block status.
const LOOKED_AT: u64 = 1 << 18;
/// The tag of a request that is waited for on the spot.
const NOW: u64 = u64::MAX;

static ZEROS: [u8; PAGE] = [0; PAGE];

/// A request that goes in slices.
#[derive(Clone, Copy, Debug)]
struct Large {
    cookie: u64,
    write: bool,
    /// Slices on the way.
    slices: usize,
    /// The last one is on the way, or done.
    complete: bool,
    error: Option<Error>,
}

/// A read that waits for slices.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    cookie: u64,
    offset: u64,
    left: usize,
    /// Where it is noted, if some of it has been submitted.
    large: Option<usize>,
}

/// What a slice is used for.
#[derive(Clone, Copy, Debug)]
struct Use {
    large: usize,
    /// Byte of the export.
    offset: u64,
    /// Bytes of it that matter, from `start` on.
    start: usize,
    len: usize,
    first: bool,
    last: bool,
    /// What became of it, once it is over.
    over: Option<Result<(), Error>>,
}

/// A request that is being taken in slice by slice.
#[derive(Clone, Copy, Debug)]
enum Current {
    Write { large: usize, offset: u64, left: usize, slice: Option<(usize, usize)> },
    Skip { left: usize },
}

/// What the parser needs to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// More bytes.
    Input,
    /// A slice, or room for replies.
    Room,
    /// Nothing: the client is done.
    End,
}

/// Memory that a connection takes beside its queue, in bytes.
pub const CONNECTION_MEMORY: usize =
    INPUT + OUTPUT + SLICES * (SLICE + 2 * PAGE) + SMALL + 2 * PAGE + (64 << 10);

/// How long reads are waited for whose client is gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// Serves requests until the client leaves, and gives why the connection had to end if that was not
/// it. `input` is what came after the handshake; `others` is called before what has been read is
/// done, may make it wait, and says whether the client has given this connection up.
///
/// Reads that do not get over are left with the slices that they fill, if `leave` has room for
/// that: the queue has them still, and tells by its tags which ones it is done with.
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
    // Slices are the device's as long as requests are on the way. What is written is over soon, and
    // has to be: it may be sent again by another connection.
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
    /// Reads that slices are still to be submitted of, in turn.
    waiting: VecDeque<Waiting>,
    /// Slices of reads that are not yet sent; those of one read in order.
    outgoing: VecDeque<usize>,
    /// This one's simple reply is half sent: nothing else may be.
    within: Option<usize>,
    /// Pages of which a client wants a part.
    edge: Box<[u8]>,
    current: Option<Current>,
    /// The client takes no answers any more.
    deserted: bool,
    /// Waits for what must be over before anything that has been read is done.
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

    /// All that is on the way is answered, or there is nobody to be answered.
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

    /// Notes what is over, sends what can be sent and submits what has waited; whether there was
    /// any of it.
    fn advance(&mut self) -> Result<bool, ConnectionError> {
        let reaped = self.reap();
        let sent = self.send_slices()?;
        Ok(self.give_out() | reaped | sent)
    }

    /// The client has closed its end.
    fn left(&mut self) -> Result<(), ConnectionError> {
        if self.current.is_some() || self.input.len() > 0 {
            return Err(ConnectionError::Cut);
        }
        // It may still want its answers; if it does not, that is its right.
        match self.finish() {
            Err(ConnectionError::Io(_)) => Ok(()),
            other => other,
        }
    }

    /// Does what the input has, until something is missing.
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
        // The answer to a small request must fit.
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
            // A slice ends where a page does.
            let one = split(offset).1 + len <= SLICE;
            if command == (Command::Read { whole: true }) && !one {
                self.fail(cookie, Error::Overflow, true);
            } else if len > SMALL || !self.read_small(cookie, offset, len) {
                self.waiting.push_back(Waiting { cookie, offset, left: len, large: None });
                self.give_out();
            }
            return Ok(None);
        }
        // Waited for on the spot, a write would wait for all of a device's latency, and the next
        // one with it.
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

    // The socket.

    fn flush(&mut self) -> Result<(), ConnectionError> {
        if self.within.is_some() || self.output.len == 0 {
            return Ok(());
        }
        self.send(None)
    }

    /// Sends what is in `output`, if that may be, and then the bytes of a slice.
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

    /// Reads what there is; `false` at the end.
    fn receive(&mut self) -> Result<bool, ConnectionError> {
        let got = self.read()?;
        // A client that has given this connection up may have sent the same by another one, and
        // more after it: what still lies in this one must not undo that. Nobody was told that it is
        // done.
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
        // Straight to where it belongs, when it is known.
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

    /// Sleeps until a request is over or, with `input`, the socket has something; whether it has.
    /// Without, a client that is gone is an error.
    fn sleep(&mut self, input: bool) -> Result<bool, ConnectionError> {
        if !self.queue.arm() {
            return Ok(false);
        }
        let queue = PollFd::from_borrowed_fd(self.queue.fd(), PollFlags::IN);
        // That both ways are shut is always said.
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

    /// Sleeps until a request is over, or a while.
    fn doze(&mut self) {
        if self.queue.arm() {
            let moment = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            // Whatever it says, we look again.
            let _ = poll(&mut [PollFd::new(&self.queue.fd(), PollFlags::IN)], Some(&moment));
        }
    }

    /// Whether the device has slices to write from.
    fn is_writing(&self) -> bool {
        self.uses.iter().enumerate().any(|(slice, used)| {
            let write = used.and_then(|used| self.larges[used.large]).is_some_and(|of| of.write);
            write && self.slices.is_lent(slice)
        })
    }
}

/// A slice's request is over.
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

/// Does a request that no disk is waited for, and waits for it; what else arrives meanwhile is
/// noted.
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
                // Woken for nothing is no harm: we look again.
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

    /// What page 3 holds after a client has sent a write of it, in `length` bytes, and gone in its
    /// way, all of it before the server looked.
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

    /// A queue whose pages from [`BAD`] on have to be waited for, and fail as soon as that is
    /// tried.
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

    /// All that wait, as many as may, fail while the output is as full as it gets by what is
    /// answered on the spot.
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
            // The last one finds just the room that it needs to be done.
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

    /// Exactly one chunk, or refused: also where the same number of bytes begins within a page.
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
            // The flag DF, and a read.
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
            // One that only has nothing more to say wants it done.
            let (served, page) = after(length, Shutdown::Write);
            assert!(served.is_ok() && page[5] == 1, "{length}: {served:?}");
        }
    }
}
