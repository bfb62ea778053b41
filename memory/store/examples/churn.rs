//! What the store costs: memory by the byte stored, after churn, and CPU time by the operation.
//!
//! Takes the lengths and bytes of real pages, compressed by a codec, from the corpus (or made
//! ones), fills a store, overwrites pages at random, and prints `mem_used_total` over
//! `compr_data_size` before and after compaction. All counters are the store's own; the file's
//! memory as the kernel counts it is compared with them.
//!
//! Usage: churn [CODEC[:LEVEL] [PAGES [WORKERS]]]    (zstd:1, every page of the corpus, 4)

use std::error::Error;
use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use codec::{Codec, Encoder, Settings};
use corpus::{Corpus, PAGE};
use rustix::time::{clock_gettime, ClockId};
use store::{Keeper, Options, Store, MAX_OBJECT};

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

    let mut encoder = Encoder::new(Settings::new(codec, level)?)?;
    let mut out = vec![0; Encoder::roomy(PAGE)];
    let objects: Vec<Vec<u8>> = plain
        .chunks_exact(PAGE)
        .map(|page| {
            let encoded = encoder.encode(page, &mut out);
            if encoded.codec == Codec::Raw { page } else { &out[..encoded.len] }.to_vec()
        })
        .collect();
    let mean = objects.iter().map(Vec::len).sum::<usize>() as f64 / objects.len() as f64;
    println!(
        "{count} pages, {} objects of {name}, {mean:.0} bytes each, {workers} workers",
        objects.len()
    );

    let store = Store::create(count as u64, Options { reserve: 4 << 20, ..Options::default() })?;
    let mut workers: Vec<_> = (0..workers).map(|_| store.worker().expect("below 64")).collect();
    let mut random = 1_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let tag = codec.to_wire();

    let started = cpu();
    for index in 0..count {
        let worker = index % workers.len();
        workers[worker].put(index as u64, tag, &objects[index % objects.len()])?;
    }
    report("filled", started, count, &store)?;

    for round in 1..=3 {
        let started = cpu();
        for number in 0..count {
            let index = next() % count as u64;
            let object = &objects[usize::try_from(next())? % objects.len()];
            let worker = number % workers.len();
            workers[worker].put(index, tag, object)?;
        }
        report(&format!("overwritten {round}"), started, count, &store)?;
    }
    let started = cpu();
    let mut passes = 0;
    while passes < 8 && store.compact() > 0 {
        passes += 1;
    }
    report(&format!("compacted, {passes} passes"), started, count, &store)?;

    let started = cpu();
    let mut page = [0; MAX_OBJECT];
    for _ in 0..count {
        let index = next() % count as u64;
        black_box(workers[0].get(index, &mut page)?);
    }
    report("read at random", started, count, &store)?;

    // The same with a keeper, which compacts by itself when that is worth it.
    let keeper = Keeper::start(&store)?;
    let started = cpu();
    for number in 0..count {
        let index = next() % count as u64;
        let object = &objects[usize::try_from(next())? % objects.len()];
        let worker = number % workers.len();
        workers[worker].put(index, tag, object)?;
    }
    report("overwritten, keeper", started, count, &store)?;
    workers.iter_mut().for_each(store::Worker::rest);
    let mut before = u64::MAX;
    while before != store.stats().mem_used_total {
        before = store.stats().mem_used_total;
        std::thread::sleep(Duration::from_secs(3));
    }
    report("the keeper is done", cpu(), 1, &store)?;

    // Operations alone: what they work on is in the cache.
    let object = &objects.iter().find(|object| (1100..1300).contains(&object.len()));
    let object = object.ok_or("no object of 1.2 KB")?;
    for (what, put) in [("put, hot", true), ("get, hot", false)] {
        let best = (0..50)
            .map(|_| {
                let started = cpu();
                for number in 0..2000 {
                    let index = number % 100;
                    if put {
                        workers[0].put(index, tag, object)?;
                    } else {
                        black_box(workers[0].get(index, &mut page)?);
                    }
                }
                Ok((cpu() - started).as_nanos() / 2000)
            })
            .collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        let best = best.iter().min().ok_or("no batch")?;
        println!("{what:<22} {} bytes: {best} ns CPU, best of 50 batches", object.len());
    }

    // Another server.
    let fd = store.fd().try_clone_to_owned()?;
    drop((keeper, workers, store));
    let (wall, started) = (Instant::now(), cpu());
    let store = Store::attach(fd.as_fd(), Options::default())?;
    println!("taken over in {:?}, {:?} CPU", wall.elapsed(), cpu() - started);
    report("taken over", cpu(), 1, &store)?;
    let mut worker = store.worker().ok_or("no worker")?;
    let started = cpu();
    let checked = worker.check(0..store.pages());
    println!("{checked:?} in {:?} CPU", cpu() - started);

    // Most of it goes, and what is left is not spread over all the memory there was.
    for _ in 0..count {
        let index = next() % count as u64;
        worker.discard(index..index + 1);
    }
    report("discarded", cpu(), 1, &store)?;
    worker.rest();
    while store.compact() > 0 {}
    report("compacted", cpu(), 1, &store)?;
    Ok(())
}

fn report(
    what: &str,
    started: Duration,
    count: usize,
    store: &Store,
) -> Result<(), Box<dyn Error>> {
    let nanoseconds = (cpu() - started).as_nanos() as f64 / count as f64;
    let stats = store.stats();
    // A keeper may be at it just now.
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
