//! Measures what a dictionary gains on a device: memory and CPU with and without one, trained and
//! judged as a server does it.
//!
//! `cargo run --release -p policy --example dictionaries [-- SET[,SET...] [LEVEL...]]`
//! (guest,redis,text... 1 3)
//!
//! Two devices get the pages of a set, except same-filled ones. One has a policy, which asks for a
//! trainer: here a thread, in a server a process. After the training all pages are written again in
//! random order on both devices, alternating every 256 pages, and read in another random order. CPU
//! time is the thread's, the median of five such rounds. Memory is the whole store's after
//! compaction: table, half-empty slabs and dictionary included. The server's memory for the
//! digested tables is printed as well.

use std::collections::HashSet;
use std::error::Error;
use std::os::unix::net::UnixStream;
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

use codec::Codec;
use corpus::{is_same_filled, Corpus, PAGE};
use device::{Device, DeviceOptions, DeviceQueue};
use policy::{train, Policy, PolicyStats, Settings, Trainer};
use rustix::time::{clock_gettime, ClockId};
use store::{Options, Store, MAX_DICTIONARY};

const ROUNDS: usize = 5;
const TURN: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let corpus = Corpus::load();
    let sets = match arguments.next() {
        Some(sets) => sets.split(',').map(str::to_owned).collect(),
        None => ["guest", "redis", "text", "code"].map(str::to_owned).to_vec(),
    };
    let mut levels: Vec<i32> = arguments.map(|level| level.parse()).collect::<Result<_, _>>()?;
    if levels.is_empty() {
        levels = vec![1, 3];
    }
    println!("| pages | level | gain held out | ratio without, with | write us without, with | read us without, with | tables |");
    println!("|---|--:|--:|---|---|---|--:|");
    for name in sets {
        let Some(set) = corpus.set(&name) else {
            println!("{name}: no such set, there are {}", corpus.names().join(", "));
            continue;
        };
        let mut seen = HashSet::new();
        let pages: Vec<&[u8]> = set
            .pages()
            .chunks_exact(PAGE)
            .filter(|page| !is_same_filled(page) && seen.insert(*page))
            .collect();
        for &level in &levels {
            judge(&name, level, &pages)?;
        }
    }
    Ok(())
}

struct Judged {
    store: Arc<Store>,
    device: Device,
    queue: DeviceQueue,
    write: Vec<f64>,
    read: Vec<f64>,
}

impl Judged {
    fn new(pages: usize, level: i32, dictionaries: bool) -> Result<Self, Box<dyn Error>> {
        let store = Store::create(pages as u64, Options { reserve: 0, ..Options::default() })?;
        let settings = codec::Settings::new(Codec::Zstd, Some(level))?;
        let options =
            DeviceOptions { settings, workers: 0, dictionaries, ..DeviceOptions::default() };
        let device = Device::new(&store, &options)?;
        let queue = device.queue()?;
        Ok(Self { store, device, queue, write: Vec::new(), read: Vec::new() })
    }

    fn ratio(&self) -> f64 {
        for _ in 0..4 {
            self.store.compact();
        }
        self.store.trim();
        let stats = self.store.stats();
        stats.orig_data_size as f64 / (stats.mem_used_total - stats.mem_ready) as f64
    }
}

fn judge(name: &str, level: i32, pages: &[&[u8]]) -> Result<(), Box<dyn Error>> {
    let mut all = [Judged::new(pages.len(), level, false)?, Judged::new(pages.len(), level, true)?];
    for one in &mut all {
        for (index, page) in (0_u64..).zip(pages) {
            one.queue.write_now(index, page)?;
        }
    }
    let stats = trained(&all[1])?;
    let mut random = 7;
    for _ in 0..ROUNDS {
        all.iter_mut().for_each(|one| {
            one.write.push(0.0);
            one.read.push(0.0);
        });
        let order = shuffled(pages.len(), &mut random);
        for turn in order.chunks(TURN) {
            for one in &mut all {
                let begun = cpu();
                for &at in turn {
                    one.queue.write_now(at as u64, pages[at])?;
                }
                *one.write.last_mut().expect("pushed") += cpu() - begun;
            }
        }
        let order = shuffled(pages.len(), &mut random);
        let mut out = [0; PAGE];
        for turn in order.chunks(TURN) {
            for one in &mut all {
                let begun = cpu();
                for &at in turn {
                    one.queue.read_now(at as u64, &mut out)?;
                    assert!(out == *pages[at], "page {at} has another content");
                }
                *one.read.last_mut().expect("pushed") += cpu() - begun;
            }
        }
    }
    let mut bytes = Box::new([0; MAX_DICTIONARY]);
    let found = all[1].store.dictionary(0, &mut bytes).ok();
    let gain = match found {
        Some(found) => format!("{:.1} %, {} bytes", found.gain as f64 / 100.0, found.len),
        None => format!(
            "none: {} without gain, {} late",
            stats.dictionary_no_gain, stats.dictionary_late
        ),
    };
    let [without, with] = &mut all;
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2] / pages.len() as f64
    };
    println!(
        "| {name}, {} | {level} | {gain} | {:.3}, {:.3} | {:.2}, {:.2} | {:.2}, {:.2} | {} |",
        pages.len(),
        without.ratio(),
        with.ratio(),
        median(&mut without.write),
        median(&mut with.write),
        median(&mut without.read),
        median(&mut with.read),
        with.device.dictionaries().memory(),
    );
    Ok(())
}

/// Makes the policy train a dictionary, and waits for the result.
fn trained(one: &Judged) -> Result<PolicyStats, Box<dyn Error>> {
    let (ask, asked) = mpsc::channel();
    let start = Box::new(move |channel| {
        // The policy asks once.
        let _ = ask.send(channel);
    });
    let stop = Box::new(|| ());
    let trainer = Trainer { settings: one.device.settings(), start, stop };
    let settings = Settings { dictionary_pages: 1024, cpu: 100, ..Settings::default() };
    let policy = Policy::start_with(&one.store, &settings, Some(trainer))?;
    let training = thread::spawn(move || {
        if let Ok(channel) = asked.recv() {
            let begun = cpu();
            let done = train(&mut UnixStream::from(channel));
            eprintln!("the trainer took {:.2} s of CPU", (cpu() - begun) / 1e6);
            done
        } else {
            Ok(())
        }
    });
    let begun = Instant::now();
    let stats = loop {
        let stats = policy.stats();
        let ended = stats.dictionary_installed
            + stats.dictionary_no_gain
            + stats.dictionary_late
            + stats.dictionary_refused
            + stats.dictionary_pressed
            + stats.dictionary_put_off;
        if ended > 0 || begun.elapsed() > Duration::from_secs(100) {
            break stats;
        }
        thread::sleep(Duration::from_millis(10));
    };
    eprintln!("{stats:?}");
    drop(policy);
    training.join().expect("its panic was shown")?;
    Ok(stats)
}

fn shuffled(count: usize, random: &mut u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        order.swap(at, usize::try_from(*random % (at as u64 + 1)).expect("in memory"));
    }
    order
}

fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}
