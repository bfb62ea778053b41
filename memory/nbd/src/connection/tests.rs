use super::*;
use codec::Settings;
use device::{Device, DeviceOptions};
use std::net::Shutdown;
use std::ops::Range;
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
    let (served, _) =
        serve(&ours, &mut queue, session, Sizes::new(false), &[], &given_up, &|| false);
    let mut page = vec![0; PAGE];
    queue.read_now(3, &mut page).unwrap();
    (served, page)
}

/// A queue of which some pages need a wait, and then fail.
struct Failing(device::DeviceQueue, Range<u64>);

impl Failing {
    fn fails(&self, request: &device::Request) -> bool {
        let end = request.page + u64::from(request.pages);
        request.page < self.1.end && end > self.1.start
    }
}

const BAD: u64 = 128;

impl Queue for Failing {
    fn submit(&mut self, tag: u64, request: device::Request) -> Option<Result<(), Errno>> {
        match request.op {
            Op::Read if self.fails(&request) => Some(Err(Errno::Io)),
            _ => self.0.submit(tag, request),
        }
    }

    fn read_at_once(&mut self, request: device::Request) -> Option<Result<(), Errno>> {
        if self.fails(&request) {
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
fn the_answers_of_all_requests_that_fail_at_once_fit() {
    let store = Store::create(256, Options::default()).unwrap();
    let options = DeviceOptions { workers: 0, depth: 4, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    for (structured, compact) in [(false, false), (true, false), (false, true), (true, true)] {
        let sizes = Sizes::new(compact);
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
        let spare = sizes.output - (RESERVE + DATA_CHUNK + SMALL);
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
        let mut queue = Failing(device.queue().unwrap(), BAD..u64::MAX);
        serve(&ours, &mut queue, session, sizes, &[], &|| false, &|| false).0.unwrap();
        drop(ours);
        assert_eq!(reader.join().unwrap().unwrap(), answers + fails * failed);
    }
}

/// The errors of the replies to `asked`, pairs of an offset and a length, which a client with
/// simple replies sends at once, and of the reply to a read of page 0 after them; `None` for a
/// reply that does not come. Page `bad` cannot be read.
fn errors(sizes: Sizes, bad: u64, asked: &[(usize, usize)]) -> (Vec<Option<u32>>, bool) {
    let store = Store::create(256, Options::default()).unwrap();
    let options = DeviceOptions { workers: 0, depth: 4, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let asked = asked.to_vec();
    let client = std::thread::spawn(move || {
        let mut found = vec![None; asked.len() + 1];
        let send = |theirs: &mut UnixStream, asked: &[(usize, usize)], cookie: usize| {
            for (at, &(offset, length)) in asked.iter().enumerate() {
                let mut request = [&0x2560_9513_u32.to_be_bytes()[..], &[0; 4]].concat();
                request.extend(((cookie + at) as u64).to_be_bytes());
                request.extend((offset as u64).to_be_bytes());
                request.extend(u32::try_from(length).unwrap().to_be_bytes());
                theirs.write_all(&request).unwrap();
            }
        };
        send(&mut theirs, &asked, 0);
        for count in 0..found.len() {
            if count == asked.len() {
                send(&mut theirs, &[(0, PAGE)], count);
            }
            let mut head = [0; 16];
            if theirs.read_exact(&mut head).is_err() {
                break;
            }
            let cookie = usize::from(head[15]);
            let error = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
            let length = asked.get(cookie).map_or(PAGE, |asked| asked.1);
            let there = error != 0 || theirs.read_exact(&mut vec![0; length]).is_ok();
            if !there {
                break;
            }
            found[cookie] = Some(error);
        }
        found
    });
    let session = Session { size: 1 << 20, structured: false, allocation: false };
    let mut queue = Failing(device.queue().unwrap(), bad..bad + 1);
    let (served, _) = serve(&ours, &mut queue, session, sizes, &[], &|| false, &|| false);
    drop(ours);
    let late = matches!(served, Err(ConnectionError::Late { .. }));
    assert!(late || served.is_ok(), "{served:?}");
    (client.join().unwrap(), late)
}

/// The kernel's client repeats a read whose connection ends, and waits for it for ever.
#[test]
fn an_unreadable_page_ends_no_connection_with_simple_replies() {
    const EIO: Option<u32> = Some(5);
    for sizes in [false, true].map(Sizes::new) {
        let (slice, page) = (sizes.slice, |at: usize| (at / PAGE) as u64);
        let length = slice * 2 + PAGE;
        for bad in [1, 2 * page(slice) - 1, 2 * page(slice)] {
            let one = errors(sizes, bad, &[(0, length)]);
            assert_eq!(one, (vec![EIO, Some(0)], false), "page {bad} of {length} bytes");
            let good = (slice * 2 + PAGE, slice + PAGE);
            let several = errors(sizes, bad, &[(0, length), good, (PAGE, length - PAGE), good]);
            let expected = vec![EIO, Some(0), EIO, Some(0), Some(0)];
            assert_eq!(several, (expected, false), "page {bad} of {length} bytes");
        }
    }
    // The longest read that the kernel's client sends, with any of its pages.
    for (sizes, page) in [false, true].map(Sizes::new).into_iter().flat_map(|sizes| {
        let pages = MAX_SIMPLE_READ / PAGE;
        [1, pages / 2, pages - 1].map(move |page| (sizes, page as u64))
    }) {
        let found = errors(sizes, page, &[(0, MAX_SIMPLE_READ), (0, MAX_SIMPLE_READ)]);
        assert_eq!(found, (vec![EIO, EIO, Some(0)], false), "page {page}");
    }
    // A read of more than all slices: its reply begins before its last slices are read.
    let sizes = Sizes::new(true);
    let pages = (sizes.slice / PAGE) as u64;
    let long = [(0, (READS + 2) * sizes.slice), (0, PAGE)];
    let found = errors(sizes, READS as u64 * pages - 1, &long);
    assert_eq!(found, (vec![EIO, Some(0), Some(0)], false));
    assert!(errors(sizes, READS as u64 * pages, &long[..1]).1);
}

/// One chunk exactly, or an error: also for a read that starts in the middle of a page.
#[test]
fn a_read_that_may_not_be_in_parts_is_not() {
    let store = Store::create(256, Options::default()).unwrap();
    let options = DeviceOptions { workers: 0, depth: 4, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let cases = |sizes: Sizes| {
        let slice = sizes.slice;
        [(0, slice, true), (512, slice, false), (512, slice - 512, true), (0, slice + 512, false)]
            .map(|case| (sizes, case))
    };
    for (sizes, (offset, length, one)) in [false, true].map(Sizes::new).into_iter().flat_map(cases)
    {
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
        serve(&ours, &mut queue, session, sizes, &[], &|| false, &|| false).0.unwrap();
        drop(ours);
        let answer = reader.join().unwrap().unwrap();
        let chunks = if one { DATA_CHUNK + length } else { error_chunk(7, Error::Overflow).len() };
        assert_eq!(answer.len(), chunks, "{length} bytes from {offset}");
    }
}

#[test]
fn requests_in_an_abandoned_connection_are_not_done() {
    for length in [PAGE, 16 * PAGE] {
        let (served, page) = after(length, Shutdown::Both);
        assert!(matches!(served, Err(ConnectionError::Cut)), "{length}: {served:?}");
        assert!(page == vec![0; PAGE], "{length}");
        // A client that only closed its sending side still wants the write.
        let (served, page) = after(length, Shutdown::Write);
        assert!(served.is_ok() && page[5] == 1, "{length}: {served:?}");
    }
}
