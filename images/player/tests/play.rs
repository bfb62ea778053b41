//! A test destination that requests pages, checks every byte, and dies or violates the protocol.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use image::{HotPage, HotSet, Image, Options, RamBlock, State, Store, Writer};
use player::{Event, HotLimits, PlayError, PlayOptions, Played, Player};
use rustix::event::{poll, PollFd, PollFlags, Timespec};

#[path = "play/sharing.rs"]
mod sharing;

const PAGE: usize = 4096;
const OPTIONS: PlayOptions = PlayOptions { threads: 2, rate: None };
/// A background so slow that few pages arrive during a test that were not requested.
const HELD: PlayOptions = PlayOptions { threads: 2, rate: Some(1) };
const NONE: HotLimits = HotLimits { bytes: 0, time: Duration::ZERO };
const LONG: Duration = Duration::from_secs(300);

type Pages = HashMap<(String, u64), Vec<u8>>;

fn page(seed: u64) -> Vec<u8> {
    (0..512_u64).flat_map(|at| (at * at * (seed | 1)).to_le_bytes()).collect()
}

/// An image of two blocks with zero, same-filled and other pages, some of them with an older
/// version.
fn made(path: &Path) -> (Arc<Image>, Pages) {
    let options = Options { unit_bytes: 64 << 10, ..Options::default() };
    let mut writer = Writer::create(path, options).unwrap();
    let names = ["pc.ram", "pc.rom"];
    let block =
        |name: &str, pages: u64| RamBlock { name: name.into(), len: pages * 4096, host_page: 0 };
    writer.blocks(PAGE, &[block(names[0], 300), block(names[1], 70)]).unwrap();
    let mut pages = Pages::new();
    let mut put = |number: usize, at: u64, bytes: Vec<u8>| {
        writer.page(number, at, &bytes).unwrap();
        pages.insert((names[number].to_owned(), at), bytes);
    };
    for at in 0..300 {
        put(
            0,
            at,
            match at % 11 {
                0 => vec![0; PAGE],
                1 => vec![7; PAGE],
                _ => page(at),
            },
        );
    }
    (0..70).for_each(|at| put(1, at, page(5000 + at)));
    (0..300).step_by(7).for_each(|at| put(0, at, page(9000 + at)));
    writer.finish(&state()).unwrap().link().unwrap();
    (Arc::new(Image::open(path).unwrap()), pages)
}

fn state() -> State {
    State {
        configuration: b"QEVM\0\0\0\x03\x07\0\0\0\x02pc".to_vec(),
        ram_section: 2,
        ram_version: 4,
        devices: b"\x04\0\0\0\0\x05timerdevice state".to_vec(),
        facts: b"{}".to_vec(),
        ..State::default()
    }
}

/// Parses the source's stream as a QEMU destination does.
struct Destination {
    stream: UnixStream,
    /// Received pages. A page that arrives twice fails the test.
    got: Pages,
    block: String,
    running: bool,
    ended: bool,
    discarded: HashSet<String>,
}

impl Destination {
    fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(LONG)).unwrap();
        let (got, discarded) = Default::default();
        Self { stream, got, block: String::new(), running: false, ended: false, discarded }
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn name(&mut self) -> String {
        let [len] = self.take();
        String::from_utf8(self.bytes(usize::from(len))).unwrap()
    }

    fn say(&mut self, kind: u16, body: &[u8]) {
        let len = u16::try_from(body.len()).unwrap().to_be_bytes();
        let message = [&kind.to_be_bytes()[..], &len, body].concat();
        self.stream.write_all(&message).unwrap();
    }

    fn ask(&mut self, block: &str, page: u64) {
        let mut body = (page * 4096).to_be_bytes().to_vec();
        body.extend(4096_u32.to_be_bytes());
        body.push(u8::try_from(block.len()).unwrap());
        body.extend(block.as_bytes());
        self.say(3, &body);
    }

    /// Reads one element.
    fn element(&mut self) {
        match self.take::<1>()[0] {
            b'Q' => assert_eq!(self.bytes(7 + 7), b"EVM\0\0\0\x03\x07\0\0\0\x02pc"),
            1 => {
                assert_eq!(self.bytes(4 + 4 + 8), b"\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04");
                assert_eq!(u64::from_be_bytes(self.take()), (370 * 4096) | 4);
                for (name, pages) in [("pc.ram", 300_u64), ("pc.rom", 70)] {
                    assert_eq!(self.name(), name);
                    assert_eq!(u64::from_be_bytes(self.take()), pages * 4096);
                }
                assert_eq!(self.bytes(13), b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02");
            }
            2 => {
                assert_eq!(self.take(), [0, 0, 0, 2]);
                while self.record() {}
            }
            3 => {
                assert!(self.running, "the end before the answer to the last PING");
                assert_eq!(self.bytes(17), b"\0\0\0\x02\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02");
            }
            0 => self.ended = true,
            8 => self.command(),
            tag => panic!("an element with tag {tag}"),
        }
    }

    /// Reads until nothing comes for a while.
    fn read_on(&mut self) {
        let pause = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
        while poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&pause)).unwrap() > 0 {
            self.element();
        }
    }

    fn command(&mut self) {
        let [a, b, c, d] = self.take();
        let body = self.bytes(usize::from(u16::from_be_bytes([c, d])));
        match u16::from_be_bytes([a, b]) {
            1 => assert!(body.is_empty()),
            2 => self.say(2, &body),
            3 => assert_eq!(body, [0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 16, 0]),
            6 => {
                let name = String::from_utf8(body[2..2 + usize::from(body[1])].to_vec()).unwrap();
                self.discarded.insert(name);
            }
            7 => {
                assert_eq!(self.discarded.len(), 2, "LISTEN before every block is discarded");
                let package = self.bytes(u32::from_be_bytes(body.try_into().unwrap()) as usize);
                let expected =
                    b"\x08\0\x04\0\0\x04\0\0\0\0\x05timerdevice state\x08\0\x02\0\x04\0\0\0\x03\x08\0\x05\0\0";
                assert_eq!(package, expected);
                // Loading devices touch a zero, a same-filled and another page.
                for at in [0, 1, 2] {
                    self.ask("pc.ram", at + 11);
                }
                while self.got.len() < 3 {
                    self.element();
                }
                self.say(2, &3_u32.to_be_bytes());
                self.running = true;
            }
            other => panic!("command {other}"),
        }
    }

    fn record(&mut self) -> bool {
        let word = u64::from_be_bytes(self.take());
        let (flags, address) = (word & 0xfff, word & !0xfff);
        if flags == 0x10 {
            assert_eq!(self.bytes(5), b"\x7e\0\0\0\x02");
            return false;
        }
        if flags & 0x20 == 0 {
            self.block = self.name();
        }
        let bytes = match flags & !0x20 {
            2 => {
                assert_eq!(self.take(), [0]);
                vec![0; PAGE]
            }
            8 => self.bytes(PAGE),
            flags => panic!("a record with flags {flags:#x}"),
        };
        let place = (self.block.clone(), address / 4096);
        assert!(self.got.insert(place.clone(), bytes).is_none(), "page {place:?} came twice");
        true
    }

    /// Asserts that every received page is right, and that every missing page is zero.
    fn compare(&self, pages: &Pages) {
        for (place, bytes) in pages {
            match self.got.get(place) {
                Some(got) => assert!(got == bytes, "page {place:?}"),
                None => assert!(bytes.iter().all(|&byte| byte == 0), "page {place:?} is missing"),
            }
        }
    }
}

/// Runs a player, and `destination` at the other end of its socket.
fn run(
    image: &Arc<Image>,
    options: PlayOptions,
    again: bool,
    destination: impl FnOnce(&mut Destination) + Send + 'static,
) -> (Result<Played, PlayError>, Destination, Vec<Event>) {
    run_hot(image, options, again, &HotSet::default(), NONE, destination)
}

/// As [`run`], with pages that are sent before the guest runs.
fn run_hot(
    image: &Arc<Image>,
    options: PlayOptions,
    again: bool,
    set: &HotSet,
    limits: HotLimits,
    destination: impl FnOnce(&mut Destination) + Send + 'static,
) -> (Result<Played, PlayError>, Destination, Vec<Event>) {
    let (here, there) = UnixStream::pair().unwrap();
    let thread = thread::spawn(move || {
        let mut end = Destination::new(there);
        destination(&mut end);
        let _ = end.stream.shutdown(std::net::Shutdown::Both);
        end
    });
    let mut events = Vec::new();
    let mut on = |event| events.push(event);
    let played = Player::new(image, options).and_then(|mut player| {
        player.prepare(set, limits)?;
        match again {
            true => player.resume(here, &mut on),
            false => player.play(here, &mut on),
        }
    });
    (played, thread.join().unwrap(), events)
}

fn to_the_end(end: &mut Destination) {
    while !end.ended {
        end.element();
    }
    end.say(1, &0_u32.to_be_bytes());
}

#[test]
fn every_page_arrives_once_and_the_guest_runs_first() {
    let folder = tempfile::tempdir().unwrap();
    let (image, pages) = made(&folder.path().join("i"));
    let (played, end, events) = run(&image, OPTIONS, false, to_the_end);
    let played = played.unwrap();
    end.compare(&pages);
    assert_eq!(events, [Event::Running, Event::Loaded]);
    assert_eq!((played.requests, played.zeros), (3, 1));
    assert!(played.running <= played.loaded);
}

#[test]
fn requested_pages_come_once_while_the_rest_is_held_back() {
    let folder = tempfile::tempdir().unwrap();
    let (image, pages) = made(&folder.path().join("i"));
    let (played, end, _) = run(&image, HELD, false, |end| {
        while !end.running {
            end.element();
        }
        for (block, at) in [("pc.rom", 69), ("pc.ram", 299), ("pc.ram", 110), ("pc.ram", 111)] {
            end.ask(block, at);
            end.ask(block, at);
            while !end.got.contains_key(&(block.to_owned(), at)) {
                end.element();
            }
        }
    });
    // The destination closed its socket before it had everything.
    assert!(matches!(played, Err(PlayError::Closed)), "{played:?}");
    for (place, got) in &end.got {
        assert!(pages[place] == *got, "page {place:?}");
    }
    assert!(end.got.len() < 150, "{} pages came though nobody asked", end.got.len());
}

/// In a store, equal pages have one slot, and so one unit may have all pages of RAM: neither a
/// request nor the limited background sends more of them at a time than a unit has.
#[test]
fn a_unit_with_many_pages_is_held_back_and_comes_whole() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let mut writer = Writer::create_in(&store, "i", None, Options::default()).unwrap();
    let mut pages = Pages::new();
    let blocks = [("pc.ram", 300), ("pc.rom", 70)];
    let block = |(name, pages): (&str, u64)| RamBlock {
        name: name.into(),
        len: pages * 4096,
        host_page: 0,
    };
    writer.blocks(PAGE, &blocks.map(block)).unwrap();
    for (number, (name, count)) in blocks.into_iter().enumerate() {
        for at in 0..count {
            writer.page(number, at, &page(1)).unwrap();
            pages.insert((name.to_owned(), at), page(1));
        }
    }
    writer.finish(&state()).unwrap().link().unwrap();
    let image = Arc::new(Image::open(&folder.path().join("store/i")).unwrap());
    let unit = image.shape().unit_pages();
    assert_eq!((image.index().units.len(), unit), (1, 32));
    let (played, end, _) = run(&image, HELD, false, |end| {
        while !end.running {
            end.element();
        }
        for at in [299, 290] {
            end.ask("pc.ram", at);
            while !end.got.contains_key(&("pc.ram".to_owned(), at)) {
                end.element();
            }
            end.read_on();
        }
    });
    assert!(matches!(played, Err(PlayError::Closed)), "{played:?}");
    // Of five requests, and of the background.
    let most = 5 * (1 + unit) + unit;
    assert!(end.got.len() as u64 <= most, "{} pages came, {most} may", end.got.len());
    for rate in [None, Some(64 << 20)] {
        let (played, end, _) = run(&image, PlayOptions { rate, ..OPTIONS }, false, to_the_end);
        assert_eq!(played.unwrap().pages, 370);
        end.compare(&pages);
    }
}

/// Pages of all kinds, one of them twice in a block, in the order of requests.
fn hot_set() -> HotSet {
    let places = [(1, 69), (0, 11), (0, 12), (0, 299), (0, 22), (0, 110), (1, 0)];
    let page = |(at, (block, page))| HotPage { at, block, page };
    let mut set = HotSet::default();
    assert!(set.add(&(0..).zip(places).map(page).collect::<Vec<_>>()));
    set
}

#[test]
fn the_pages_of_a_hot_set_arrive_before_the_guest_runs_and_no_page_twice() {
    let folder = tempfile::tempdir().unwrap();
    let (image, pages) = made(&folder.path().join("i"));
    let limits = HotLimits { bytes: 1 << 20, time: LONG };
    let (played, end, _) = run_hot(&image, HELD, false, &hot_set(), limits, |end| {
        while end.discarded.len() < 2 {
            end.element();
        }
        while end.got.len() < 7 {
            end.element();
        }
        assert!(!end.running);
        // Other pages come on request.
        end.ask("pc.rom", 68);
        while end.got.len() < 11 {
            end.element();
        }
    });
    assert!(matches!(played, Err(PlayError::Closed)), "{played:?}");
    for of in hot_set().pages() {
        let name = ["pc.ram", "pc.rom"][of.block];
        assert!(end.got[&(name.to_owned(), of.page)] == pages[&(name.to_owned(), of.page)]);
    }
    // To the end, with and without room for all of them.
    for limits in [limits, HotLimits { bytes: 1, ..limits }, NONE] {
        let (played, end, _) = run_hot(&image, OPTIONS, false, &hot_set(), limits, to_the_end);
        let played = played.unwrap();
        end.compare(&pages);
        let most = if limits.bytes > 1 { 7..=7 } else { 0..=6 };
        assert!(most.contains(&played.hot), "{played:?}");
        // The device asks for pages 11 to 13 of the first block.
        let asked: Vec<_> = played.asked.iter().map(|of| (of.block, of.page)).collect();
        assert_eq!(asked, [(0, 11), (0, 12), (0, 13)]);
    }
}

#[test]
fn a_damaged_unit_of_a_hot_page_ends_the_restore_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let (image, _) = made(&path);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let last = image.index().units.last().unwrap();
    file.write_all_at(b"!!!", last.offset + 30).unwrap();
    let mut player = Player::new(&image, OPTIONS).unwrap();
    let mut set = HotSet::default();
    // A page of the last unit: the older versions come last.
    set.add(&[HotPage { at: 0, block: 0, page: 294 }]);
    let damage = player.prepare(&set, HotLimits { bytes: 1 << 20, time: LONG }).unwrap_err();
    assert!(matches!(damage, PlayError::Image(_)), "{damage}");
}

#[test]
fn another_player_sends_what_has_not_arrived() {
    let folder = tempfile::tempdir().unwrap();
    let (image, pages) = made(&folder.path().join("i"));
    let (played, first, _) = run(&image, OPTIONS, false, |end| {
        while end.got.len() < 100 {
            end.element();
        }
    });
    assert!(played.is_err());
    let had = first.got.clone();
    let arrived: HashSet<_> = had.keys().cloned().collect();
    let (played, second, events) = run(&image, OPTIONS, true, move |end| {
        for (name, pages) in [("pc.ram", 300_usize), ("pc.rom", 70)] {
            let asked = [&[8, 0, 10, 0, 7, 6][..], name.as_bytes()].concat();
            assert_eq!(end.bytes(asked.len()), asked);
            end.say(5, &[&[6][..], name.as_bytes()].concat());
            let mut bits = vec![0_u8; pages.div_ceil(64) * 8];
            for (_, at) in arrived.iter().filter(|(block, _)| block == name) {
                bits[usize::try_from(at / 8).unwrap()] |= 1 << (at % 8);
            }
            let len = (bits.len() as u64).to_be_bytes();
            let mark = 0x0123_4567_89ab_cdef_u64.to_be_bytes();
            end.stream.write_all(&[&len[..], &bits, &mark].concat()).unwrap();
        }
        assert_eq!(end.bytes(5), [8, 0, 9, 0, 0]);
        end.ask("pc.rom", 5);
        end.say(6, &1_u32.to_be_bytes());
        // A page that has arrived may be requested again, and is not sent again.
        end.got = had;
        end.running = true;
        to_the_end(end);
    });
    played.unwrap();
    second.compare(&pages);
    assert_eq!(events, [Event::Resuming, Event::Running, Event::Loaded]);
}

#[test]
fn a_destination_that_lies_or_floods_ends_the_restore() {
    let folder = tempfile::tempdir().unwrap();
    let (image, _) = made(&folder.path().join("i"));
    let request = |start: u64, len: u32, name: &str| {
        let name = [&[u8::try_from(name.len()).unwrap()], name.as_bytes()].concat();
        [&start.to_be_bytes()[..], &len.to_be_bytes(), &name].concat()
    };
    let cases = [
        (3, request(300 * 4096, 4096, "pc.ram"), "asks for 4096 bytes"),
        (3, request(100, 4096, "pc.ram"), "asks for 4096 bytes"),
        (3, request(u64::MAX - 4095, 4096, "pc.ram"), "asks for 4096 bytes"),
        (3, request(0, 4096, "vga"), "block 'vga'"),
        (4, request(0, 4096, "")[..12].to_vec(), "no block"),
        (5, b"\x06pc.ram".to_vec(), "nobody asked"),
        (1, vec![0, 0, 0, 1], "SHUT 1"),
        (1, vec![0, 0, 0, 0], "has not"),
        (77, vec![], "no message"),
    ];
    for (kind, body, expected) in cases {
        let (played, ..) = run(&image, HELD, false, move |end| {
            end.say(kind, &body);
            // Read until the player ends.
            let _ = std::io::copy(&mut end.stream, &mut std::io::sink());
        });
        let said = played.unwrap_err().to_string();
        assert!(said.contains(expected), "{expected}: {said}");
    }
}

/// A destination that requests pages without end instead of continuing.
#[test]
fn a_destination_that_floods_before_it_continues_ends_the_restore() {
    let folder = tempfile::tempdir().unwrap();
    let (image, _) = made(&folder.path().join("i"));
    let (played, ..) = run(&image, OPTIONS, true, |end| {
        for (name, pages) in [("pc.ram", 300_usize), ("pc.rom", 70)] {
            end.bytes(5 + 1 + name.len());
            end.say(5, &[&[6][..], name.as_bytes()].concat());
            let bits = vec![0_u8; pages.div_ceil(64) * 8];
            let len = (bits.len() as u64).to_be_bytes();
            let mark = 0x0123_4567_89ab_cdef_u64.to_be_bytes();
            end.stream.write_all(&[&len[..], &bits, &mark].concat()).unwrap();
        }
        let request = b"\0\x03\0\x13\0\0\0\0\0\0\0\0\0\0\x10\0\x06pc.ram";
        // Until the player closes its end.
        while end.stream.write_all(&request.repeat(1000)).is_ok() {}
    });
    let said = played.unwrap_err().to_string();
    assert!(said.contains("more than 65536"), "{said}");
}

#[test]
fn a_damaged_unit_ends_the_restore_and_nothing_of_it_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let (image, _) = made(&path);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    for unit in &image.index().units {
        file.write_all_at(&[0x5a; 8], unit.offset + 30).unwrap();
    }
    let (played, ..) = run(&image, OPTIONS, false, |end| {
        end.ask("pc.ram", 2);
        let mut all = Vec::new();
        end.stream.read_to_end(&mut all).unwrap();
        assert!(all.ends_with(b"\x08\0\x02\0\x04\0\0\0\x04"), "more than the opening came");
    });
    let error = played.unwrap_err();
    assert!(
        matches!(error, PlayError::Image(_)) && error.to_string().contains("unit 0"),
        "{error}"
    );
}
