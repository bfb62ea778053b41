//! Rounds of training step by step, with trainers that do what they should and that do anything
//! else.

mod arbitrary;
mod bad_trainers;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use codec::{Codec, Encoder};
use device::{Device, DeviceOptions, DeviceQueue, PAGE};
use proptest::prelude::*;
use store::{Options, Store, DICTIONARIES, MAX_DICTIONARY};

use crate::channel::{self, words, Channel, Over, Question, ANSWER, ANSWER_LEN, SAMPLES};
use crate::settings::Settings;
use crate::stats::Counters;
use crate::trainer::{self, train};
use crate::training::{Trainer, Training};

const PAGES: u64 = 4096;

/// A random number that the next one follows from.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// As a program keeps its records in memory: each has the same long names once, and values of its
/// own. `kind` has names of its own.
fn record(kind: u64, number: u64) -> [u8; PAGE] {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut page = Vec::with_capacity(2 * PAGE);
    for field in 0_u64..120 {
        let name = (field + 1 + kind * 1000).wrapping_mul(0x2545_f491_4f6c_dd1d);
        let value = next(&mut state);
        page.extend_from_slice(format!("{name:020x}=<{value:016x}>").as_bytes());
    }
    page.truncate(PAGE);
    page.try_into().unwrap_or_else(|_| unreachable!("it was longer than a page"))
}

/// Every other word is random, the next a small number: half the size, and nothing in common.
fn guest_like(number: u64) -> [u8; PAGE] {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut page = [0; PAGE];
    for words in page.chunks_exact_mut(16) {
        words[..8].copy_from_slice(&next(&mut state).to_le_bytes());
        words[8] = next(&mut state).to_le_bytes()[0] & 7;
    }
    page
}

struct Made {
    store: Arc<Store>,
    device: Device,
    queue: DeviceQueue,
    counters: Arc<Counters>,
    training: Training,
    asked: Arc<AtomicU32>,
    /// The socket of the last requested trainer.
    channel: Arc<Mutex<Option<OwnedFd>>>,
    stopped: Arc<AtomicU32>,
}

fn settings() -> Settings {
    Settings { dictionary_pages: 1024, dictionary_period: 1, ..Settings::default() }
}

/// A device full of pages, and the server's side of training it.
fn made(page: impl Fn(u64) -> [u8; PAGE]) -> Made {
    let store = Store::create(PAGES, Options { reserve: 0, ..Options::default() }).unwrap();
    over(store, page)
}

fn over(store: Arc<Store>, page: impl Fn(u64) -> [u8; PAGE]) -> Made {
    let options = DeviceOptions { workers: 0, dictionaries: true, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index)).unwrap();
    }
    let counters = Arc::new(Counters::default());
    let (asked, stopped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let channel = Arc::new(Mutex::new(None));
    let (seen, place, told) = (Arc::clone(&asked), Arc::clone(&channel), Arc::clone(&stopped));
    let start = Box::new(move |theirs| {
        *place.lock().unwrap() = Some(theirs);
        seen.fetch_add(1, Ordering::Relaxed);
    });
    let stop = Box::new(move || {
        told.fetch_add(1, Ordering::Relaxed);
    });
    let trainer = Trainer { settings: device.settings(), start, stop };
    let training = Training::new(&store, &settings(), trainer, &counters).unwrap();
    let training = training.expect("zstd has dictionaries");
    Made { store, device, queue, counters, training, asked, channel, stopped }
}

impl Made {
    /// Steps until `done`, as the policy's thread would.
    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !done(self) {
            assert!(begun.elapsed() < Duration::from_secs(300), "{what}: {:?}", self.training);
            self.training.step(false);
            thread::sleep(self.training.wait().min(Duration::from_millis(5)));
        }
    }

    /// Steps until the `nth` request to start a trainer; returns the descriptor for that trainer.
    fn until_asked(&mut self, nth: u32) -> UnixStream {
        self.training.end_pause();
        self.until("asked", |made| made.asked.load(Ordering::Relaxed) >= nth);
        self.channel.lock().unwrap().take().expect("it comes with the question").into()
    }

    /// One round with this trainer, from when it is asked for to its end.
    fn round(&mut self, trainer: impl FnOnce(UnixStream) -> io::Result<()> + Send + 'static) {
        let before = self.ended();
        let stream = self.until_asked(self.asked.load(Ordering::Relaxed) + 1);
        let child = thread::spawn(move || trainer(stream));
        self.until("the round", |made| made.ended() > before);
        // One that lies has its own errors.
        let _ = child.join().unwrap();
    }

    fn ended(&self) -> u64 {
        let stats = self.counters.stats();
        stats.dictionary_installed
            + stats.dictionary_no_gain
            + stats.dictionary_late
            + stats.dictionary_refused
            + stats.dictionary_pressed
            + stats.dictionary_put_off
    }

    fn is_unharmed(&mut self, page: impl Fn(u64) -> [u8; PAGE]) {
        let mut out = [0; PAGE];
        for index in 0..PAGES {
            self.queue.read_now(index, &mut out).unwrap();
            assert!(out == page(index), "page {index}");
        }
    }
}

fn honest(mut stream: UnixStream) -> io::Result<()> {
    train(&mut stream)
}

#[test]
fn records_are_compressed_with_a_dictionary_and_read_back_by_the_next_server() {
    let page = |number| record(1, number);
    let mut made = made(page);
    let before = made.store.stats().compr_data_size;
    made.round(honest);
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_installed, made.store.dictionaries()), (1, 1), "{stats:?}");
    made.is_unharmed(page);
    assert_eq!(made.store.dictionary_pages()[0], 0, "what is there stays as it is");
    for index in 0..PAGES {
        made.queue.write_now(index, &page(index + 9)).unwrap();
    }
    assert_eq!(made.store.dictionary_pages()[0], PAGES);
    let after = made.store.stats().compr_data_size;
    assert!(after * 100 < before * 97, "{after} of {before}");
    let mut bytes = Box::new([0; MAX_DICTIONARY]);
    assert!(made.store.dictionary(0, &mut bytes).unwrap().gain >= trainer::WORTH);
    made.is_unharmed(|index| page(index + 9));

    let fd = made.store.fd().try_clone_to_owned().unwrap();
    drop(made);
    let store = Store::attach(std::os::fd::AsFd::as_fd(&fd), Options::default()).unwrap();
    assert_eq!(store.dictionary_pages()[0], PAGES);
    // With any current codec, and with or without room for more dictionaries.
    for codec in [Codec::Lz4, Codec::Zstd] {
        let settings = codec::Settings::new(codec, None).unwrap();
        let options = DeviceOptions { settings, workers: 0, ..DeviceOptions::default() };
        let device = Device::new(&store, &options).unwrap();
        let mut queue = device.queue().unwrap();
        let mut out = [0; PAGE];
        for index in 0..PAGES {
            queue.read_now(index, &mut out).unwrap();
            assert!(out == page(index + 9), "page {index}");
        }
    }
}

#[test]
fn pages_with_a_dictionary_are_grouped_and_ungrouped() {
    let page = |number| record(1, number);
    let mut made = made(page);
    made.round(honest);
    for index in (0..PAGES).filter(|index| index % 100 < 60 || index % 100 == 80) {
        made.queue.write_now(index, &page(index)).unwrap();
    }
    let before = made.store.dictionary_pages()[0];
    let mut passes = crate::Passes::new(&made.store, &Settings { level: 3, ..settings() }).unwrap();
    passes.grow_older();
    passes.grow_older();
    for index in (0..PAGES).filter(|index| index % 100 == 90) {
        made.queue.write_now(index, &page(index)).unwrap();
    }
    while passes.step(2) != crate::Step::Done {}
    assert!(made.store.stats().grouped_pages > PAGES / 4, "{:?}", made.store.stats());
    assert!(made.store.dictionary_pages()[0] < before);
    made.is_unharmed(page);
    // Those that were read have left again.
    while passes.step(2) != crate::Step::Done {}
    assert_eq!(made.store.stats().grouped_pages, 0);
    made.is_unharmed(page);
    for index in 0..PAGES {
        made.queue.write_now(index, &page(index + 1)).unwrap();
    }
    assert_eq!(made.store.dictionary_pages()[0], PAGES);
    made.is_unharmed(|index| page(index + 1));
}

#[test]
fn a_dictionary_that_is_damaged_costs_its_pages_an_error_and_nothing_wrong_is_read() {
    let page = |number| record(1, number);
    let mut made = made(page);
    made.round(honest);
    for index in 0..PAGES / 2 {
        made.queue.write_now(index, &page(index)).unwrap();
    }
    let file = File::from(made.store.fd().try_clone_to_owned().unwrap());
    let mut bytes = Box::new([0; MAX_DICTIONARY]);
    let len = made.store.dictionary(0, &mut bytes).unwrap().len;
    drop(made);
    // Its bytes are found where they are in the file, and bent.
    let mut all = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap().min(4 << 20)];
    file.read_exact_at(&mut all, 0).unwrap();
    let at = all.windows(64).position(|window| window == &bytes[..64]).expect("it is there");
    file.write_all_at(&[!bytes[len / 2]], (at + len / 2) as u64).unwrap();
    let store = Store::attach(std::os::fd::AsFd::as_fd(&file), Options::default()).unwrap();
    let options = DeviceOptions { workers: 0, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let mut queue = device.queue().unwrap();
    let mut out = [0; PAGE];
    for index in 0..PAGES {
        let read = queue.read_now(index, &mut out);
        if index < PAGES / 2 {
            assert_eq!(read, Err(device::Errno::Io), "page {index}");
        } else {
            assert!(read.is_ok() && out == page(index), "page {index}");
        }
    }
    let damage = device.damage().expect("there is some").to_string();
    assert!(damage.contains("dictionary 0"), "{damage}");
    queue.write_now(3, &page(3)).unwrap();
    queue.read_now(3, &mut out).unwrap();
    assert!(out == page(3));
}

#[test]
fn pages_without_common_content_get_no_dictionary() {
    let mut made = made(guest_like);
    made.round(honest);
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_no_gain, made.store.dictionaries()), (1, 0), "{stats:?}");
    made.is_unharmed(guest_like);
    // Incompressible pages are no samples.
    let noise = |number: u64| {
        let mut state = number + 7_777_777;
        let mut page = [0; PAGE];
        page.chunks_exact_mut(8)
            .for_each(|word| word.copy_from_slice(&next(&mut state).to_le_bytes()));
        page
    };
    for index in 0..PAGES {
        made.queue.write_now(index, &noise(index)).unwrap();
    }
    for _ in 0..20 {
        made.training.end_pause();
        made.training.step(false);
    }
    assert_eq!(made.asked.load(Ordering::Relaxed), 1, "too few pages compress");
}

#[test]
fn new_pages_get_another_dictionary_and_the_same_pages_do_not() {
    let mut made = made(|number| record(1, number));
    made.round(honest);
    for _ in 0..20 {
        made.training.end_pause();
        made.training.step(false);
    }
    assert_eq!(made.asked.load(Ordering::Relaxed), 1, "nothing has changed");
    for kind in 2..=DICTIONARIES as u64 + 1 {
        for index in 0..PAGES {
            made.queue.write_now(index, &record(kind, index)).unwrap();
        }
        if made.store.dictionaries() == DICTIONARIES {
            break;
        }
        made.round(honest);
        assert_eq!(made.store.dictionaries() as u64, kind, "{:?}", made.counters.stats());
        made.is_unharmed(|number| record(kind, number));
    }
    // All places are taken: no further trainer is requested.
    let asked = made.asked.load(Ordering::Relaxed);
    for _ in 0..20 {
        made.training.end_pause();
        made.training.step(false);
    }
    assert_eq!(made.asked.load(Ordering::Relaxed), asked);
}

#[test]
fn while_memory_is_short_no_training_starts_and_a_running_one_is_abandoned() {
    let page = |number| record(1, number);
    let mut made = made(page);
    for _ in 0..20 {
        made.training.end_pause();
        made.training.step(true);
    }
    assert_eq!(made.asked.load(Ordering::Relaxed), 0);
    assert_eq!(made.counters.stats().dictionary_pressed, 20);
    // While it gets samples; while it trains.
    for (nth, all) in [(1, false), (2, true)] {
        let mut stream = made.until_asked(nth);
        if all {
            let heard = Arc::new(AtomicU32::new(0));
            let flag = Arc::clone(&heard);
            let child = thread::spawn(move || {
                channel::receive(&mut stream).unwrap();
                flag.store(1, Ordering::Release);
                // The end of the server's messages.
                stream.read(&mut [0; 8]).unwrap()
            });
            made.until("samples", |_| heard.load(Ordering::Acquire) == 1);
            made.training.step(true);
            assert_eq!(child.join().unwrap(), 0);
        } else {
            made.training.step(false);
            made.training.step(true);
            assert!(channel::receive(&mut stream).is_err());
        }
        assert_eq!(made.counters.stats().dictionary_pressed, 20 + u64::from(nth));
        assert_eq!(made.stopped.load(Ordering::Relaxed), nth, "its memory is wanted");
    }
    // One that has answered holds nothing any more; but its dictionary needs a place.
    let mut stream = made.until_asked(3);
    let child = thread::spawn(move || train(&mut stream));
    made.until("an answer", |made| made.training.is_trying());
    child.join().unwrap().unwrap();
    for _ in 0..200 {
        made.training.step(true);
    }
    assert!(made.training.is_trying() && made.store.dictionaries() == 0);
    made.until("a dictionary", |made| made.store.dictionaries() == 1);
    assert_eq!(made.store.dictionaries(), 1);
    made.is_unharmed(page);
}

#[test]
fn without_memory_no_dictionary_is_installed() {
    let page = |number| record(1, number);
    let mut made = made(page);
    made.store.set_mem_limit(made.store.stats().mem_used_total);
    made.round(honest);
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_put_off, made.store.dictionaries()), (1, 0), "{stats:?}");
    assert_eq!(made.device.dictionaries().rooms(), DICTIONARIES);
    made.is_unharmed(page);
}

#[test]
fn a_trainer_without_a_question_or_samples_ends() {
    let round = |bytes: &[u8]| {
        let (mut server, mut trainer) = UnixStream::pair().unwrap();
        server.write_all(bytes).unwrap();
        server.shutdown(std::net::Shutdown::Write).unwrap();
        train(&mut trainer).unwrap_err()
    };
    assert_eq!(round(b"").kind(), io::ErrorKind::UnexpectedEof);
    assert!(round(&[7; 40]).to_string().contains("damaged"));
    let head: [u8; 40] = words([ANSWER, 1, 1, 0]);
    assert!(round(&head).to_string().contains("nobody asks"));
    let mut channel = Channel::new();
    let theirs = channel.open(&Question { round: 1, level: 1 }, b"").unwrap();
    assert_eq!(channel.flush(), Ok(true));
    channel.put_sample(&[5; PAGE]);
    assert_eq!(channel.flush(), Ok(true));
    channel.close();
    let error = train(&mut UnixStream::from(theirs)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(channel.flush(), Err(Over::Gone));
}

#[test]
fn without_a_worker_training_is_reported_impossible_and_the_policy_continues() {
    let store = Store::create(64, Options { reserve: 0, ..Options::default() }).unwrap();
    let options = DeviceOptions { workers: 0, dictionaries: true, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    let trainer =
        || Trainer { settings: device.settings(), start: Box::new(drop), stop: Box::new(|| ()) };
    let mut taken: Vec<_> = std::iter::from_fn(|| store.worker()).collect();
    // One for pages, none for training.
    taken.pop();
    let policy = crate::Policy::start_with(&store, &settings(), Some(trainer())).unwrap();
    let why = policy.untrained().expect("there was no worker").to_string();
    assert!(why.contains("workers"), "{why}");
    drop((policy, taken));
    let policy = crate::Policy::start_with(&store, &settings(), Some(trainer())).unwrap();
    assert!(policy.untrained().is_none());
}

#[test]
fn only_zstd_with_automatic_dictionaries_trains() {
    for (codec, word, expected) in
        [(Codec::Zstd, "off", false), (Codec::Lz4, "auto", false), (Codec::Zstd, "auto", true)]
    {
        let store = Store::create(64, Options { reserve: 0, ..Options::default() }).unwrap();
        let settings = codec::Settings::new(codec, None).unwrap();
        let options =
            DeviceOptions { settings, workers: 0, dictionaries: true, ..DeviceOptions::default() };
        let _device = Device::new(&store, &options).unwrap();
        let trainer = Trainer { settings, start: Box::new(drop), stop: Box::new(|| ()) };
        let word = Settings { dictionary: word.to_owned(), ..Settings::default() };
        let training = Training::new(&store, &word, trainer, &Arc::default()).unwrap();
        assert_eq!(training.is_some(), expected, "{codec}");
    }
}

#[test]
fn memory_is_worth_four_times_as_much_cpu_and_no_more() {
    let ms = Duration::from_millis;
    assert!(trainer::pays(300, ms(100), ms(112)) && trainer::pays(300, ms(100), ms(80)));
    assert!(!trainer::pays(300, ms(100), ms(113)) && !trainer::pays(299, ms(100), ms(80)));
    assert!(trainer::pays(2000, ms(100), ms(180)) && !trainer::pays(2000, ms(100), ms(181)));
    assert!(trainer::pays(10_000, Duration::ZERO, Duration::ZERO));
}

#[test]
fn a_gain_is_what_the_store_s_classes_make_of_it() {
    assert_eq!(
        (trainer::gain(1000, 970), trainer::gain(1000, 1000), trainer::gain(0, 5)),
        (300, 0, 0)
    );
    // Raw ones take a page and a checksum, however short the codec says they are.
    assert_eq!(trainer::cost(Codec::Raw, 4096), 4100);
    assert_eq!(trainer::cost(Codec::Zstd, 4000), 4100);
    assert_eq!(trainer::cost(Codec::Zstd, 1000), 1008);
    let mut encoder = Encoder::new(codec::Settings::default()).unwrap();
    let mut out = vec![0; PAGE];
    let encoded = encoder.encode(&record(1, 1), &mut out);
    assert!(trainer::cost(encoded.codec, encoded.len) < 4096);
}
