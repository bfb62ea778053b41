//! `eat mib=N [seed=S] [after=FILE] [seconds=T] [until=FILE] [touch=P] [random=1] [half=1]
//! [check=C]`: allocates and fills N MiB, and for T seconds and until FILE exists reads and
//! rewrites random pages, each compared with its expected contents; at the end compares all of
//! them. It frees what it has compared: otherwise the last comparison would swap out each page
//! again that it has yet to read, and take most of the test. Between filling and touching it
//! waits, without touching its memory, until the file of `after` exists.
//!
//! Of the touched pages P per cent are rewritten (default 30). With `random=1` no page compresses,
//! with `half=1` each compresses to half, at little CPU time. With `check=C` only each C-th MiB is
//! compared at the end, and the rest is freed.
//! Reports its progress every second (`beat`), which shows a test that it is not waiting for
//! memory.

use super::content::{self, Page};
use super::{option, Failure};
use crate::pattern::{mix, PAGE};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pages that are allocated and freed together. An allocation of this size is a mapping of its own,
/// so that the kernel has its memory, and its swap slots, back at once.
const PART: usize = 256;

/// Runs, and prints `ok pages=... touched=... ms=...`.
pub(crate) fn run(words: &[&str]) -> Result<String, Failure> {
    let seed = option(words, "seed", 1)?;
    let pages = option(words, "mib", 64)? * 256;
    let limit = Duration::from_secs(option(words, "seconds", 0)?);
    let percent = option(words, "touch", 30)?;
    let fill = match (option(words, "random", 0)?, option(words, "half", 0)?) {
        (0, 0) => content::fill,
        (0, _) => content::fill_half,
        _ => content::fill_random,
    };
    let check = usize::try_from(option(words, "check", 1)?).unwrap_or(1).max(1);
    let file = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)).map(Path::new);
    let (after, until) = (file("after="), file("until="));
    let count = usize::try_from(pages).map_err(|e| Failure::Cannot(e.to_string()))?;
    let begin = Instant::now();
    let mut beat = Beat { last: begin, begin };
    let mut memory: Vec<Vec<Page>> = Vec::new();
    let mut versions = vec![0_u32; count];
    let mut scratch: Page = [0; PAGE];
    for index in 0..pages {
        fill(seed, index, 0, &mut scratch);
        if memory.last().is_none_or(|part| part.len() == PART) {
            // Not touched before it is filled.
            let mut part = Vec::new();
            part.try_reserve_exact(PART).map_err(|e| Failure::Cannot(e.to_string()))?;
            memory.push(part);
        }
        if let Some(part) = memory.last_mut() {
            part.push(scratch);
        }
        beat.tick("filled", index);
    }
    println!("filled pages={pages} ms={}", begin.elapsed().as_millis());
    let _ = std::io::stdout().flush();
    while after.is_some_and(|file| !file.exists()) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let (mut touched, end) = (0_u64, Instant::now() + limit);
    // The file system is checked rarely.
    while Instant::now() < end || until.is_some_and(|file| touched % 256 > 0 || !file.exists()) {
        let draw = mix(seed, touched, 7);
        let at = content::low(draw, count);
        let index = at as u64;
        let version = &mut versions[at];
        let page = (seed, index, u64::from(*version));
        if let Some(what) = content::wrong(fill, page, &memory[at / PART][at % PART], &mut scratch)
        {
            return Err(Failure::Wrong(what));
        }
        if draw >> 40 & 127 < percent * 128 / 100 {
            *version += 1;
            fill(seed, index, u64::from(*version), &mut memory[at / PART][at % PART]);
        }
        touched += 1;
        beat.tick("touched", touched);
    }
    for (nth, part) in memory.into_iter().enumerate().filter(|(nth, _)| nth % check == 0) {
        for (at, there) in part.iter().enumerate() {
            let at = nth * PART + at;
            let page = (seed, at as u64, u64::from(versions[at]));
            if let Some(what) = content::wrong(fill, page, there, &mut scratch) {
                return Err(Failure::Wrong(what));
            }
            beat.tick("verified", at as u64);
        }
    }
    Ok(format!("ok pages={pages} touched={touched} ms={}", begin.elapsed().as_millis()))
}

struct Beat {
    last: Instant,
    begin: Instant,
}

impl Beat {
    fn tick(&mut self, what: &str, number: u64) {
        // The clock is read rarely.
        if number.is_multiple_of(64) && self.last.elapsed() >= Duration::from_secs(1) {
            println!(
                "beat {what}={number} ms={} gap={}",
                self.begin.elapsed().as_millis(),
                self.last.elapsed().as_millis()
            );
            let _ = std::io::stdout().flush();
            self.last = Instant::now();
        }
    }
}
