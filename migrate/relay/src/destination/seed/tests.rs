//! Disks that are slow, and disks that hang.

use super::*;
use delta::{Known, PageHash, SeedKey, Sender as DeltaSender, TABLE_ROOM};
use pages::Arena;
use session::FrameType;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Mutex;

const PAGE: usize = 64;

/// One page, on a disk that says when it is asked, and answers once it is told to, or when the
/// other end of that channel is dropped.
#[derive(Debug, Clone)]
struct Slow(Sender<()>, Arc<Mutex<Receiver<()>>>);

impl SeedPages for Slow {
    fn key(&self) -> &SeedKey {
        &[0; 32]
    }

    fn pages(&self) -> u32 {
        1
    }

    fn offer(&self, _: u32, _: &mut dyn FnMut(u32, &[PageHash]) -> bool) {}

    fn reader(&self) -> Box<dyn PageReader> {
        Box::new(self.clone())
    }
}

impl PageReader for Slow {
    fn read(&mut self, _: u32) -> Result<&[u8], String> {
        let _ = self.0.send(());
        let _ = self.1.lock().unwrap().recv();
        Ok(&[7; PAGE])
    }
}

/// A seed, and 16 chunks of one page that the readers have.
fn begun(answers: Receiver<()>) -> (SessionSeed, Vec<Filling>) {
    begun_with(channel().0, answers, (16, 1))
}

/// A seed, and `chunks` chunks of `pages` pages that the readers have.
fn begun_with(
    asked: Sender<()>,
    answers: Receiver<()>,
    (chunks, pages): (usize, usize),
) -> (SessionSeed, Vec<Filling>) {
    let seed = SessionSeed::new(0, PAGE);
    seed.open(Arc::new(Slow(asked, Arc::new(Mutex::new(answers)))));
    let mut known = Known::default();
    let hash = delta::page_hash(&[0; 32], &[7; PAGE]);
    known.learn(&delta::offer(0, &[0; 32], &[hash])).unwrap();
    let arena = Arena::new(16, 1 << 16).unwrap();
    let mut header = Header::free(FrameType::Data, 0);
    let len = pages * PAGE;
    header.plain_len = u32::try_from(len).unwrap();
    let begun = (0..chunks)
        .map(|_| {
            let mut chunk = arena.take().unwrap();
            chunk[..len].fill(7);
            let mut sender = DeltaSender::without_cache(0, PAGE);
            let mut pass = sender.begin(&mut chunk[..len + TABLE_ROOM], len, Some(&known));
            pass.bodies(0, pages);
            let (table_len, _) = pass.finish();
            header.table_len = u32::try_from(table_len).unwrap();
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
    // Each wait counts for as long as a disk may take.
    let mut clock = clock(READS);
    let filled = seed.wait_by(|| last.recv_timeout(limit / 10), &mut clock);
    assert!(filled.unwrap()[..PAGE] == [7; PAGE]);
    drop(slow.join().unwrap());
    // A disk that answers nothing is not waited for.
    let (disk, answers) = channel();
    let (seed, begun) = self::begun(answers);
    assert!(seed.wait_by(|| begun[15].recv_timeout(limit / 50), &mut clock).is_err());
    drop(disk);
}

/// A clock by which each wait takes this time.
fn clock(step: Duration) -> impl FnMut() -> Duration {
    let mut now = Duration::ZERO;
    move || {
        now += step;
        now
    }
}

/// A process that is stopped (SIGSTOP, a laptop's lid) reads nothing meanwhile.
#[test]
fn a_disk_does_not_hang_while_this_process_stands_still() {
    let (disk, answers) = channel();
    let (seed, begun) = begun_with(channel().0, answers, (1, 1));
    let mut waits = 0;
    let filled = seed.wait_by(
        || {
            waits += 1;
            if waits == 1 {
                return Err(RecvTimeoutError::Timeout);
            }
            disk.send(()).unwrap();
            Ok(begun[0].recv().unwrap())
        },
        clock(Duration::from_secs(12)),
    );
    assert!(filled.unwrap()[..PAGE] == [7; PAGE]);
}

/// As one whose pages are in units all over the disk.
#[test]
fn a_chunk_of_many_reads_is_waited_for_while_each_read_is_answered() {
    const PAGES: usize = 12;
    let ((asked, asks), (disk, answers)) = (channel(), channel());
    let (seed, begun) = begun_with(asked, answers, (1, PAGES));
    asks.recv().unwrap();
    let mut left = PAGES;
    let wait = || {
        disk.send(()).unwrap();
        left -= 1;
        if left == 0 {
            return Ok(begun[0].recv().unwrap());
        }
        // The reader counts a page before it asks for the next one.
        asks.recv().unwrap();
        Err(RecvTimeoutError::Timeout)
    };
    let filled = seed.wait_by(wait, clock(READS));
    assert!(filled.unwrap()[..PAGES * PAGE] == [7; PAGES * PAGE]);
}
