//! Multifd migrations at any pace against an oracle; defective ones; and those of real QEMUs.

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use image::RamBlock;
use proptest::prelude::*;
use recorder::{Ending, Multifd, RecordError, Recorded, Sink};
use stream::synth::{multifd_streams, ChannelStream, Configuration, MainStream, Section, Style};
use stream::{Kind, Tokeniser};

#[path = "multifd/faults.rs"]
mod faults;
#[path = "multifd/real.rs"]
mod real;

const PAGE: usize = 4096;
const STYLES: [Style; 3] = [Style::Qemu72, Style::Qemu90, Style::Qemu92];

/// Pages by block and number.
type Ram = HashMap<(usize, u64), Vec<u8>>;

/// A sink that stores the last version of every page.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<Stored>>);

#[derive(Default)]
struct Stored {
    blocks: Vec<RamBlock>,
    pages: Ram,
    page_size: usize,
}

impl Sink for Memory {
    type Error = io::Error;

    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> io::Result<()> {
        let mut stored = self.0.lock().unwrap();
        (stored.page_size, stored.blocks) = (page_size, blocks.to_vec());
        Ok(())
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap().pages.insert((block, page), bytes.to_vec());
        Ok(())
    }

    fn zero(&mut self, block: usize, page: u64) -> io::Result<()> {
        let mut stored = self.0.lock().unwrap();
        let zero = vec![0; stored.page_size];
        stored.pages.insert((block, page), zero);
        Ok(())
    }
}

/// A connection that returns some bytes at a time, and pauses before some of them.
struct Connection<'a> {
    left: &'a [u8],
    most: usize,
    /// Bits: whether to pause before each of the next reads.
    pauses: u64,
}

impl<'a> Connection<'a> {
    fn new(left: &'a [u8], most: usize, pauses: u64) -> Self {
        Self { left, most, pauses }
    }
}

impl Read for Connection<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.pauses & 1 == 1 {
            thread::sleep(Duration::from_micros(300));
        }
        self.pauses = self.pauses.rotate_right(1);
        let len = self.most.min(out.len()).min(self.left.len());
        out[..len].copy_from_slice(&self.left[..len]);
        self.left = &self.left[len..];
        Ok(len)
    }
}

type Outcome = Result<Recorded, RecordError<io::Error>>;

/// Records a migration whose connections all deliver at their own pace.
fn record_at(main: &[u8], lanes: &[Vec<u8>], most: usize, pauses: u64) -> (Outcome, Memory) {
    let memory = Memory::default();
    let multifd = Multifd::new(u8::try_from(lanes.len()).unwrap(), memory.clone());
    let outcome = thread::scope(|scope| {
        for (lane, nth) in lanes.iter().zip(1..) {
            let connection = Connection::new(lane, most, pauses.rotate_left(nth * 7));
            let multifd = &multifd;
            scope.spawn(move || multifd.channel(connection));
        }
        let main = Connection::new(main, most, pauses);
        multifd.main(main, Ending::Closed).map(|(recorded, _)| recorded)
    });
    (outcome, memory)
}

fn recorded(main: &[u8], lanes: &[Vec<u8>]) -> (Outcome, Memory) {
    record_at(main, lanes, 1 << 20, 0)
}

fn pages(count: u64, size: usize) -> Vec<Vec<u8>> {
    let page = |at: u64| (at << 8 | 7).to_le_bytes().repeat(size / 8);
    (0..count).map(|at| if at % 5 == 0 { vec![0; size] } else { page(at) }).collect()
}

#[test]
fn every_page_of_a_made_migration_arrives_by_any_number_of_channels() {
    for (style, channels, size) in [
        (Style::Qemu72, 1, 4096),
        (Style::Qemu72, 3, 4096),
        (Style::Qemu90, 2, 4096),
        (Style::Qemu92, 8, 4096),
        (Style::Qemu92, 2, 65536),
        (Style::Qemu92, 255, 4096),
    ] {
        let pages = pages(1000, size);
        let (main, lanes) = made(style, size, channels, &pages);
        for most in [1 << 20, 5000, 700] {
            let (outcome, memory) = record_at(&main, &lanes, most, 0);
            let recorded = outcome.unwrap();
            assert_eq!((recorded.pages, recorded.zeros), (800, 200));
            let bytes = main.len() + lanes.iter().map(Vec::len).sum::<usize>();
            assert_eq!(recorded.bytes, bytes as u64);
            assert!(recorded.return_path && recorded.state.devices.starts_with(b"\x04\0\0\0\0"));
            assert_eq!(recorded.flushes, style.flushes());
            let stored = memory.0.lock().unwrap();
            assert_eq!((stored.page_size, stored.pages.len()), (size, 1000));
            for (at, page) in pages.iter().enumerate() {
                assert!(stored.pages[&(0, at as u64)] == *page, "{style:?}, page {at}");
            }
        }
    }
}

/// A whole migration with pages of `size` bytes, which the configuration states if they are not
/// the usual ones.
fn made(style: Style, size: usize, channels: u8, pages: &[Vec<u8>]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let (main, lanes) = multifd_streams(style, size, channels, pages);
    if size == PAGE {
        return (main, lanes);
    }
    let machine = style.machine();
    let plain = Configuration { machine, ..Configuration::default() };
    let bits = Configuration { page_bits: Some(size.trailing_zeros()), ..plain };
    let begin = |configuration: &Configuration<'_>| {
        MainStream::new(size).file_header().configuration(configuration).take()
    };
    let rest = main.strip_prefix(&begin(&plain)[..]).unwrap();
    ([&begin(&bits), rest].concat(), lanes)
}

/// A VM of `pages` pages, the connections of its migration, and the RAM that has to arrive.
struct History {
    style: Style,
    main: MainStream,
    lanes: Vec<ChannelStream>,
    number: u64,
    /// The last version of each page that was sent.
    ram: Ram,
}

impl History {
    fn new(style: Style, channels: u8, pages: u64) -> Self {
        let mut main = MainStream::new(PAGE);
        main.file_header();
        main.configuration(&Configuration { machine: style.machine(), ..Configuration::default() });
        main.command(1, &[]);
        main.section(Section::Start).block_table(&[("pc.ram", pages * PAGE as u64)]);
        let lanes = (0..channels).map(|id| ChannelStream::new(style, PAGE, id)).collect();
        let mut this = Self { style, main, lanes, number: 0, ram: HashMap::new() };
        this.barrier();
        this.main.end_of_section();
        this
    }

    /// Sends SYNC on every channel, and writes the barrier if it is not the section's end.
    fn barrier(&mut self) {
        for lane in &mut self.lanes {
            self.number += 1;
            lane.sync(self.number);
        }
        if self.style.flushes() {
            self.main.flush_marker();
        }
    }

    /// Sends pages: the number, the channel (one that does not exist stands for a zero page on the
    /// main channel), and the byte that fills it.
    fn part(&mut self, sent: &[(u64, usize, u8)]) {
        self.main.section(Section::Part);
        for &(page, channel, fill) in sent {
            let address = page * PAGE as u64;
            let bytes = vec![fill; PAGE];
            match self.lanes.get_mut(channel) {
                Some(lane) => {
                    self.number += 1;
                    let zero = fill == 0 && self.style != Style::Qemu72;
                    let content = (!zero).then_some(&bytes[..]);
                    lane.packet(self.number, "pc.ram", &[(address, content)], false);
                    self.ram.insert((0, page), bytes);
                }
                None => {
                    self.main.zero("pc.ram", address);
                    self.ram.insert((0, page), vec![0; PAGE]);
                }
            }
        }
        self.barrier();
        self.main.end_of_section();
    }

    fn finish(mut self) -> (Vec<u8>, Vec<Vec<u8>>, Ram) {
        self.main.section(Section::End);
        self.barrier();
        self.main.end_of_section().device_tail(400);
        let lanes = self.lanes.iter_mut().map(ChannelStream::take).collect();
        (self.main.take(), lanes, self.ram)
    }
}

/// A channel that is late delivers the first version of a page when another one could deliver the
/// second.
#[test]
fn the_last_version_of_a_page_counts_whichever_channel_is_read_first() {
    for style in STYLES {
        let mut history = History::new(style, 2, 4);
        history.part(&[(0, 1, 1), (1, 1, 1), (2, 9, 0), (3, 1, 1)]);
        history.part(&[(0, 0, 2), (1, 9, 0), (2, 0, 2)]);
        history.part(&[(3, 0, 3)]);
        let (main, lanes, ram) = history.finish();
        let memory = Memory::default();
        let multifd = Multifd::new(2, memory.clone());
        thread::scope(|scope| {
            scope.spawn(|| multifd.channel(&lanes[0][..]));
            scope.spawn(|| {
                // Its first packet and SYNC, then nothing for a while.
                let (early, late) = lanes[1].split_at(64 + stream::multifd_header_len(PAGE));
                multifd.channel(early.chain(Late(Duration::from_millis(100))).chain(late));
            });
            multifd.main(&main[..], Ending::Closed).unwrap();
        });
        assert!(memory.0.lock().unwrap().pages == ram, "{style:?}");
    }
}

/// The end of a connection's first part, which comes late.
struct Late(Duration);

impl Read for Late {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        thread::sleep(std::mem::take(&mut self.0));
        Ok(0)
    }
}

/// Parts of a history: in each, no page twice.
fn parts() -> impl Strategy<Value = Vec<Vec<(u64, usize, u8)>>> {
    let part = prop::collection::btree_map(0_u64..12, (0_usize..5, 0_u8..4), 0..9);
    let part = part.prop_map(|part| part.into_iter().map(|(page, (to, fill))| (page, to, fill)));
    prop::collection::vec(part.prop_map(Iterator::collect), 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    /// The RAM that arrives is the one that was sent last, at whatever pace the connections come.
    #[test]
    fn the_ram_sent_last_arrives_at_any_pace(
        style in prop::sample::select(&STYLES[..]),
        channels in 1_u8..4,
        parts in parts(),
        most in prop::sample::select(&[700_usize, 4103, 1 << 20][..]),
        pauses in any::<u64>(),
    ) {
        let mut history = History::new(style, channels, 12);
        for part in &parts {
            history.part(part);
        }
        let (main, lanes, ram) = history.finish();
        let (outcome, memory) = record_at(&main, &lanes, most, pauses);
        let sent = parts.iter().map(|part| part.len() as u64).sum::<u64>();
        let recorded = outcome.unwrap();
        prop_assert_eq!(recorded.pages + recorded.zeros, sent);
        prop_assert!(memory.0.lock().unwrap().pages == ram);
    }
}
