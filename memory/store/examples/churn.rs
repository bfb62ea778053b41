//! Measures what the store costs: memory overhead after churn, and CPU time an operation.
//!
//! Compresses the pages of the corpus (or generated ones), fills a store with the objects,
//! overwrites pages at random, and prints `mem_used_total` over `compr_data_size` before and after
//! compaction. The counters are the store's own, compared with the kernel's count of the file's
//! memory.
//!
//! Usage: churn [CODEC[:LEVEL] [PAGES [WORKERS]]]    (zstd:1, every page of the corpus, 4)

use std::error::Error;
use std::hint::black_box;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use codec::{Codec, Encoder, Settings};
use corpus::{Corpus, PAGE};
use rustix::time::{clock_gettime, ClockId};
use store::{Keeper, Options, Store, Worker, MAX_OBJECT};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (name, level) = match args.first().map_or("zstd:1", String::as_str).split_once(':') {
        Some((name, level)) => (name.to_owned(), Some(level.parse()?)),
        None => (args[0].clone(), None),
    };
    let codec: Codec = name.parse()?;
    let corpus = Corpus::load();
    let plain = corpus.mixed_unique();
    let count = match args.get(1) {
        Some(pages) => pages.parse()?,
        None => plain.len() / PAGE,
    };
    let workers = args.get(2).map_or(Ok(4), |workers| workers.parse::<usize>())?;

    let objects = compress(&plain, Settings::new(codec, level)?)?;
    let mean = objects.iter().map(Vec::len).sum::<usize>() as f64 / objects.len() as f64;
    println!(
        "{count} pages, {} objects of {name}, {mean:.0} bytes each, {workers} workers",
        objects.len()
    );

    let store = Store::create(count as u64, Options { reserve: 4 << 20, ..Options::default() })?;
    let workers = (0..workers).map(|_| store.worker().expect("below 64")).collect();
    let mut churn = Churn { store, workers, objects, tag: codec.to_wire(), count, random: 1 };
    churn.without_keeper()?;
    let keeper = Keeper::start(&churn.store)?;
    churn.with_keeper()?;
    churn.one_object()?;

    let fd = churn.store.fd().try_clone_to_owned()?;
    drop((keeper, churn));
    take_over(fd.as_fd(), count)
}

fn compress(plain: &[u8], settings: Settings) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let mut encoder = Encoder::new(settings)?;
    let mut out = vec![0; PAGE];
    let objects = plain.chunks_exact(PAGE).map(|page| {
        let encoded = encoder.encode(page, &mut out);
        if encoded.codec == Codec::Raw { page } else { &out[..encoded.len] }.to_vec()
    });
    Ok(objects.collect())
}

/// A store, and the pages written to it.
struct Churn {
    store: Arc<Store>,
    workers: Vec<Worker>,
    objects: Vec<Vec<u8>>,
    tag: u8,
    count: usize,
    random: u64,
}

impl Churn {
    fn without_keeper(&mut self) -> Result<(), Box<dyn Error>> {
        let started = cpu();
        for index in 0..self.count {
            let worker = index % self.workers.len();
            let object = &self.objects[index % self.objects.len()];
            self.workers[worker].put(index as u64, self.tag, object)?;
        }
        report("filled", started, self.count, &self.store)?;

        for round in 1..=3 {
            let started = cpu();
            self.overwrite()?;
            report(&format!("overwritten {round}"), started, self.count, &self.store)?;
        }
        let started = cpu();
        let mut passes = 0;
        while passes < 8 && self.store.compact() > 0 {
            passes += 1;
        }
        report(&format!("compacted, {passes} passes"), started, self.count, &self.store)?;

        let started = cpu();
        let mut page = [0; MAX_OBJECT];
        for _ in 0..self.count {
            let index = next(&mut self.random) % self.count as u64;
            black_box(self.workers[0].get(index, &mut page)?);
        }
        report("read at random", started, self.count, &self.store)
    }

    /// The keeper compacts by itself when that frees enough.
    fn with_keeper(&mut self) -> Result<(), Box<dyn Error>> {
        let started = cpu();
        self.overwrite()?;
        report("overwritten, keeper", started, self.count, &self.store)?;
        self.workers.iter_mut().for_each(Worker::rest);
        let mut before = u64::MAX;
        while before != self.store.stats().mem_used_total {
            before = self.store.stats().mem_used_total;
            std::thread::sleep(Duration::from_secs(3));
        }
        report("the keeper is done", cpu(), 1, &self.store)
    }

    /// Writes as many pages as there are, chosen at random.
    fn overwrite(&mut self) -> Result<(), Box<dyn Error>> {
        for number in 0..self.count {
            let index = next(&mut self.random) % self.count as u64;
            let object = usize::try_from(next(&mut self.random))? % self.objects.len();
            let worker = number % self.workers.len();
            self.workers[worker].put(index, self.tag, &self.objects[object])?;
        }
        Ok(())
    }

    /// The operations alone: their data is in the CPU's cache.
    fn one_object(&mut self) -> Result<(), Box<dyn Error>> {
        let object = self.objects.iter().find(|object| (1100..1300).contains(&object.len()));
        let object = object.ok_or("no object of 1.2 KB")?;
        let mut page = [0; MAX_OBJECT];
        for (what, put) in [("put, hot", true), ("get, hot", false)] {
            let mut best = u128::MAX;
            for _ in 0..50 {
                let started = cpu();
                for number in 0..2000 {
                    let index = number % 100;
                    if put {
                        self.workers[0].put(index, self.tag, object)?;
                    } else {
                        black_box(self.workers[0].get(index, &mut page)?);
                    }
                }
                best = best.min((cpu() - started).as_nanos() / 2000);
            }
            println!("{what:<22} {} bytes: {best} ns CPU, best of 50 batches", object.len());
        }
        Ok(())
    }
}

fn take_over(fd: BorrowedFd<'_>, count: usize) -> Result<(), Box<dyn Error>> {
    let (wall, started) = (Instant::now(), cpu());
    let store = Store::attach(fd, Options::default())?;
    println!("taken over in {:?}, {:?} CPU", wall.elapsed(), cpu() - started);
    report("taken over", cpu(), 1, &store)?;
    let mut worker = store.worker().ok_or("no worker")?;
    let started = cpu();
    let checked = worker.check(0..store.pages());
    println!("{checked:?} in {:?} CPU", cpu() - started);

    // Most pages go, so that compaction has to gather the others.
    let mut random = 1;
    for _ in 0..count {
        let index = next(&mut random) % count as u64;
        worker.discard(index..index + 1);
    }
    report("discarded", cpu(), 1, &store)?;
    worker.rest();
    while store.compact() > 0 {}
    report("compacted", cpu(), 1, &store)
}

/// The next number of a xorshift generator.
fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

fn report(
    what: &str,
    started: Duration,
    count: usize,
    store: &Store,
) -> Result<(), Box<dyn Error>> {
    let nanoseconds = (cpu() - started).as_nanos() as f64 / count as f64;
    let stats = store.stats();
    // A keeper may be changing it.
    let resident = store.resident()?;
    let differ = stats.mem_used_total.abs_diff(resident) > 4 << 20;
    assert!(!differ, "the kernel counts {resident} bytes, we {}", stats.mem_used_total);
    let used = (stats.mem_used_total - stats.mem_ready) as f64;
    println!(
        "{what:<22} {:>7.1} MiB used for {:>7.1} MiB: {:.4}, and {:.1} MiB ready   {nanoseconds:>6.0} ns CPU an operation",
        used / 1048576.0,
        stats.compr_data_size as f64 / 1048576.0,
        used / stats.compr_data_size as f64,
        stats.mem_ready as f64 / 1048576.0,
    );
    Ok(())
}

/// This thread's CPU time.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}
