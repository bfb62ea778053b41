//! The pool against a bare loop around the codec.

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use codec::{Codec, Settings};
use pages::{Arena, PAGE_SIZE};
use pipeline::{Pool, PoolConfig, Popped, Reorder, Results, Submitted, Submitter};

use super::data::Pages;
use super::measure::{cpus, median, Compressor, Encode, Encoded, Run, Watch};

/// One kind of batch, and the number of threads that work on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) codec: Codec,
    pub(super) batch: usize,
    /// Bare loops in parallel, and workers of the pool.
    pub(super) threads: usize,
    pub(super) ring_capacity: usize,
    /// The most CPU time relative to the bare loop that we accept; `None` for rows that only
    /// explain others.
    pub(super) goal: Option<f64>,
}

/// Medians over the runs of one case.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) case: Case,
    /// CPU seconds per GiB of the bare loop.
    pub(super) bare_cpu: f64,
    /// CPU time of the pool over that of the bare loop, for each pair of neighbouring runs.
    pub(super) cpu_ratio: f64,
    pub(super) wall_ratio: f64,
    /// The submitter's share of the pool's CPU time.
    pub(super) submitter: f64,
    /// Futex calls per 1,000 batches when a submitter without room waits.
    pub(super) futex_waiting: f64,
    /// The same when it does other work instead, so that no side is ever idle: the median, and the
    /// least of the runs, which lacks the idling that other processes cause. `None` if there is no
    /// CPU for the submitter besides the workers'.
    pub(super) futex_busy: Option<(f64, f64)>,
}

pub(super) fn measure(pages: &Pages, runs: u32) -> anyhow::Result<Vec<Row>> {
    let mut cases = Vec::new();
    let case = |codec, batch, threads, ring_capacity, goal| Case {
        codec,
        batch,
        threads,
        ring_capacity,
        goal,
    };
    let mut counts = vec![1, cpus()];
    counts.dedup();
    for threads in counts {
        for codec in [Codec::Lz4, Codec::Zstd] {
            cases.push(case(codec, 128 * PAGE_SIZE, threads, 4, Some(1.03)));
        }
        cases.push(case(Codec::Lz4, PAGE_SIZE, threads, 128, Some(1.10)));
        // The default capacity is meant for batches; this is its cost with single pages.
        cases.push(case(Codec::Lz4, PAGE_SIZE, threads, 4, None));
    }
    cases.into_iter().map(|case| row(pages, case, runs)).collect()
}

fn row(pages: &Pages, case: Case, runs: u32) -> anyhow::Result<Row> {
    let settings = Settings::new(case.codec, Some(1))?;
    let engine = Engine::new(case, settings)?;
    // The first run of each is a warm-up: threads start, and memory is touched for the first time.
    bare(pages, case, settings);
    engine.run(pages, true)?;
    let mut row = Collected::default();
    for _ in 0..runs {
        let loops = bare(pages, case, settings);
        let ours = engine.run(pages, true)?;
        let never_idle = engine.run(pages, false)?;
        let gib = pages.bytes.len() as f64 / (1u64 << 30) as f64;
        let per_thousand = |run: &Run| run.futex_calls as f64 * 1000.0 / run.jobs as f64;
        row.bare_cpu.push(loops.cpu().as_secs_f64() / gib);
        row.cpu.push(ours.cpu().as_secs_f64() / loops.cpu().as_secs_f64());
        row.wall.push(ours.wall.as_secs_f64() / loops.wall.as_secs_f64());
        row.submitter.push(ours.submitter.as_secs_f64() / ours.cpu().as_secs_f64());
        row.waiting.push(per_thousand(&ours));
        row.busy.push(per_thousand(&never_idle));
    }
    Ok(Row {
        case,
        bare_cpu: median(row.bare_cpu),
        cpu_ratio: median(row.cpu),
        wall_ratio: median(row.wall),
        submitter: median(row.submitter),
        futex_waiting: median(row.waiting),
        futex_busy: (case.threads < cpus()).then(|| {
            let least = row.busy.iter().copied().fold(f64::INFINITY, f64::min);
            (median(row.busy), least)
        }),
    })
}

/// The figures of each run.
#[derive(Default)]
struct Collected {
    bare_cpu: Vec<f64>,
    cpu: Vec<f64>,
    wall: Vec<f64>,
    submitter: Vec<f64>,
    waiting: Vec<f64>,
    busy: Vec<f64>,
}

/// Independent threads, each with every n-th batch.
fn bare(pages: &Pages, case: Case, settings: Settings) -> Run {
    let bytes = pages.bytes;
    let began = Instant::now();
    let work = |number: usize| {
        let mut compressor = Compressor::new(settings);
        let mut out = vec![1; case.batch];
        let watch = Watch::start();
        for plain in bytes.chunks(case.batch).skip(number).step_by(case.threads) {
            black_box(compressor.encode(plain, &mut out));
        }
        watch.stop().1
    };
    let workers = thread::scope(|scope| {
        let work = &work;
        let loops: Vec<_> = (0..case.threads).map(|n| scope.spawn(move || work(n))).collect();
        loops.into_iter().map(|each| each.join().expect("encoding does not panic")).collect()
    });
    Run { wall: began.elapsed(), workers, ..Run::default() }
}

/// The whole engine: slots, pool, results.
struct Engine {
    case: Case,
    pool: Arc<Pool<Encode>>,
    results: Arc<Results<Encoded>>,
    arena: Arc<Arena>,
    slots: usize,
}

impl Engine {
    fn new(case: Case, settings: Settings) -> anyhow::Result<Self> {
        let config =
            PoolConfig { threads: case.threads, ring_capacity: case.ring_capacity, name: "bench" };
        let pool = Pool::new(config, |_| Compressor::new(settings))?;
        // Twice the capacity of the pool: finished batches wait in the window for an earlier one
        // whose worker was preempted.
        let slots = pool.depth() * 2;
        let arena = Arena::new(slots, case.batch)?;
        Ok(Self { case, pool, results: Results::new(slots), arena, slots })
    }

    /// Passes all pages through the pool, and restores their order.
    fn run(&self, pages: &Pages, wait: bool) -> anyhow::Result<Run> {
        let (mut futex_before, cpu_before) = (self.futex_calls(), self.workers_cpu());
        let filled = self.pool.depth() as u64;
        let results = &self.results;
        let submitter = Submitter::new(Arc::clone(&self.pool), Arc::clone(results), wait);
        let mut reorder = Reorder::new(self.slots);
        let mut run = Run::default();
        let watch = Watch::start();
        let mut fetched = |done: Encoded, run: &mut Run| -> anyhow::Result<()> {
            reorder.insert(done.seq, done)?;
            while let Some(next) = reorder.pop() {
                run.sent += black_box(next.payload()).len() as u64;
            }
            Ok(())
        };
        let mut batches = pages.bytes.chunks(self.case.batch);
        let mut next = batches.next();
        while let Some(plain) = next {
            while let Some(done) = results.pop() {
                fetched(done, &mut run)?;
            }
            let Some(out) = self.arena.take() else {
                if let Popped::Item(done) = results.pop_until(None) {
                    fetched(done, &mut run)?;
                }
                continue;
            };
            match submitter.submit(Encode { seq: run.jobs, plain, out }, 1) {
                Submitted::Queued => {
                    run.jobs += 1;
                    // From here on the rings are full; the workers slept until the first job
                    // arrived.
                    if run.jobs == filled {
                        futex_before = self.futex_calls();
                    }
                    next = batches.next();
                }
                // Instead of a submitter's other work: tries again a little later.
                Submitted::Busy(_) => (0..200).for_each(|_| std::hint::spin_loop()),
                Submitted::Closed(_) => anyhow::bail!("the pool was closed under us"),
            }
        }
        run.futex_calls = self.futex_calls() - futex_before;
        submitter.flush();
        while let Some(done) = results.pop() {
            fetched(done, &mut run)?;
        }
        (run.wall, run.submitter) = watch.stop();
        // The kernel's account of a thread is complete once the thread sleeps.
        thread::sleep(Duration::from_millis(2));
        let cpu = self.workers_cpu().into_iter().zip(cpu_before);
        run.workers = cpu.map(|(after, before)| after.saturating_sub(before)).collect();
        Ok(run)
    }

    fn futex_calls(&self) -> u64 {
        self.pool.futex_calls() + self.results.futex_calls()
    }

    fn workers_cpu(&self) -> Vec<Duration> {
        self.pool.cpu_times()
    }
}
