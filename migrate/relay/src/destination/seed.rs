//! Puts pages that this host has already into the chunks that refer to them (W29b).
//!
//! ```text
//!  codec thread ── chunk ──► reader threads: read the pages, fill ── chunk ──► deliver
//! ```
//!
//! The pages are on a disk, which may hang. Threads of the session read them, and the stream's
//! writer waits for a chunk until none was read for [`READS`]. No codec thread waits: other
//! sessions share them, and a VM of theirs may be stopped.

use crate::error::RelayError;
use crate::inbox::Filling;
use crate::threads::spawn;
use delta::SeedPages;
use pages::Slot;
use session::{Header, SessionError};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// How long a chunk is waited for while the disk gives no chunk at all: many chunks of other
/// streams may be in front of it.
const READS: Duration = Duration::from_secs(10);
/// Threads that read pages. One keeps up with a link of some Gbit/s.
const READERS: usize = 4;

/// A chunk to fill: the lengths of its bytes and its table, and the place for the result.
struct Request {
    chunk: Slot,
    len: usize,
    table_len: usize,
    answer: Sender<Result<Slot, SessionError>>,
}

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
    /// To the reader threads, which start with the first chunk. The credits bound the queue.
    requests: Mutex<Option<Sender<Request>>>,
    /// Chunks that were read.
    done: Arc<AtomicU64>,
    /// A reader has not answered in time.
    hangs: AtomicBool,
}

impl SessionSeed {
    /// Creates a seed without pages. The first page has slot `base`.
    pub(crate) fn new(base: u32, page_size: usize) -> Self {
        let (pages, requests, hangs) = (OnceLock::new(), Mutex::default(), AtomicBool::new(false));
        Self { base, page_size, pages, requests, done: Arc::default(), hangs }
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
        let table = &chunk[len..len + table_len];
        if !delta::refers_to_seed(table, len, self.page_size, self.base) {
            return Ok(Filled::Already(chunk));
        }
        if self.hangs.load(Ordering::Acquire) {
            return Err(hangs());
        }
        // One for each chunk with pages of the seed, which costs less than one of its pages.
        let (answer, filling) = channel();
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match &*requests {
            Some(sender) => sender,
            None => requests.insert(self.readers(pages).map_err(|error| bad(&error.to_string()))?),
        };
        // A reader that has panicked ends the process.
        let _ = sender.send(Request { chunk, len, table_len, answer });
        Ok(Filled::Later(filling))
    }

    /// Waits for a chunk.
    ///
    /// # Errors
    /// The table is invalid; a page is damaged or cannot be read; no chunk is read for [`READS`].
    pub(super) fn wait(&self, filling: &Filling) -> Result<Slot, SessionError> {
        self.wait_within(filling, READS)
    }

    fn wait_within(&self, filling: &Filling, limit: Duration) -> Result<Slot, SessionError> {
        loop {
            // Relaxed: only whether the number changes counts.
            let before = self.done.load(Ordering::Relaxed);
            match filling.recv_timeout(limit) {
                Ok(filled) => return filled,
                // The disk is slow, and answers.
                Err(RecvTimeoutError::Timeout) if self.done.load(Ordering::Relaxed) != before => {}
                Err(_) => {
                    self.hangs.store(true, Ordering::Release);
                    return Err(hangs());
                }
            }
        }
    }

    /// Starts the threads that read. They end with the session.
    fn readers(&self, pages: &Arc<dyn SeedPages>) -> Result<Sender<Request>, RelayError> {
        let (requests, inbox) = channel::<Request>();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..READERS {
            let (pages, inbox, done) = (pages.clone(), inbox.clone(), self.done.clone());
            let (page_size, base) = (self.page_size, self.base);
            spawn("seed-read", move || {
                let mut reader = pages.reader();
                let slots = (base, pages.pages());
                loop {
                    let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Request { mut chunk, len, table_len, answer }) = next else { return };
                    let (plain, table) = chunk.split_at_mut(len);
                    let table = &table[..table_len];
                    let filled = delta::fill(plain, table, page_size, slots, &mut *reader);
                    done.fetch_add(1, Ordering::Relaxed);
                    // The session may have ended.
                    let _ =
                        answer.send(filled.map(|_| chunk).map_err(|error| bad(&error.to_string())));
                }
            })?;
        }
        Ok(requests)
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
mod tests {
    use super::*;
    use delta::{Known, PageHash, PageReader, SeedKey, Sender as DeltaSender, TABLE_ROOM};
    use pages::Arena;
    use session::FrameType;
    use std::sync::mpsc::Receiver;

    const PAGE: usize = 64;

    /// One page, on a disk that answers when the other end of the channel is dropped.
    #[derive(Debug)]
    struct Slow(Arc<Mutex<Receiver<()>>>);

    impl SeedPages for Slow {
        fn key(&self) -> &SeedKey {
            &[0; 32]
        }

        fn pages(&self) -> u32 {
            1
        }

        fn offer(&self, _: u32, _: &mut dyn FnMut(u32, &[PageHash]) -> bool) {}

        fn reader(&self) -> Box<dyn PageReader> {
            Box::new(Slow(self.0.clone()))
        }
    }

    impl PageReader for Slow {
        fn read(&mut self, _: u32) -> Result<&[u8], String> {
            let _ = self.0.lock().unwrap().recv();
            Ok(&[7; PAGE])
        }
    }

    /// A seed, and 16 chunks that the readers have.
    fn begun(answers: Receiver<()>) -> (SessionSeed, Vec<Filling>) {
        let seed = SessionSeed::new(0, PAGE);
        seed.open(Arc::new(Slow(Arc::new(Mutex::new(answers)))));
        let mut known = Known::default();
        let hash = delta::page_hash(&[0; 32], &[7; PAGE]);
        known.learn(&delta::offer(0, &[0; 32], &[hash])).unwrap();
        let arena = Arena::new(16, 1 << 16).unwrap();
        let mut header = Header::free(FrameType::Data, 0);
        let begun = (0..16)
            .map(|_| {
                let mut chunk = arena.take().unwrap();
                chunk[..PAGE].fill(7);
                let mut sender = DeltaSender::without_cache(0, PAGE);
                let mut pass = sender.begin(&mut chunk[..PAGE + TABLE_ROOM], PAGE, Some(&known));
                pass.bodies(0, 1);
                let (table_len, _) = pass.finish();
                (header.plain_len, header.table_len) = (64, u32::try_from(table_len).unwrap());
                match seed.begin(&header, chunk).unwrap() {
                    Filled::Later(filling) => filling,
                    Filled::Already(_) => panic!("the chunk refers to the seed"),
                }
            })
            .collect();
        (seed, begun)
    }

    /// Codec threads, which other sessions share, call `begin`.
    #[test]
    fn chunks_are_begun_while_the_disk_does_not_answer() {
        let (disk, answers) = channel();
        let (seed, begun) = begun(answers);
        drop(disk);
        for filling in begun {
            assert!(seed.wait(&filling).unwrap()[..PAGE] == [7; PAGE]);
        }
    }

    /// The last chunk waits behind 15 others, which may be those of other streams.
    #[test]
    fn a_disk_that_is_slow_and_answers_is_waited_for() {
        let limit = Duration::from_secs(5);
        let (disk, answers) = channel();
        let (seed, begun) = begun(answers);
        let slow = std::thread::spawn(move || {
            for _ in 0..16 {
                std::thread::sleep(limit / 12);
                disk.send(()).unwrap();
            }
            disk
        });
        let last = begun.last().unwrap();
        assert!(seed.wait_within(last, limit).unwrap()[..PAGE] == [7; PAGE]);
        drop(slow.join().unwrap());
        // A disk that answers nothing is not waited for.
        let (disk, answers) = channel();
        let (seed, begun) = self::begun(answers);
        assert!(seed.wait_within(&begun[15], limit / 50).is_err());
        drop(disk);
    }
}
