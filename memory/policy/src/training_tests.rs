//! Rounds of training step by step, with trainers that do what they should and that do anything else.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use codec::{Codec, Encoder};
use device::{Device, DeviceOptions, DeviceQueue, PAGE};
use proptest::prelude::*;
use store::{Options, Store, DICTIONARIES, MAX_DICTIONARY};

use crate::ground::{Answer, Ground, Phase, Question, SAMPLES};
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

/// As a program keeps its records in memory: each has the same long names once, and values of its own. `kind` has
/// names of its own.
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
    ground: Ground,
    counters: Arc<Counters>,
    training: Training,
    asked: Arc<AtomicU32>,
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
    let ground = Ground::make().unwrap();
    let counters = Arc::new(Counters::default());
    let asked = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&asked);
    let start = Box::new(move || {
        seen.fetch_add(1, Ordering::Relaxed);
    });
    let ours = Ground::open(ground.share().unwrap()).unwrap();
    let trainer = Trainer { ground: ours, settings: device.settings(), start };
    let training = Training::new(&store, &settings(), trainer, &counters).unwrap();
    let training = training.expect("zstd has dictionaries");
    Made { store, device, queue, ground, counters, training, asked }
}

impl Made {
    /// Steps until `done`, as the policy's thread would.
    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !done(self) {
            assert!(begun.elapsed() < Duration::from_secs(300), "{what}: {:?}", self.training);
            self.training.step();
            thread::sleep(self.training.wait().min(Duration::from_millis(5)));
        }
    }

    /// Steps until somebody is asked to start a trainer for the `nth` time.
    fn until_asked(&mut self, nth: u32) {
        self.training.end_pause();
        self.until("asked", |made| made.asked.load(Ordering::Relaxed) >= nth);
    }

    /// One round with this trainer, from when it is asked for to its end.
    fn round(&mut self, trainer: impl FnOnce(&Ground) -> io::Result<()> + Send + 'static) {
        let nth = self.asked.load(Ordering::Relaxed) + 1;
        self.until_asked(nth);
        let ground = Ground::open(self.ground.share().unwrap()).unwrap();
        let child = thread::spawn(move || trainer(&ground));
        self.until("the round", |made| made.ended() >= u64::from(nth));
        // One that lies has its own errors.
        let _ = child.join().unwrap();
    }

    fn ended(&self) -> u64 {
        let stats = self.counters.stats();
        stats.dictionary_installed
            + stats.dictionary_no_gain
            + stats.dictionary_late
            + stats.dictionary_refused
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

#[test]
fn records_are_compressed_with_a_dictionary_and_read_back_by_the_next_server() {
    let page = |number| record(1, number);
    let mut made = made(page);
    let before = made.store.stats().compr_data_size;
    made.round(train);
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
    // Whatever codec it has now, and with or without more of them.
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
fn pages_with_a_dictionary_become_groups_and_leave_them() {
    let page = |number| record(1, number);
    let mut made = made(page);
    made.round(train);
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
    made.round(train);
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
fn pages_without_anything_in_common_get_none() {
    let mut made = made(guest_like);
    made.round(train);
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_no_gain, made.store.dictionaries()), (1, 0), "{stats:?}");
    made.is_unharmed(guest_like);
    // What does not compress is no sample at all.
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
        made.training.step();
    }
    assert_eq!(made.asked.load(Ordering::Relaxed), 1, "too few pages compress");
}

#[test]
fn other_pages_get_another_dictionary_and_the_same_ones_do_not() {
    let mut made = made(|number| record(1, number));
    made.round(train);
    for _ in 0..20 {
        made.training.end_pause();
        made.training.step();
    }
    assert_eq!(made.asked.load(Ordering::Relaxed), 1, "nothing has changed");
    for kind in 2..=DICTIONARIES as u64 + 1 {
        for index in 0..PAGES {
            made.queue.write_now(index, &record(kind, index)).unwrap();
        }
        if made.store.dictionaries() == DICTIONARIES {
            break;
        }
        made.round(train);
        assert_eq!(made.store.dictionaries() as u64, kind, "{:?}", made.counters.stats());
        made.is_unharmed(|number| record(kind, number));
    }
    // All places are taken: nobody is asked for more.
    let asked = made.asked.load(Ordering::Relaxed);
    for _ in 0..20 {
        made.training.end_pause();
        made.training.step();
    }
    assert_eq!(made.asked.load(Ordering::Relaxed), asked);
}

/// Says that it is ready, and gives what the server wants once there are samples.
fn wait_for_samples(ground: &Ground) -> Question {
    let asked = ground.question().expect("somebody asks");
    ground.populate().unwrap();
    ground.answer(asked.round, &Answer { phase: Phase::Ready, len: 0, gain: 0 }, &[]).unwrap();
    loop {
        match ground.question() {
            Some(question) if question.phase == Phase::Given => return question,
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn done(len: usize, gain: u64) -> Answer {
    Answer { phase: Phase::Done, len, gain }
}

#[test]
fn trainers_that_lie_cost_their_round() {
    let page = |number| record(1, number);
    let mut made = made(page);
    let foreign = {
        let samples: Vec<u8> = (0..500).flat_map(|number| record(77, number)).collect();
        codec::train(&samples, PAGE, MAX_DICTIONARY).unwrap()
    };
    let (bent, other) = (foreign.clone(), foreign.clone());
    // One that is no dictionary, with every sum right.
    made.round(|ground| {
        let question = wait_for_samples(ground);
        ground.answer(question.round, &done(5000, 9000), &[0x37; 5000])
    });
    assert_eq!(made.counters.stats().dictionary_refused, 1);
    // The right magic number, and nothing behind it.
    made.round(move |ground| {
        let question = wait_for_samples(ground);
        let mut bent = bent;
        bent[8..].fill(0xa5);
        ground.answer(question.round, &done(bent.len(), 9000), &bent)
    });
    assert_eq!(made.counters.stats().dictionary_refused, 2);
    // A length that is beyond all there is; a gain that none can have; a sum that is another's.
    for (len, gain) in
        [(usize::MAX, 400), (MAX_DICTIONARY + 1, 400), (0, 400), (300, 10_001), (299, 400)]
    {
        let bytes = other[..300].to_vec();
        made.round(move |ground| {
            let question = wait_for_samples(ground);
            ground.answer(question.round, &done(len, gain), &bytes)
        });
    }
    assert_eq!(made.counters.stats().dictionary_refused, 7);
    // What only the server says.
    made.round(|ground| {
        let question = wait_for_samples(ground);
        ground.answer(question.round, &Answer { phase: Phase::Given, len: 0, gain: 0 }, &[])
    });
    assert_eq!(made.counters.stats().dictionary_refused, 8);
    // A dictionary of other pages, praised: it is tried here, and brings nothing.
    made.round(move |ground| {
        let question = wait_for_samples(ground);
        ground.answer(question.round, &done(foreign.len(), 9999), &foreign)
    });
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_no_gain, stats.dictionary_installed), (1, 0), "{stats:?}");
    assert_eq!(made.store.dictionaries(), 0);
    made.is_unharmed(page);
    // None of it has cost the room: an honest one is believed, when there is something new to train on.
    for index in 0..PAGES {
        made.queue.write_now(index, &page(index)).unwrap();
    }
    made.round(train);
    assert_eq!(made.counters.stats().dictionary_installed, 1);
    assert_eq!(made.device.dictionaries().rooms(), DICTIONARIES - 1);
    made.is_unharmed(page);
}

#[test]
fn trainers_that_die_or_hang_are_given_up_and_may_not_speak_later() {
    let page = |number| record(1, number);
    let mut made = made(page);
    // Never started; then one that dies when it has the samples. Time is told to have gone by.
    made.until_asked(1);
    made.training.lose_patience();
    made.until("never started", |made| made.ended() == 1);
    made.until_asked(2);
    let late = made.ground.question().expect("asked").round;
    made.ground.populate().unwrap();
    let ready = Answer { phase: Phase::Ready, len: 0, gain: 0 };
    made.ground.answer(late, &ready, &[]).unwrap();
    made.until("samples", |made| {
        made.ground.question().is_some_and(|question| question.phase == Phase::Given)
    });
    made.training.lose_patience();
    made.until("dead", |made| made.ended() == 2);
    assert_eq!(made.counters.stats().dictionary_late, 2);
    // It was not dead: it answers in the middle of the next round, and is not heard.
    made.until_asked(3);
    let good = {
        let samples: Vec<u8> = (0..500).flat_map(page).collect();
        codec::train(&samples, PAGE, MAX_DICTIONARY).unwrap()
    };
    made.ground.answer(late, &done(good.len(), 9000), &good).unwrap();
    for _ in 0..20 {
        made.training.step();
    }
    assert_eq!((made.ended(), made.store.dictionaries()), (2, 0));
    made.training.lose_patience();
    made.until("late", |made| made.ended() == 3);
    made.round(train);
    assert_eq!(made.store.dictionaries(), 1);
    made.is_unharmed(page);
}

#[test]
fn without_memory_for_it_nothing_is_installed() {
    let page = |number| record(1, number);
    let mut made = made(page);
    made.until_asked(1);
    made.store.set_mem_limit(made.store.stats().mem_used_total);
    let ground = Ground::open(made.ground.share().unwrap()).unwrap();
    let child = thread::spawn(move || train(&ground));
    made.until("the round", |made| made.ended() == 1);
    child.join().unwrap().unwrap();
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_put_off, made.store.dictionaries()), (1, 0), "{stats:?}");
    assert_eq!(made.device.dictionaries().rooms(), DICTIONARIES);
    made.is_unharmed(page);
}

#[test]
fn a_trainer_without_a_question_or_samples_ends() {
    let ground = Ground::make().unwrap();
    assert!(train(&ground).unwrap_err().to_string().contains("nobody asks"));
    let ask = |round, phase| {
        ground.ask(&Question { round, phase, samples: SAMPLES, current: 0, level: 1 }).unwrap();
    };
    ask(1, Phase::Asked);
    let theirs = Ground::open(ground.share().unwrap()).unwrap();
    let child = thread::spawn(move || train(&theirs));
    let mut out = [0; MAX_DICTIONARY];
    while ground.answered(1, &mut out).is_none() {
        thread::sleep(Duration::from_millis(1));
    }
    ask(2, Phase::Asked);
    assert!(child.join().unwrap().unwrap_err().to_string().contains("given this round up"));
    // A file of another length is none of ours.
    let other = rustix::fs::memfd_create("other", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert!(Ground::open(other).unwrap_err().to_string().contains("expected"));
}

#[test]
fn only_zstd_and_only_auto_trains() {
    for (codec, word, expected) in
        [(Codec::Zstd, "off", false), (Codec::Lz4, "auto", false), (Codec::Zstd, "auto", true)]
    {
        let store = Store::create(64, Options { reserve: 0, ..Options::default() }).unwrap();
        let settings = codec::Settings::new(codec, None).unwrap();
        let options =
            DeviceOptions { settings, workers: 0, dictionaries: true, ..DeviceOptions::default() };
        let _device = Device::new(&store, &options).unwrap();
        let trainer = Trainer { ground: Ground::make().unwrap(), settings, start: Box::new(|| ()) };
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
    let mut out = vec![0; Encoder::roomy(PAGE)];
    let encoded = encoder.encode(&record(1, 1), &mut out);
    assert!(trainer::cost(encoded.codec, encoded.len) < 4096);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is in the file, it is read within its bounds, and taken for an answer only if it is one.
    #[test]
    fn answers_that_nobody_gave_are_none(
        writes in prop::collection::vec((0_u64..200, prop::collection::vec(any::<u8>(), 1..80)), 0..8),
        words in prop::option::of((any::<u64>(), 0_u64..8, any::<u64>(), any::<u64>())),
        round in 0_u64..4,
    ) {
        let ground = Ground::make().unwrap();
        let file = File::from(ground.share().unwrap());
        if let Some((of, phase, len, gain)) = words {
            // With its sum right, so that what follows is looked at.
            let mut bytes = Vec::new();
            for word in [u64::from_le_bytes(*b"platenTR"), of % 4, phase, len, gain, 0] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
            bytes.extend_from_slice(&codec::checksum(&bytes).to_le_bytes());
            file.write_all_at(&bytes, 512).unwrap();
        }
        for (at, bytes) in &writes {
            file.write_all_at(bytes, 400 + at).unwrap();
        }
        let mut out = [0; MAX_DICTIONARY];
        if let Some(Ok(answer)) = ground.answered(round, &mut out) {
            prop_assert!(answer.len <= MAX_DICTIONARY && answer.gain <= 10_000);
            let (of, phase, _, _) = words.expect("the sum of nothing is not found by chance");
            prop_assert_eq!((of % 4, phase), (round, answer.phase as u64));
        }
        let _ = ground.question();
    }

    /// Bytes that say they are a dictionary never do more than be refused or used within bounds.
    #[test]
    fn dictionaries_that_nobody_trained_are_refused_or_bounded(
        at in 8_usize..4000, bytes in prop::collection::vec(any::<u8>(), 1..64), keep in 256_usize..8000,
    ) {
        thread_local! {
            static GOOD: Vec<u8> = {
                let samples: Vec<u8> = (0..200).flat_map(|number| record(1, number)).collect();
                codec::train(&samples, PAGE, 8000).unwrap()
            };
        }
        let mut bent = GOOD.with(Clone::clone);
        bent.truncate(keep);
        let end = (at + bytes.len()).min(bent.len());
        if at < end {
            bent[at..end].copy_from_slice(&bytes[..end - at]);
        }
        let mut room = codec::Dictionary::room(Some(1));
        if room.digest(&bent).is_ok() {
            let room = Arc::new(room);
            let mut encoder = Encoder::with_dictionaries(codec::Settings::default()).unwrap();
            let mut coded = vec![0; Encoder::roomy(PAGE)];
            let plain = record(1, 5);
            let (encoded, used) = encoder.encode_with(Some(&room), &plain, &mut coded);
            if used {
                let mut back = [0; PAGE];
                codec::Decoder::new().decode_with(&room, &coded[..encoded.len], &mut back).unwrap();
                prop_assert!(back == plain);
            }
        }
    }
}
