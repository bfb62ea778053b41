//! The memory under test: shards of pages, each with a table of its pages' expected states.
//!
//! A shard belongs to one thread at a time: the console thread fills it, a verifying thread reads
//! it, and a dirtying thread owns it until it is asked to stop. So nothing here is shared, and only
//! the hypervisor ever sees a partly written page, which is what the test is about.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::pattern::{apply_small, mix, Corpus, Page, State, MAX_SMALL, PAGE};
use crate::torn::is_torn;

/// The expected sum of a shard's table, in other pages of memory than the table itself.
///
/// A stale table page that arrives with a stale data page would agree with it, but not with this
/// sum, which changes with every update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) whole: u64,
    pub(crate) small: u64,
    pub(crate) check: u64,
}

/// A contiguous run of pages and their table.
#[derive(Debug)]
pub(crate) struct Shard {
    first: u64,
    pages: Vec<Page>,
    table: Vec<State>,
    totals: Totals,
    random: u64,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Page({:02x?}..)", &self.0[..8])
    }
}

/// Counters that a running dirtying thread publishes.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) whole: AtomicU64,
    pub(crate) small: AtomicU64,
    pub(crate) loops: AtomicU64,
}

/// The load on a shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Updates a second.
    pub(crate) rate: u64,
    /// Of a hundred updates, the number that rewrite the whole page.
    pub(crate) whole_percent: u64,
    /// Only this many pages from the start of the shard are touched.
    pub(crate) pages: u64,
}

impl Shard {
    /// Fills pages `first..first + count` with version 0 of their contents.
    pub(crate) fn fill(corpus: &Corpus, first: u64, count: u64) -> io::Result<Self> {
        let len = usize::try_from(count).map_err(io::Error::other)?;
        let mut pages: Vec<Page> = Vec::with_capacity(len);
        let mut page = Page([0; PAGE]);
        let mut totals = Totals::default();
        for index in first..first + count {
            corpus.whole(index, 0, &mut page)?;
            pages.push(page.clone());
            totals.check = totals.check.wrapping_add(State::default().weight(index));
        }
        let random = mix(first, count, 7);
        Ok(Self { first, pages, table: vec![State::default(); len], totals, random })
    }

    /// Updates pages at the given rate until `stop` is set, then returns the shard.
    pub(crate) fn dirty(
        mut self,
        corpus: &Corpus,
        load: Load,
        stop: &AtomicBool,
        progress: &Progress,
    ) -> io::Result<Self> {
        const TICK: Duration = Duration::from_millis(4);
        // Updates that the guest missed (it was stopped, or the host was busy) are made up for only
        // up to this limit.
        const BACKLOG: Duration = Duration::from_millis(40);
        let mut paid = Instant::now();
        while !stop.load(Ordering::Acquire) {
            let due = paid.elapsed().min(BACKLOG);
            let updates = u128::from(load.rate) * due.as_micros() / 1_000_000;
            if updates > 0 {
                paid = Instant::now();
            }
            for _ in 0..updates {
                self.update(corpus, load)?;
            }
            progress.whole.store(self.totals.whole, Ordering::Relaxed);
            progress.small.store(self.totals.small, Ordering::Relaxed);
            progress.loops.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(TICK);
        }
        Ok(self)
    }

    fn update(&mut self, corpus: &Corpus, load: Load) -> io::Result<()> {
        self.random = mix(self.random, 0, 8);
        let range = load.pages.clamp(1, self.table.len() as u64);
        let slot = usize::try_from(self.random % range).map_err(io::Error::other)?;
        let index = self.first + slot as u64;
        let old = self.table[slot];
        let whole = (self.random >> 32) % 100 < load.whole_percent || old.small >= MAX_SMALL;
        let new = if whole {
            State { version: old.version + 1, small: 0 }
        } else {
            State { version: old.version, small: old.small + 1 }
        };
        if whole {
            corpus.whole(index, new.version, &mut self.pages[slot])?;
            self.totals.whole += 1;
        } else {
            apply_small(index, new, &mut self.pages[slot]);
            self.totals.small += 1;
        }
        self.table[slot] = new;
        self.totals.check =
            self.totals.check.wrapping_sub(old.weight(index)).wrapping_add(new.weight(index));
        Ok(())
    }

    /// Compares every byte of every page with its expected value; returns the totals, or the error.
    pub(crate) fn verify(&self, corpus: &Corpus) -> Result<Totals, String> {
        let mut check = 0u64;
        let mut want = Page([0; PAGE]);
        let mut bad = 0u64;
        let mut first_bad = None;
        for ((page, &state), index) in self.pages.iter().zip(&self.table).zip(self.first..) {
            check = check.wrapping_add(state.weight(index));
            corpus.expected(index, state, &mut want).map_err(|e| format!("corpus: {e}"))?;
            if page.0 != want.0 {
                bad += 1;
                first_bad.get_or_insert_with(|| describe(corpus, index, state, page, &want));
            }
        }
        if let Some(first) = first_bad {
            return Err(format!("pages={bad} first: {first}"));
        }
        if check != self.totals.check {
            return Err(format!(
                "table of pages {}.. adds up to {check:016x}, not {:016x}",
                self.first, self.totals.check
            ));
        }
        Ok(self.totals)
    }

    /// Flips one bit, to show that `verify` notices. Returns false if the page is not in this
    /// shard.
    pub(crate) fn corrupt(&mut self, index: u64, offset: usize) -> bool {
        let slot = index.checked_sub(self.first).and_then(|slot| usize::try_from(slot).ok());
        let Some(page) = slot.and_then(|slot| self.pages.get_mut(slot)) else { return false };
        page.0[offset % PAGE] ^= 0x10;
        true
    }

    /// Pages in the shard.
    pub(crate) fn len(&self) -> u64 {
        self.pages.len() as u64
    }
}

/// Describes where a page differs, whether it is an older state of itself (a page that was not sent
/// again), and whether its last update is there in part.
fn describe(corpus: &Corpus, index: u64, state: State, got: &Page, want: &Page) -> String {
    let at = got.0.iter().zip(&want.0).position(|(a, b)| a != b).unwrap_or(0);
    let end = PAGE.min(at + 8);
    let differ = got.0.iter().zip(&want.0).filter(|(a, b)| a != b).count();
    let mut old = Page([0; PAGE]);
    let mut stale = "no";
    for version in (state.version.saturating_sub(3)..=state.version).rev() {
        let newest = if version == state.version { state.small } else { MAX_SMALL };
        for small in (0..=newest).rev() {
            let older = State { version, small };
            if corpus.expected(index, older, &mut old).is_ok() && old.0 == got.0 {
                stale = "yes";
            }
        }
    }
    format!(
        "page={index} offset={at} expected={:02x?} got={:02x?} bytes-differing={differ} version={} small={} stale={stale} torn={}",
        &want.0[at..end],
        &got.0[at..end],
        state.version,
        state.small,
        if is_torn(corpus, index, state, got).unwrap_or(false) { "yes" } else { "no" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A corpus of `pages` pages, all different.
    fn corpus(name: &str, pages: u64) -> Corpus {
        let path = std::env::temp_dir().join(format!("guest-corpus-{name}-{}", std::process::id()));
        let mut file = std::fs::File::create(&path).expect("temporary file");
        for page in 0..pages {
            let bytes: Vec<u8> = (0..PAGE as u64 / 8)
                .flat_map(|word| (mix(page, word / 3, 9) & 0x0f0f_0f0f).to_le_bytes())
                .collect();
            file.write_all(&bytes).expect("temporary file");
        }
        let corpus = Corpus::open(path.to_str().expect("utf-8")).expect("just written");
        std::fs::remove_file(&path).expect("just written");
        corpus
    }

    const LOAD: Load = Load { rate: 1, whole_percent: 30, pages: 50 };

    #[test]
    fn updates_produce_the_contents_that_the_table_states() {
        let corpus = corpus("updates", 20);
        let mut shard = Shard::fill(&corpus, 7, 64).expect("fill");
        for _ in 0..20_000 {
            shard.update(&corpus, LOAD).expect("update");
        }
        let totals = shard.verify(&corpus).expect("good");
        assert_eq!(totals.whole + totals.small, 20_000);
        assert!(totals.whole > 5_000 && totals.small > 10_000, "{totals:?}");
    }

    #[test]
    fn one_flipped_bit_is_found_and_named() {
        let corpus = corpus("flip", 20);
        let mut shard = Shard::fill(&corpus, 100, 64).expect("fill");
        assert!(shard.corrupt(140, 4095));
        let error = shard.verify(&corpus).expect_err("a bit was flipped");
        assert!(error.contains("pages=1 ") && error.contains("page=140 offset=4095"), "{error}");
    }

    #[test]
    fn a_page_that_was_not_resent_is_reported_stale() {
        let corpus = corpus("stale", 20);
        let mut shard = Shard::fill(&corpus, 0, 1).expect("fill");
        shard.update(&corpus, Load { whole_percent: 0, ..LOAD }).expect("update");
        let old = shard.pages[0].clone();
        shard.update(&corpus, Load { whole_percent: 0, ..LOAD }).expect("update");
        shard.pages[0] = old;
        let error = shard.verify(&corpus).expect_err("page is old");
        assert!(error.contains("stale=yes"), "{error}");
    }

    #[test]
    fn a_table_that_is_stale_with_its_page_is_found() {
        let corpus = corpus("table", 20);
        let mut shard = Shard::fill(&corpus, 0, 8).expect("fill");
        let (page, state) = (shard.pages[0].clone(), shard.table[0]);
        shard.update(&corpus, Load { pages: 1, ..LOAD }).expect("update");
        shard.pages[0] = page;
        shard.table[0] = state;
        let error = shard.verify(&corpus).expect_err("the table is old");
        assert!(error.contains("adds up to"), "{error}");
    }
}
