//! The init of the test VM.
//!
//! The harness controls it over the serial console, one command a line. Every answer is one line
//! that starts with `@`, so that kernel messages between the lines do no harm:
//!
//! ```text
//! ping                       @ok pong
//! fill MIB SHARDS            @ok pages=N corpus=N ms=N
//! dirty RATE WHOLE% MIB      @ok                 updates/s, share of whole-page rewrites, range
//! stop                       @ok whole=N small=N
//! work                       @ok beats=N loops=N whole=N small=N
//! verify                     @ok pages=N whole=N small=N cpus=N ms=N      or  @bad ...
//! corrupt PAGE OFFSET        @ok                 flips one bit, to show that verify notices
//! ```
//!
//! Errors: `@err REASON` for a command that is not possible. A panic ends the init and so the
//! kernel, and the harness reports the console. Limits: memory is filled once and never freed.

mod memory;
mod pattern;
mod swap;
mod torn;

use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memory::{Load, Progress, Shard, Totals};
use pattern::{Corpus, PAGE};
use rustix::thread::{sched_setaffinity, CpuSet};

const PAGES_PER_MIB: u64 = (1 << 20) / PAGE as u64;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [role, words @ ..] = words.as_slice() {
        if role == "swap" {
            return swap::main(words);
        }
    }
    migrated();
    ExitCode::SUCCESS
}

/// The guest of the migration tests.
fn migrated() {
    if let Err(error) = raw_console() {
        say(&format!("@err console: {error}"));
    }
    let corpus = match Corpus::open("/corpus") {
        Ok(corpus) => Arc::new(corpus),
        Err(error) => panic!("/corpus: {error}"),
    };
    let beats = Arc::new(AtomicU64::new(0));
    let beating = Arc::clone(&beats);
    std::thread::spawn(move || loop {
        beating.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(10));
    });

    let mut guest = Guest { corpus, beats, shards: Vec::new(), running: Vec::new(), stop: None };
    say(&format!("@ready corpus={}", guest.corpus.pages()));
    for line in io::stdin().lock().lines() {
        let line = line.expect("the console stays readable");
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        match guest.command(&words) {
            Ok(answer) => say(&format!("@ok {answer}")),
            Err(Refusal::Bad(why)) => say(&format!("@bad {why}")),
            Err(Refusal::Cannot(why)) => say(&format!("@err {why}")),
        }
    }
}

/// Why a command did not succeed.
enum Refusal {
    /// Memory has a wrong byte.
    Bad(String),
    /// The command is invalid, or not possible now.
    Cannot(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Cannot(error.to_string())
    }
}

/// A dirtying thread, which returns its shard.
struct Dirtier {
    thread: JoinHandle<io::Result<Shard>>,
    progress: Arc<Progress>,
}

struct Guest {
    corpus: Arc<Corpus>,
    beats: Arc<AtomicU64>,
    shards: Vec<Shard>,
    running: Vec<Dirtier>,
    stop: Option<Arc<AtomicBool>>,
}

impl Guest {
    fn command(&mut self, words: &[&str]) -> Result<String, Refusal> {
        match words {
            ["ping"] => Ok("pong".into()),
            ["fill", mib, shards] => self.fill(number(mib)?, number(shards)?),
            ["dirty", rate, whole, mib] => self.dirty(number(rate)?, number(whole)?, number(mib)?),
            ["stop"] => self.stop(),
            ["work"] => Ok(self.work()),
            ["verify"] => self.verify(),
            ["corrupt", page, offset] => self.corrupt(number(page)?, number(offset)?),
            _ => Err(Refusal::Cannot(format!("unknown command {words:?}"))),
        }
    }

    fn fill(&mut self, mib: u64, shards: u64) -> Result<String, Refusal> {
        if !self.shards.is_empty() || self.stop.is_some() {
            return Err(Refusal::Cannot("memory is filled already".into()));
        }
        let begin = Instant::now();
        let pages = mib * PAGES_PER_MIB;
        let rounds = pages.div_ceil(self.corpus.pages());
        if pages == 0 || shards == 0 || rounds > 255 {
            return Err(Refusal::Cannot(format!("{mib} MiB in {shards} shards, {rounds} rounds")));
        }
        for shard in 0..shards {
            let (first, end) = (pages * shard / shards, pages * (shard + 1) / shards);
            self.shards.push(Shard::fill(&self.corpus, first, end - first)?);
        }
        // There is no swap, but the page cache must not lose the pages either (it may reclaim
        // others).
        rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT).map_err(io::Error::from)?;
        let ms = begin.elapsed().as_millis();
        Ok(format!("pages={pages} corpus={} ms={ms}", self.corpus.pages()))
    }

    fn dirty(&mut self, rate: u64, whole_percent: u64, mib: u64) -> Result<String, Refusal> {
        self.must_be_still()?;
        let threads = self.shards.len() as u64;
        let load =
            Load { rate: rate / threads, whole_percent, pages: mib * PAGES_PER_MIB / threads };
        let stop = Arc::new(AtomicBool::new(false));
        for shard in self.shards.drain(..) {
            let progress = Arc::new(Progress::default());
            let (corpus, stop) = (Arc::clone(&self.corpus), Arc::clone(&stop));
            let shown = Arc::clone(&progress);
            let thread = std::thread::spawn(move || shard.dirty(&corpus, load, &stop, &shown));
            self.running.push(Dirtier { thread, progress });
        }
        self.stop = Some(stop);
        Ok(format!("threads={threads} rate={rate}"))
    }

    fn stop(&mut self) -> Result<String, Refusal> {
        let Some(stop) = self.stop.take() else {
            return Err(Refusal::Cannot("nothing is dirtying memory".into()));
        };
        stop.store(true, Ordering::Release);
        let (mut whole, mut small) = (0, 0);
        for dirtier in self.running.drain(..) {
            let shard = dirtier.thread.join().expect("a panic is an abort")?;
            whole += dirtier.progress.whole.load(Ordering::Relaxed);
            small += dirtier.progress.small.load(Ordering::Relaxed);
            self.shards.push(shard);
        }
        Ok(format!("whole={whole} small={small}"))
    }

    fn work(&self) -> String {
        let sum = |pick: fn(&Progress) -> &AtomicU64| -> u64 {
            self.running.iter().map(|d| pick(&d.progress).load(Ordering::Relaxed)).sum()
        };
        format!(
            "beats={} loops={} whole={} small={}",
            self.beats.load(Ordering::Relaxed),
            sum(|p| &p.loops),
            sum(|p| &p.whole),
            sum(|p| &p.small)
        )
    }

    fn verify(&self) -> Result<String, Refusal> {
        self.must_be_still()?;
        let begin = Instant::now();
        let cpus = std::thread::available_parallelism()?.get();
        let mut sum = Totals::default();
        let mut pages = 0;
        for (shard, totals) in self.shards.iter().zip(self.verify_shards(cpus)) {
            let totals = totals.map_err(Refusal::Bad)?;
            sum.whole += totals.whole;
            sum.small += totals.small;
            pages += shard.len();
        }
        let cpus = cpus.min(self.shards.len());
        let ms = begin.elapsed().as_millis();
        Ok(format!("pages={pages} whole={} small={} cpus={cpus} ms={ms}", sum.whole, sum.small))
    }

    /// Verifies all shards at once, each on a CPU of its own as far as there are that many: CPUs
    /// that touch missing pages at the same time wait for them at the same time.
    fn verify_shards(&self, cpus: usize) -> Vec<Result<Totals, String>> {
        std::thread::scope(|scope| {
            let threads = self.shards.iter().enumerate().map(|(nth, shard)| {
                scope.spawn(move || {
                    let mut cpu = CpuSet::new();
                    cpu.set(nth % cpus);
                    sched_setaffinity(None, &cpu).map_err(|e| format!("CPU {nth}: {e}"))?;
                    shard.verify(&self.corpus)
                })
            });
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().expect("a panic is an abort")).collect()
        })
    }

    fn corrupt(&mut self, page: u64, offset: u64) -> Result<String, Refusal> {
        self.must_be_still()?;
        let offset = usize::try_from(offset).map_err(|e| Refusal::Cannot(e.to_string()))?;
        match self.shards.iter_mut().any(|shard| shard.corrupt(page, offset)) {
            true => Ok(String::new()),
            false => Err(Refusal::Cannot(format!("no page {page}"))),
        }
    }

    fn must_be_still(&self) -> Result<(), Refusal> {
        if self.stop.is_some() {
            return Err(Refusal::Cannot("memory is being dirtied: say stop first".into()));
        }
        if self.shards.is_empty() {
            return Err(Refusal::Cannot("memory is not filled: say fill first".into()));
        }
        Ok(())
    }
}

fn number(word: &str) -> Result<u64, Refusal> {
    word.parse().map_err(|e| Refusal::Cannot(format!("{word:?}: {e}")))
}

/// One write a line, so that kernel messages come between lines.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).expect("the console stays writable");
    out.flush().expect("the console stays writable");
}

/// No echo, no line editing, no signals: the console carries a protocol.
fn raw_console() -> io::Result<()> {
    let console = rustix::stdio::stdin();
    let mut settings = rustix::termios::tcgetattr(console)?;
    settings.make_raw();
    rustix::termios::tcsetattr(console, rustix::termios::OptionalActions::Now, &settings)?;
    Ok(())
}
