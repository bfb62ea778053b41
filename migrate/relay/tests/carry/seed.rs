//! W29b: pages that the destination has already are not sent, and arrive unchanged.

use crate::cutter::{Cutter, Plan, Way};
use crate::harness::{
    assert_same, bounded, destination_qemu, source_qemu, Noise, Options, Reader, Receiving,
    Sending, Streams, PAGE,
};
use crate::resume::RESUME;
use codec::Codec;
use delta::{page_hash, PageHash, PageReader, Seed, SeedKey, SeedPages};
use std::cell::Cell;
use std::io::{copy, sink};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stream::synth::{main_stream, multifd_streams, Style};

const KEY: SeedKey = [3; 32];

/// The behaviour of the disk of a seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    Good,
    /// The folder cannot be opened.
    Absent,
    /// It is opened when the other end of the hook is dropped.
    Late,
    /// A page is damaged after it was offered.
    Damaged,
    /// A page has other bytes than those offered, unnoticed.
    Lies,
    /// Reads never return.
    Hangs,
}

#[derive(Debug)]
struct Shelf {
    pages: Vec<Vec<u8>>,
    disk: Disk,
    /// Taken by the first read of a disk that hangs, which waits for the other end to be dropped.
    hook: Arc<Mutex<Option<Receiver<()>>>>,
}

impl Shelf {
    /// The same pages for another thread.
    fn again(&self) -> Self {
        let (pages, disk) = (self.pages.clone(), self.disk);
        Self { pages, disk, hook: self.hook.clone() }
    }
}

impl Seed for Shelf {
    fn open(&self, page_size: usize) -> Result<Arc<dyn SeedPages>, String> {
        assert_eq!(page_size, PAGE);
        if self.disk == Disk::Absent {
            return Err("no such folder".into());
        }
        if self.disk == Disk::Late {
            let hook = self.hook.lock().unwrap().take();
            let _ = hook.map(|hook| hook.recv());
        }
        Ok(Arc::new(self.again()))
    }
}

impl SeedPages for Shelf {
    fn key(&self) -> &SeedKey {
        &KEY
    }

    fn pages(&self) -> u32 {
        u32::try_from(self.pages.len()).unwrap()
    }

    fn offer(&self, most: u32, give: &mut dyn FnMut(u32, &[PageHash]) -> bool) {
        assert!(most > 0);
        // Units of different lengths, longer ones than an offer among them.
        let (mut first, mut len) = (0, 1);
        while first < self.pages.len() {
            let end = self.pages.len().min(first + len);
            let hashes: Vec<_> =
                self.pages[first..end].iter().map(|page| page_hash(&KEY, page)).collect();
            if !give(u32::try_from(first).unwrap(), &hashes) {
                return;
            }
            (first, len) = (end, len * 7 % 2503);
        }
    }

    fn reader(&self) -> Box<dyn PageReader> {
        Box::new(self.again())
    }
}

impl PageReader for Shelf {
    fn read(&mut self, number: u32) -> Result<&[u8], String> {
        match self.disk {
            Disk::Damaged => return Err("unit 7 is damaged".into()),
            Disk::Hangs => {
                let hook = self.hook.lock().unwrap().take();
                let _ = hook.map(|hook| hook.recv());
            }
            Disk::Lies => self.pages[number as usize][5] ^= 1,
            Disk::Good | Disk::Absent | Disk::Late => {}
        }
        Ok(&self.pages[number as usize])
    }
}

/// Pages of a guest, and the seed: the even ones, in another order, among others.
fn guest(count: usize, disk: Disk) -> (Vec<Vec<u8>>, Arc<Shelf>) {
    let mut noise = Noise(17);
    let memory: Vec<Vec<u8>> = (0..count).map(|_| noise.bytes(PAGE)).collect();
    let mut pages: Vec<Vec<u8>> = memory.iter().step_by(2).rev().cloned().collect();
    pages.extend((0..100).map(|_| noise.bytes(PAGE)));
    (memory, Arc::new(Shelf { pages, disk, hook: Arc::default() }))
}

fn single_of(memory: &[Vec<u8>]) -> Streams {
    Streams { main: main_stream(Style::Qemu72, PAGE, memory), channels: Vec::new() }
}

fn options(codec: Codec) -> Options {
    Options { codec, seed: 1 << 20, ..Options::default() }
}

/// Waits until the source knows `pages` pages of the seed.
fn knows(sending: &Sending, pages: usize) {
    while sending.seed().0 < pages as u64 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Carries the streams; returns the pages that were not sent, and the bytes that were.
fn carried(receiving: &Receiving, streams: &Streams, options: Options, known: usize) -> (u64, u64) {
    let destination = destination_qemu(receiving.qemu(None), streams, Reader::Prompt);
    let sending = Sending::new(receiving, receiving.address, options);
    knows(&sending, known);
    let source = source_qemu(sending.path.clone(), streams.clone(), 0);
    let received = destination.join().unwrap();
    assert_same(&received.main, &streams.main, "main");
    for (id, (got, sent)) in received.channels.iter().zip(&streams.channels).enumerate() {
        assert_same(got, sent, &format!("channel {id}"));
    }
    source.join().unwrap();
    let (_, pages) = sending.seed();
    let sent = sending.handle.progress().transferred;
    sending.result().unwrap();
    receiving.result().unwrap();
    (pages, sent)
}

#[test]
fn pages_of_the_seed_are_not_sent_whatever_the_codec() {
    bounded(|| {
        let (memory, shelf) = guest(1000, Disk::Good);
        let streams = single_of(&memory);
        // Regression: with a codec that compresses nothing, as `auto` may choose, zeros crossed in
        // place of the pages that counted as not sent.
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zstd] {
            for delta_cache in [0, 1 << 20] {
                let receiving = Receiving::seeded(Duration::ZERO, shelf.clone());
                let options = Options { delta_cache, ..options(codec) };
                let (pages, sent) = carried(&receiving, &streams, options, shelf.pages.len());
                // Some records name their block, and some are split by the end of a chunk.
                assert!((450..=500).contains(&pages), "{codec}: {pages}");
                assert!(sent < 560 * PAGE as u64, "{codec}: {sent} bytes");
            }
        }
        let receiving = Receiving::seeded(Duration::ZERO, shelf);
        let none = Options { seed: 0, ..options(Codec::Zstd) };
        assert_eq!(carried(&receiving, &streams, none, 0).0, 0, "not asked for");
    });
}

/// Regression: a chunk for which no codec thread was free crossed with zeros in place of pages that
/// counted as not sent.
#[test]
fn pages_of_the_seed_are_not_sent_where_no_codec_thread_is_free() {
    bounded(|| {
        let (memory, shelf) = guest(3000, Disk::Good);
        let receiving = Receiving::seeded(Duration::ZERO, shelf.clone());
        let options = Options { wait: false, threads: 1, level: Some(9), ..options(Codec::Zlib) };
        let (pages, sent) = carried(&receiving, &single_of(&memory), options, shelf.pages.len());
        assert!((1350..=1500).contains(&pages), "{pages}");
        assert!(sent < 1680 * PAGE as u64, "{sent} bytes");
    });
}

#[test]
fn multifd_channels_have_the_seed_too() {
    bounded(|| {
        let (memory, shelf) = guest(600, Disk::Good);
        let (main, channels) = multifd_streams(Style::Qemu92, PAGE, 3, &memory);
        let streams = Streams { main, channels };
        let receiving = Receiving::seeded(Duration::ZERO, shelf.clone());
        let (pages, sent) = carried(&receiving, &streams, options(Codec::Zstd), shelf.pages.len());
        assert!((270..=300).contains(&pages), "{pages}");
        assert!(sent < 350 * PAGE as u64, "{sent} bytes");
    });
}

#[test]
fn a_link_cut_anywhere_changes_no_byte() {
    bounded(|| {
        let (memory, shelf) = guest(300, Disk::Good);
        let streams = single_of(&memory);
        let mut seeded = 0;
        for after in 2..9 {
            let receiving = Receiving::seeded(RESUME, shelf.clone());
            let plan = Plan { way: Way::Forth, after, inside: 100, all: true, times: 1 };
            let cutter = Cutter::new(receiving.address, Some(plan));
            let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
            let options = Options { resume: RESUME, ..options(Codec::Zstd) };
            let sending = Sending::new(&receiving, cutter.address, options);
            let source = source_qemu(sending.path.clone(), streams.clone(), 0);
            assert_same(&destination.join().unwrap().main, &streams.main, "main");
            source.join().unwrap();
            seeded += sending.seed().1;
            sending.result().unwrap();
            receiving.result().unwrap();
        }
        assert!(seeded > 0);
    });
}

#[test]
fn without_the_folder_all_pages_are_sent_and_the_user_is_told() {
    bounded(|| {
        let (memory, shelf) = guest(100, Disk::Absent);
        let receiving = Receiving::seeded(Duration::ZERO, shelf);
        let (pages, _) = carried(&receiving, &single_of(&memory), options(Codec::Zstd), 0);
        assert_eq!(pages, 0);
        let notices = receiving.host.notices.lock().unwrap().join("\n");
        assert!(notices.contains("no seed, all pages will be sent: no such folder"), "{notices}");
    });
}

#[test]
fn a_source_waits_for_the_last_offer_unless_it_is_told_to_go_on() {
    bounded(|| {
        let (_, mut shelf) = guest(10, Disk::Late);
        let (release, hook): (Sender<()>, _) = channel();
        *Arc::get_mut(&mut shelf).unwrap().hook.lock().unwrap() = Some(hook);
        let receiving = Receiving::seeded(Duration::ZERO, shelf.clone());
        let sending = Sending::new(&receiving, receiving.address, options(Codec::Zstd));
        let asked = Cell::new(0);
        sending.await_seed(|| asked.replace(asked.get() + 1) < 3);
        assert_eq!((asked.get(), sending.seed().0), (4, 0), "an interrupt");
        drop(release);
        sending.await_seed(|| true);
        assert_eq!(sending.seed().0, shelf.pages.len() as u64);
        sending.handle.stop();
        sending.result().unwrap_err();
    });
}

/// Why a migration with this disk fails: the source's reason.
fn failure(disk: Disk) -> String {
    let (memory, mut shelf) = guest(300, disk);
    let (release, hook): (Sender<()>, _) = channel();
    *Arc::get_mut(&mut shelf).unwrap().hook.lock().unwrap() = Some(hook);
    let streams = single_of(&memory);
    let receiving = Receiving::seeded(Duration::ZERO, shelf.clone());
    let listener = receiving.qemu(None);
    // This QEMU reads to the end, whatever comes.
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let _ = copy(&mut socket.unwrap(), &mut sink());
        }
    });
    let sending = Sending::new(&receiving, receiving.address, options(Codec::Zstd));
    knows(&sending, shelf.pages.len());
    let _source = source_qemu(sending.path.clone(), streams, 0);
    let error = sending.result().unwrap_err().to_string();
    receiving.result().unwrap_err();
    drop(release);
    error
}

#[test]
fn a_page_that_is_lost_after_its_offer_ends_the_migration_by_name() {
    bounded(|| {
        let said = failure(Disk::Damaged);
        assert!(said.contains("of the seed cannot be read: unit 7 is damaged"), "{said}");
        assert!(said.contains("Start the migration again, or leave --seed out"), "{said}");
    });
}

#[test]
fn a_page_with_other_bytes_than_its_hash_is_never_written() {
    bounded(|| {
        let said = failure(Disk::Lies);
        assert!(said.contains("hash"), "{said}");
        // With the hash of a page that it does not have, a source could have the page written.
        assert!(!said.contains("0x"), "{said}");
    });
}

#[test]
fn a_disk_that_hangs_ends_the_migration() {
    bounded(|| {
        let said = failure(Disk::Hangs);
        assert!(said.contains("the disk of the seed has not answered for 10s"), "{said}");
    });
}
