//! The pages of a VM while it migrates: a copy in a temporary file, which a thread writes.
//!
//! The migration waits for no disk. While the thread is behind by [`QUEUED`] chunks, further pages
//! are left out.

use anyhow::Context;
use relay::PageSink;
use rustix::fs::fstatvfs;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use stream::Token;

/// Chunks that may wait for the thread, of at most 0.5 MiB each.
const QUEUED: usize = 128;
/// The part of the disk that stays free: one in this many blocks.
const FREE: u64 = 20;
/// More pages than any VM has.
const ENDED: u64 = 1 << 60;
/// Bytes between two looks at the free space.
const LOOK: u64 = 32 << 20;

/// Copies pages to the file.
#[derive(Debug)]
pub(super) struct Spool {
    /// An empty message is the last one.
    sender: SyncSender<Vec<u8>>,
    page_size: usize,
    /// Pages that were sent to the thread, and those that were left out.
    taken: AtomicU64,
    left_out: AtomicU64,
    thread: Mutex<Option<JoinHandle<io::Result<File>>>>,
}

/// The copied pages.
#[derive(Debug)]
pub(super) struct Spooled {
    pub(super) file: File,
    pub(super) pages: u64,
    /// Pages that are missing, because the disk was slower than the migration.
    pub(super) left_out: u64,
}

impl Spool {
    /// Starts the thread, which writes to a file without a name in `folder`.
    pub(super) fn start(folder: &Path, page_size: usize) -> anyhow::Result<Arc<Self>> {
        let file = tempfile::tempfile_in(folder)
            .with_context(|| format!("cannot create a file in {}", folder.display()))?;
        let (sender, receiver) = sync_channel(QUEUED);
        let body = move || write(file, &receiver);
        let thread = std::thread::Builder::new().name("seed-spool".into()).spawn(body);
        let thread = Mutex::new(Some(thread.context("cannot start a thread")?));
        let (taken, left_out) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self { sender, page_size, taken, left_out, thread }))
    }

    /// Waits until all pages are in the file.
    pub(super) fn finish(&self) -> anyhow::Result<Spooled> {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = thread.context("the pages have been written already")?;
        // The thread may have ended with an error.
        let _ = self.sender.send(Vec::new());
        let written = thread.join().map_err(|_| anyhow::anyhow!("the thread has panicked"))?;
        let file = written.context("cannot write the VM's pages to a temporary file")?;
        let pages = file.metadata().context("the temporary file")?.len() / self.page_size as u64;
        Ok(Spooled { file, pages, left_out: self.left_out.load(Ordering::Relaxed) })
    }
}

impl PageSink for Spool {
    fn chunk(&self, bytes: &[u8], tokens: &[Token], page_size: usize, ram: u64) {
        // Behind the first pass, pages are sent again. More than the RAM has are never needed.
        let most = if ram == 0 { ENDED } else { ram / self.page_size as u64 };
        if page_size != self.page_size || self.taken.load(Ordering::Relaxed) >= most {
            return;
        }
        let pages = pages_of(bytes, tokens, page_size);
        let count = (pages.len() / page_size) as u64;
        if count == 0 {
            return;
        }
        self.taken.fetch_add(count, Ordering::Relaxed);
        match self.sender.try_send(pages) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.left_out.fetch_add(count, Ordering::Relaxed);
            }
            // The thread has ended with an error: no further chunk is copied.
            Err(TrySendError::Disconnected(_)) => self.taken.store(ENDED, Ordering::Relaxed),
        }
    }
}

/// The bytes of all pages in a chunk.
fn pages_of(bytes: &[u8], tokens: &[Token], page_size: usize) -> Vec<u8> {
    let mut pages = Vec::new();
    let mut at = 0;
    for token in tokens {
        let len = token.len(page_size);
        let of_token = bytes.get(at..at + len).unwrap_or_default();
        match token {
            Token::Pages { .. } => {
                pages.reserve(len);
                for record in of_token.chunks_exact(8 + page_size) {
                    pages.extend_from_slice(&record[8..]);
                }
            }
            Token::Bodies { .. } => pages.extend_from_slice(of_token),
            _ => {}
        }
        at += len;
    }
    pages
}

/// Writes the pages to the file, up to the last message.
fn write(mut file: File, pages: &Receiver<Vec<u8>>) -> io::Result<File> {
    let (mut written, mut looked) = (0, None::<u64>);
    for pages in pages {
        if pages.is_empty() {
            break;
        }
        if looked.is_none_or(|looked| written - looked >= LOOK) {
            looked = Some(written);
            let disk = fstatvfs(&file)?;
            if disk.f_bavail < disk.f_blocks / FREE {
                return Err(io::Error::new(ErrorKind::StorageFull, "its disk is nearly full"));
            }
        }
        file.write_all(&pages)?;
        written += pages.len() as u64;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;
    use stream::synth::{main_stream, multifd_streams, Style};
    use stream::{Kind, Tokeniser};

    const PAGE: usize = 4096;

    fn feed(spool: &Spool, bytes: &[u8], kind: Kind, ram: u64) {
        let mut tokeniser = Tokeniser::new(kind, PAGE);
        for chunk in bytes.chunks(200_000) {
            let mut tokens = Vec::new();
            tokeniser.feed(chunk, &mut tokens);
            spool.chunk(chunk, &tokens, PAGE, ram);
        }
    }

    fn memory() -> Vec<Vec<u8>> {
        (1..=200_u8).map(|n| (0..PAGE).map(|at| n ^ at.to_le_bytes()[0]).collect()).collect()
    }

    /// The pages in the file, none of which may be another one.
    fn spooled(spool: &Spool) -> usize {
        let Spooled { file, pages, left_out } = spool.finish().unwrap();
        assert_eq!(left_out, 0);
        let memory = memory();
        let mut page = vec![0; PAGE];
        for number in 0..pages {
            file.read_exact_at(&mut page, number * PAGE as u64).unwrap();
            assert!(memory.contains(&page), "page {number}");
        }
        usize::try_from(pages).unwrap()
    }

    #[test]
    fn the_pages_of_both_kinds_of_streams_are_copied() {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spool::start(folder.path(), PAGE).unwrap();
        feed(&spool, &main_stream(Style::Qemu72, PAGE, memory()), Kind::Main, 0);
        let pages = spooled(&spool);
        // A chunk that ends in a page splits it.
        assert!((190..=200).contains(&pages), "{pages}");
        let spool = Spool::start(folder.path(), PAGE).unwrap();
        let (main, channels) = multifd_streams(Style::Qemu92, PAGE, 2, memory());
        feed(&spool, &main, Kind::Main, 0);
        channels.iter().for_each(|channel| feed(&spool, channel, Kind::Multifd, 0));
        let pages = spooled(&spool);
        assert!((190..=200).contains(&pages), "{pages}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a file with a name");
    }

    #[test]
    fn no_more_pages_are_copied_than_the_ram_has() {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spool::start(folder.path(), PAGE).unwrap();
        let stream = main_stream(Style::Qemu72, PAGE, memory());
        for _ in 0..5 {
            feed(&spool, &stream, Kind::Main, 200 * PAGE as u64);
        }
        let pages = spooled(&spool);
        // The last chunk may go beyond.
        assert!((190..250).contains(&pages), "{pages}");
    }

    #[test]
    fn a_disk_that_is_behind_stops_no_reader() {
        let (sender, receiver) = sync_channel(1);
        let (taken, left_out) = (AtomicU64::new(0), AtomicU64::new(0));
        let thread = Mutex::new(None);
        let spool = Spool { sender, page_size: PAGE, taken, left_out, thread };
        feed(&spool, &main_stream(Style::Qemu72, PAGE, memory()), Kind::Main, 0);
        let first = receiver.try_recv().unwrap().len() / PAGE;
        let left_out = usize::try_from(spool.left_out.load(Ordering::Relaxed)).unwrap();
        assert!(receiver.try_recv().is_err() && left_out + first > 190, "{left_out} and {first}");
    }
}
