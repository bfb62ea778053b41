//! The pool against QEMU's old scheme, in the form of the table of QEMU's patch series.

use std::sync::Arc;

use codec::{Decoder, Settings, UnitHeader};
use pages::{Arena, Slot, PAGE_SIZE};
use pipeline::{Job, Pool, PoolConfig, Popped, Results, Submitted, Submitter};

use super::data::Pages;
use super::link::Link;
use super::measure::{median, Compressor, Encode, Encoded, Run, Watch};
use super::old;
use super::units::{encode_all, Dest, Unit};

/// The parameters of the comparison.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) threads: Vec<usize>,
    pub(super) settings: Settings,
    pub(super) link_gbit: f64,
    pub(super) runs: u32,
}

/// The scheme that does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// QEMU's threads before the pool.
    Old,
    /// The pool, a page at a time as QEMU submits them.
    Pages,
    /// The pool with batches, as platen uses them.
    Batches,
}

impl Scheme {
    pub(super) const ALL: [Self; 3] = [Self::Old, Self::Pages, Self::Batches];

    fn batch(self) -> usize {
        match self {
            Self::Old | Self::Pages => PAGE_SIZE,
            Self::Batches => 128 * PAGE_SIZE,
        }
    }
}

/// The direction of the pages, and the behaviour when no thread is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Compress { wait: bool },
    Decompress,
}

impl Way {
    pub(super) const ALL: [Self; 3] =
        [Self::Compress { wait: false }, Self::Compress { wait: true }, Self::Decompress];
}

/// Medians over the runs of one scheme.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) threads: usize,
    pub(super) way: Way,
    pub(super) scheme: Scheme,
    pub(super) total_ms: f64,
    /// Total time of the old scheme over this one's, for each pair of neighbouring runs.
    pub(super) faster: f64,
    pub(super) busy_rate: f64,
    /// Share of one CPU, percent.
    pub(super) submitter: f64,
    /// The same for the least and the most active worker.
    pub(super) workers: (f64, f64),
    pub(super) cpu_ms: f64,
    pub(super) sent: f64,
    /// Total time of each run, ms.
    pub(super) total_ms_runs: Vec<f64>,
    /// CPU time of each run, ms.
    pub(super) cpu_ms_runs: Vec<f64>,
}

pub(super) fn measure(pages: &Pages, plan: &Plan) -> anyhow::Result<Vec<Row>> {
    let single = encode_all(pages.bytes, plan.settings, Scheme::Pages.batch());
    let batched = encode_all(pages.bytes, plan.settings, Scheme::Batches.batch());
    let mut rows = Vec::new();
    for way in Way::ALL {
        for &threads in &plan.threads {
            let mut runs = Scheme::ALL.map(|_| Vec::new());
            for _ in 0..plan.runs {
                for (scheme, runs) in Scheme::ALL.into_iter().zip(&mut runs) {
                    let units = if scheme == Scheme::Batches { &batched } else { &single };
                    runs.push(one(pages, plan, way, threads, scheme, units)?);
                }
            }
            let total = |run: &Run| run.wall.as_secs_f64();
            let old: Vec<f64> = runs[0].iter().map(total).collect();
            for (scheme, runs) in Scheme::ALL.into_iter().zip(&runs) {
                let of = |value: &dyn Fn(&Run) -> f64| median(runs.iter().map(value).collect());
                let share =
                    |cpu: std::time::Duration, run: &Run| cpu.as_secs_f64() * 100.0 / total(run);
                rows.push(Row {
                    threads,
                    way,
                    scheme,
                    total_ms: of(&|run| total(run) * 1e3),
                    faster: median(
                        old.iter().zip(runs).map(|(old, run)| old / total(run)).collect(),
                    ),
                    busy_rate: of(&|run| run.busy as f64 / run.pages as f64),
                    submitter: of(&|run| share(run.submitter, run)),
                    workers: (
                        of(&|run| run.workers.iter().min().map_or(0.0, |&cpu| share(cpu, run))),
                        of(&|run| run.workers.iter().max().map_or(0.0, |&cpu| share(cpu, run))),
                    ),
                    cpu_ms: of(&|run| run.cpu().as_secs_f64() * 1e3),
                    sent: of(&|run| run.sent as f64),
                    total_ms_runs: runs.iter().map(|run| total(run) * 1e3).collect(),
                    cpu_ms_runs: runs.iter().map(|run| run.cpu().as_secs_f64() * 1e3).collect(),
                });
            }
        }
    }
    Ok(rows)
}

fn one(
    pages: &Pages,
    plan: &Plan,
    way: Way,
    threads: usize,
    scheme: Scheme,
    units: &[Unit],
) -> anyhow::Result<Run> {
    let run = match (way, scheme) {
        (Way::Compress { wait }, Scheme::Old) => {
            old::compress(pages.bytes, threads, wait, plan.settings, plan.link_gbit)
        }
        (Way::Compress { wait }, _) => compress(pages.bytes, threads, wait, scheme.batch(), plan)?,
        (Way::Decompress, _) => {
            let mut dest = Dest::new(pages.bytes, scheme.batch());
            match scheme {
                Scheme::Old => old::decompress(units, &mut dest, threads)?,
                _ => decompress(units, &mut dest, threads, scheme.batch())?,
            }
        }
    };
    let page_count = (pages.bytes.len() / PAGE_SIZE) as u64;
    anyhow::ensure!(run.pages == page_count, "{} of {page_count} pages came through", run.pages);
    if matches!(way, Way::Compress { .. }) && run.busy == 0 {
        // Every page was compressed, so the bytes on the link are those of a plain loop.
        let want: usize = units.iter().map(|unit| unit.payload.len()).sum();
        anyhow::ensure!(run.sent == want as u64, "{} bytes were sent, not {want}", run.sent);
    }
    Ok(run)
}

fn compress(
    pages: &'static [u8],
    threads: usize,
    wait: bool,
    batch: usize,
    plan: &Plan,
) -> anyhow::Result<Run> {
    let config = PoolConfig { threads, ring_capacity: RING_CAPACITY, name: "bench" };
    let pool = Pool::new(config, |_| Compressor::copying(plan.settings, batch))?;
    let slots = pool.depth() * 2;
    let arena = Arena::new(slots, batch)?;
    let results: Arc<Results<Encoded>> = Results::new(slots);
    // This thread also feeds the link, which must not run dry while the thread waits. With pages it
    // sleeps until there is room for many, as the link's buffer lasts for hundreds of them. A batch
    // is a good part of that buffer: when there is no room for a batch, the thread waits for a
    // result, and sends it.
    let wait_for_result = wait && batch > PAGE_SIZE;
    let sleep_for_room = wait && !wait_for_result;
    let submitter = Submitter::new(Arc::clone(&pool), Arc::clone(&results), sleep_for_room);
    let mut link = Link::new(plan.link_gbit);
    let mut run = Run::default();
    let mut fetched = 0;
    let watch = Watch::start();
    for plain in pages.chunks(batch) {
        let page_count = (plain.len() / PAGE_SIZE) as u64;
        run.pages += page_count;
        while let Some(done) = results.pop() {
            link.send(done.payload());
            fetched += 1;
        }
        let mut out = arena.take();
        while out.is_none() {
            fetched += fetch(&results, &mut link);
            out = arena.take();
        }
        let out = out.expect("the loop before ends with a slot");
        let mut next = Some(Encode { seq: 0, plain, out });
        while let Some(job) = next.take() {
            match submitter.submit(job, page_count) {
                Submitted::Queued => run.jobs += 1,
                Submitted::Busy(job) if wait_for_result => {
                    fetched += fetch(&results, &mut link);
                    next = Some(job);
                }
                Submitted::Busy(job) => link.send(job.plain),
                Submitted::Closed(_) => anyhow::bail!("the pool was closed under us"),
            }
        }
    }
    while fetched < run.jobs {
        fetched += fetch(&results, &mut link);
    }
    run.sent = link.finish();
    (run.wall, run.submitter) = watch.stop();
    if !wait {
        run.busy = submitter.counters().busy_pages;
    }
    pool.join();
    run.workers = pool.cpu_times();
    Ok(run)
}

/// Waits for a result and sends it. Returns the number of results: one, as the ring is never
/// closed.
fn fetch(results: &Results<Encoded>, link: &mut Link) -> u64 {
    match results.pop_until(None) {
        Popped::Item(done) => {
            link.send(done.payload());
            1
        }
        Popped::Timeout | Popped::Closed => 0,
    }
}

/// As in QEMU and in the patch series: four requests a thread.
const RING_CAPACITY: usize = 4;

/// A unit to decompress.
struct Decode {
    index: usize,
    header: UnitHeader,
    payload: Slot,
    dest: &'static mut [u8],
}

impl Job for Decode {
    type Output = (usize, &'static mut [u8]);
    type Context = Decoder;

    fn run(self, decoder: &mut Decoder) -> Self::Output {
        let payload = &self.payload[..self.header.payload_len as usize];
        decoder.decode(&self.header, payload, self.dest).expect("made by the encoder");
        (self.index, self.dest)
    }
}

fn decompress(
    units: &[Unit],
    dest: &mut Dest,
    threads: usize,
    batch: usize,
) -> anyhow::Result<Run> {
    let config = PoolConfig { threads, ring_capacity: RING_CAPACITY, name: "bench" };
    let pool = Pool::new(config, |_| Decoder::new())?;
    let slots = pool.depth() * 2;
    let arena = Arena::new(slots, batch)?;
    let results: Arc<Results<(usize, &'static mut [u8])>> = Results::new(slots);
    let submitter = Submitter::new(Arc::clone(&pool), Arc::clone(&results), true);
    let mut run = Run::default();
    let watch = Watch::start();
    for (index, unit) in units.iter().enumerate() {
        while let Some((index, page)) = results.pop() {
            dest.put_back(index, Some(page));
        }
        let mut payload = arena.take_until(None, || false).expect("never told to stop");
        payload[..unit.payload.len()].copy_from_slice(&unit.payload);
        let job = Decode { index, header: unit.header, payload, dest: dest.take(index) };
        run.pages += u64::from(unit.header.plain_len) / PAGE_SIZE as u64;
        match submitter.submit(job, 1) {
            Submitted::Queued => run.jobs += 1,
            _ => anyhow::bail!("the pool was closed under us"),
        }
    }
    submitter.flush();
    while let Some((index, page)) = results.pop() {
        dest.put_back(index, Some(page));
    }
    (run.wall, run.submitter) = watch.stop();
    pool.join();
    run.workers = pool.cpu_times();
    dest.check()?;
    Ok(run)
}
