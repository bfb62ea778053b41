//! Puts pages that this host has already into the chunks that refer to them (W29b).
//!
//! ```text
//!  deliver ── chunk ──► reader thread: read the pages, fill ── chunk ──► deliver
//! ```
//!
//! The pages are on a disk, which may hang. A reader thread reads them, and the stream's writer
//! waits for it no longer than [`READS`]. No codec thread waits for it: other sessions share them,
//! and a VM of theirs may be stopped.

use crate::error::RelayError;
use crate::threads::spawn;
use delta::SeedPages;
use pages::Slot;
use session::{Header, SessionError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How long the pages of one chunk may take to be read.
const READS: Duration = Duration::from_secs(10);

/// A chunk, the lengths of its bytes and its table; and the chunk with its pages.
type Request = (Slot, usize, usize);
type Answer = Result<Slot, String>;

/// A thread that reads pages.
struct Reader {
    requests: Sender<Request>,
    answers: Receiver<Answer>,
}

/// The seed of one session.
pub(crate) struct SessionSeed {
    /// The slot of the first page.
    base: u32,
    page_size: usize,
    /// Set once the seed is open.
    pages: OnceLock<Arc<dyn SeedPages>>,
    /// Readers without a request.
    readers: Mutex<Vec<Reader>>,
    /// A reader has not answered in time.
    hangs: AtomicBool,
}

impl SessionSeed {
    /// Creates a seed without pages. The first page has slot `base`.
    pub(crate) fn new(base: u32, page_size: usize) -> Self {
        let (pages, readers, hangs) = (OnceLock::new(), Mutex::default(), AtomicBool::new(false));
        Self { base, page_size, pages, readers, hangs }
    }

    /// Sets the pages, once.
    pub(super) fn open(&self, pages: Arc<dyn SeedPages>) {
        let _ = self.pages.set(pages);
    }

    /// Bytes of a page.
    pub(super) fn page_size(&self) -> usize {
        self.page_size
    }

    /// The slot of the first page.
    pub(super) fn base(&self) -> u32 {
        self.base
    }

    /// The number of pages.
    pub(super) fn pages(&self) -> u32 {
        self.pages.get().map_or(0, |pages| pages.pages())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Reader>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts pages of the seed into a chunk whose delta table refers to them. The table is behind
    /// the chunk's bytes.
    ///
    /// # Errors
    /// The table is invalid; a page is damaged, cannot be read, or takes longer than [`READS`].
    pub(super) fn fill(&self, header: &Header, chunk: Slot) -> Result<Slot, SessionError> {
        let (len, table_len) = (header.plain_len as usize, header.table_len as usize);
        let Some(pages) = self.pages.get().filter(|_| table_len > 0) else { return Ok(chunk) };
        let table = &chunk[len..len + table_len];
        if !delta::refers_to_seed(table, len, self.page_size, self.base) {
            return Ok(chunk);
        }
        let bad = |reason: String| SessionError::Local {
            reason: format!("{reason}. Start the migration again, or leave --seed out"),
        };
        let hangs = || bad(format!("the disk of the seed has not answered for {READS:?}"));
        if self.hangs.load(Ordering::Acquire) {
            return Err(hangs());
        }
        let idle = self.lock().pop();
        let reader = match idle {
            Some(reader) => reader,
            None => self.reader(pages).map_err(|error| bad(error.to_string()))?,
        };
        // The thread ends only with this end of the channel.
        let _ = reader.requests.send((chunk, len, table_len));
        let Ok(answer) = reader.answers.recv_timeout(READS) else {
            self.hangs.store(true, Ordering::Release);
            return Err(hangs());
        };
        self.lock().push(reader);
        answer.map_err(bad)
    }

    fn reader(&self, pages: &Arc<dyn SeedPages>) -> Result<Reader, RelayError> {
        let ((requests, inbox), (outbox, answers)) = (channel::<Request>(), channel());
        let (pages, page_size, base) = (pages.clone(), self.page_size, self.base);
        spawn("seed-read", move || {
            let mut reader = pages.reader();
            let slots = (base, pages.pages());
            for (mut chunk, len, table_len) in inbox {
                let (plain, table) = chunk.split_at_mut(len);
                let table = &table[..table_len];
                let filled = delta::fill(plain, table, page_size, slots, &mut *reader);
                let answer = filled.map(|_| chunk).map_err(|error| error.to_string());
                if outbox.send(answer).is_err() {
                    return;
                }
            }
        })?;
        Ok(Reader { requests, answers })
    }
}
