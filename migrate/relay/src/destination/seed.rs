//! Puts pages that this host has already into the chunks that refer to them (W29b).
//!
//! ```text
//!  codec thread ── chunk ──► reader threads: read the pages, fill ── chunk ──► deliver
//! ```
//!
//! The pages are on a disk, which may hang. Threads of the session read them, and the stream's
//! writer waits for a chunk until no page was read for [`READS`]. No codec thread waits: other
//! sessions share them, and a VM of theirs may be stopped. A read that never returns keeps its
//! thread, and no memory of the session.

mod requests;

use requests::{Request, Requests};

use crate::error::RelayError;
use crate::inbox::Filling;
use crate::threads::spawn;
use delta::{Layout, PageReader, SeedPages, Table};
use pages::Slot;
use session::{Header, SessionError, FLAG_BODIES};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a chunk is waited for while the disk gives no page at all: many chunks of other streams
/// may be in front of it, and each page of a chunk may be in another place of the disk.
const READS: Duration = Duration::from_secs(10);
/// How long one wait of these takes, and the most of it that counts. A longer one shows that this
/// process was stopped, and its readers with it.
const STEP: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(1));
/// Threads that read pages. One keeps up with a link of some Gbit/s.
const READERS: usize = 4;

/// A chunk with the pages of the seed.
pub(super) enum Filled {
    /// The chunk refers to no page.
    Already(Slot),
    /// The reader threads have the chunk.
    Later(Filling),
}

/// The seed of one session.
pub(crate) struct SessionSeed {
    /// The slot of the first page.
    base: u32,
    page_size: usize,
    /// Set once the seed is open.
    pages: OnceLock<Arc<dyn SeedPages>>,
    /// To the reader threads, which start with the first chunk.
    requests: Arc<Requests>,
    /// Pages that the disk has given, or refused.
    reads: Arc<AtomicU64>,
    /// A reader has not answered in time.
    hangs: AtomicBool,
}

impl SessionSeed {
    /// Creates a seed without pages. The first page has slot `base`.
    pub(crate) fn new(base: u32, page_size: usize) -> Self {
        let (requests, reads) = Default::default();
        let (pages, hangs) = (OnceLock::new(), AtomicBool::new(false));
        Self { base, page_size, pages, requests, reads, hangs }
    }

    /// Sets the pages, once.
    pub(super) fn open(&self, pages: Arc<dyn SeedPages>) {
        let _ = self.pages.set(pages);
    }

    /// The slot of the first page.
    pub(super) fn base(&self) -> u32 {
        self.base
    }

    /// The number of pages.
    pub(super) fn pages(&self) -> u32 {
        self.pages.get().map_or(0, |pages| pages.pages())
    }

    /// Begins to put pages of the seed into a chunk whose delta table refers to them. The table is
    /// behind the chunk's bytes. Waits for no disk.
    ///
    /// # Errors
    /// The disk hangs; there are no threads.
    pub(super) fn begin(&self, header: &Header, chunk: Slot) -> Result<Filled, SessionError> {
        let (len, table_len) = (header.plain_len as usize, header.table_len as usize);
        let Some(pages) = self.pages.get().filter(|_| table_len > 0) else {
            return Ok(Filled::Already(chunk));
        };
        let layout = layout(header);
        let table = Table { bytes: &chunk[len..len + table_len], layout };
        if !delta::refers_to_seed(table, len, self.page_size, self.base) {
            return Ok(Filled::Already(chunk));
        }
        if self.hangs.load(Ordering::Acquire) {
            return Err(hangs());
        }
        // One for each chunk with pages of the seed, which costs less than one of its pages.
        let (answer, filling) = channel();
        let request = Request { chunk, len, table_len, layout, answer };
        let pushed = self.requests.push(request, READERS, |number| self.read(number, pages));
        pushed.map_err(|error| bad(&error.to_string()))?;
        Ok(Filled::Later(filling))
    }

    /// Waits for a chunk.
    ///
    /// # Errors
    /// The table is invalid; a page is damaged or cannot be read; no page is read for [`READS`].
    pub(super) fn wait(&self, filling: &Filling) -> Result<Slot, SessionError> {
        let begin = Instant::now();
        self.wait_by(|| filling.recv_timeout(STEP.0), || begin.elapsed())
    }

    /// Waits by `wait`, again and again, until the disk has given no page for [`READS`] of `clock`.
    fn wait_by(
        &self,
        mut wait: impl FnMut() -> Result<Result<Slot, SessionError>, RecvTimeoutError>,
        mut clock: impl FnMut() -> Duration,
    ) -> Result<Slot, SessionError> {
        // Relaxed: only whether the number changes counts.
        let mut before = self.reads.load(Ordering::Relaxed);
        let mut silent = Duration::ZERO;
        loop {
            let begin = clock();
            let is_over = match wait() {
                Ok(filled) => return filled,
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => true,
            };
            silent += clock().saturating_sub(begin).min(STEP.1);
            let reads = self.reads.load(Ordering::Relaxed);
            if reads != before {
                // The disk is slow, and answers.
                (before, silent) = (reads, Duration::ZERO);
            }
            if is_over || silent >= READS {
                self.hangs.store(true, Ordering::Release);
                return Err(hangs());
            }
        }
    }

    /// Starts reader `number`. It ends with the session, or when the disk answers after that.
    fn read(&self, number: usize, pages: &Arc<dyn SeedPages>) -> Result<(), RelayError> {
        let (pages, requests, reads) = (pages.clone(), self.requests.clone(), self.reads.clone());
        let (page_size, base) = (self.page_size, self.base);
        spawn("seed-read", move || {
            let mut reader = Counting { reader: pages.reader(), reads };
            let slots = (base, pages.pages());
            let (mut table, mut of_seed) = (Vec::new(), Vec::new());
            while let Some((len, layout)) = requests.begin(number, &mut table) {
                // The pages, and zeros elsewhere.
                of_seed.clear();
                of_seed.resize(len, 0);
                let bytes = Table { bytes: &table, layout };
                let filled = delta::fill(&mut of_seed, bytes, page_size, slots, &mut reader);
                let Some(Request { mut chunk, answer, .. }) = requests.end(number) else { return };
                chunk.iter_mut().zip(&of_seed).for_each(|(byte, of_seed)| *byte ^= of_seed);
                // The stream may have ended.
                let _ = answer.send(filled.map(|_| chunk).map_err(|error| bad(&error.to_string())));
            }
        })
    }

    /// Ends the session: its chunks are freed, also where a read never returns.
    pub(super) fn close(&self) {
        self.requests.close();
    }
}

impl Drop for SessionSeed {
    fn drop(&mut self) {
        self.close();
    }
}

/// Counts the answers of the disk.
struct Counting {
    reader: Box<dyn PageReader>,
    reads: Arc<AtomicU64>,
}

impl PageReader for Counting {
    fn read(&mut self, number: u32) -> Result<&[u8], String> {
        let page = self.reader.read(number);
        self.reads.fetch_add(1, Ordering::Relaxed);
        page
    }
}

/// The layout of the pages in a frame's delta table.
pub(super) fn layout(header: &Header) -> Layout {
    match header.flags & FLAG_BODIES {
        0 => Layout::Records,
        _ => Layout::Bodies,
    }
}

fn bad(reason: &str) -> SessionError {
    let reason = format!("{reason}. Start the migration again, or leave --seed out");
    SessionError::Local { reason }
}

fn hangs() -> SessionError {
    bad(&format!("the disk of the seed has not answered for {READS:?}"))
}

#[cfg(test)]
mod tests;
