//! `latency mib=N go=FILE [seed=S] [threads=T]`: fills N MiB and waits until FILE exists, so that
//! the pages can be swapped out meanwhile. Then T threads read one word of each page, each thread
//! its own part in random order, and measure each read.
//!
//! A read without a fault is far faster than one with a fault. So the swap-ins are the slowest
//! reads, as many as there were major faults.

use super::content::{self, Page};
use super::{option, Failure};
use crate::pattern::{mix, PAGE};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Measures, and returns `ok faults=... p50_ns=... p99_ns=... p999_ns=... max_ns=...`.
pub(crate) fn run(words: &[&str]) -> Result<String, Failure> {
    let seed = option(words, "seed", 1)?;
    let count = size(option(words, "mib", 32)? * 256)?;
    let threads = size(option(words, "threads", 1)?)?.max(1);
    let go = words.iter().find_map(|word| word.strip_prefix("go=")).map(Path::new);
    let go = go.ok_or_else(|| Failure::Cannot("no go=FILE".into()))?;
    // Aligned, so that each read and its comparison fault on a single page.
    let mut memory = vec![0_u8; (count + 1) * PAGE];
    let start = memory.as_ptr().align_offset(PAGE);
    let (memory, _) = memory[start..start + count * PAGE].as_chunks_mut::<PAGE>();
    for (index, page) in (0..).zip(memory.iter_mut()) {
        content::fill(seed, index, 0, page);
    }
    let memory = &*memory;
    println!("filled pages={count}");
    let _ = std::io::stdout().flush();
    while !go.exists() {
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = major_faults()?;
    let part = count.div_ceil(threads);
    let reads: Vec<_> = std::thread::scope(|scope| {
        let parts: Vec<_> = memory.chunks(part).zip(0..).collect();
        let started: Vec<_> = parts
            .into_iter()
            .map(|(pages, nth)| scope.spawn(move || read(pages, seed, nth * part as u64)))
            .collect();
        started.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let faults = size(major_faults()?.saturating_sub(before))?;
    let mut times = Vec::new();
    for part in reads {
        times.extend(part.map_err(|_| Failure::Cannot("a thread has panicked".into()))??);
    }
    times.sort_unstable();
    let swapped = &times[times.len().saturating_sub(faults)..];
    if swapped.is_empty() {
        return Err(Failure::Cannot("no page was swapped out".into()));
    }
    let at = |parts: usize| swapped[(swapped.len() * parts / 1000).min(swapped.len() - 1)];
    let last = swapped[swapped.len() - 1];
    let (p50, p99, p999) = (at(500), at(990), at(999));
    Ok(format!("ok faults={faults} p50_ns={p50} p99_ns={p99} p999_ns={p999} max_ns={last}"))
}

/// Duration of a read of each page in nanoseconds; `first` is the number of the first page.
fn read(pages: &[Page], seed: u64, first: u64) -> Result<Vec<u64>, Failure> {
    let mut order: Vec<usize> = (0..pages.len()).collect();
    for nth in (1..order.len()).rev() {
        order.swap(nth, content::low(mix(seed, nth as u64, first), nth + 1));
    }
    let mut times = Vec::with_capacity(order.len());
    let mut expected: Page = [0; PAGE];
    for at in order {
        let begin = Instant::now();
        std::hint::black_box(pages[at][PAGE / 2]);
        times.push(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let index = first + at as u64;
        if let Some(what) =
            content::wrong(content::fill, (seed, index, 0), &pages[at], &mut expected)
        {
            return Err(Failure::Wrong(what));
        }
    }
    Ok(times)
}

fn size(number: u64) -> Result<usize, Failure> {
    usize::try_from(number).map_err(|e| Failure::Cannot(e.to_string()))
}

/// Major faults of this process (`proc(5)`, `stat`, field 12).
fn major_faults() -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/self/stat")?;
    // The second field is a name in parentheses, which may contain any character.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace().nth(9);
    fields
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| Failure::Cannot(format!("/proc/self/stat: {text}")))
}
