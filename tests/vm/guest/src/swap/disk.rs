//! `disk PATH mib=N [seconds=T] [threads=W] [seed=S]`: writes, reads and discards random runs of
//! pages of a block device for T seconds, by direct I/O, each thread in its own part. Every page
//! read is compared with the last write, and at the end all pages are. Ends early if the file
//! [`ENOUGH`] exists.

use super::content::{self, low};
use super::{option, Failure};
use crate::pattern::{mix, PAGE};
use rustix::fs::{fallocate, FallocateFlags, Mode, OFlags};
use rustix::io::{pread, pwrite};
use std::time::{Duration, Instant};

/// The harness creates this file to end the program.
const ENOUGH: &str = "/tmp/enough";

/// The most pages of one request: 1 MiB, which the kernel splits at the disk's limit.
const RUN: usize = 256;

#[repr(C, align(4096))]
struct Buffer([[u8; PAGE]; RUN]);

/// Runs the test, and prints `ok ...`.
pub(crate) fn run(path: &str, words: &[&str]) -> Result<String, Failure> {
    let pages = option(words, "mib", 16)? * 256;
    let threads = option(words, "threads", 2)?.max(1);
    let seconds = option(words, "seconds", 2)?;
    let seed = option(words, "seed", 1)?;
    let workers: Vec<_> = (0..threads)
        .map(|nth| {
            let (first, end) = (pages * nth / threads, pages * (nth + 1) / threads);
            let path = path.to_owned();
            std::thread::spawn(move || part(&path, first, end - first, seconds, seed + nth))
        })
        .collect();
    let mut sum = [0; 3];
    for worker in workers {
        let counts = worker.join().map_err(|_| Failure::Cannot("a thread panicked".into()))??;
        sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    Ok(format!("ok pages={pages} writes={} reads={} discards={}", sum[0], sum[1], sum[2]))
}

fn part(path: &str, first: u64, pages: u64, seconds: u64, seed: u64) -> Result<[u64; 3], Failure> {
    let disk =
        rustix::fs::open(path, OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = Box::new(Buffer([[0; PAGE]; RUN]));
    // 0: never written or discarded, reads as zeros.
    let mut versions = vec![0_u64; usize::try_from(pages).unwrap_or(0)];
    let mut scratch = [0; PAGE];
    let mut counts = [0; 3];
    let until = Instant::now() + Duration::from_secs(seconds);
    // The disk's earlier contents are unknown.
    discard(&disk, first, pages)?;
    let mut nth = 0;
    let enough = || std::path::Path::new(ENOUGH).exists();
    while Instant::now() < until && !enough() || nth < 64 {
        nth += 1;
        let draw = mix(seed, nth, 1);
        // Mostly short, like swap's.
        let longest = if draw & 7 == 0 { RUN } else { 8 };
        let len = (low(draw >> 3, longest) + 1).min(versions.len());
        let at = low(draw >> 16, versions.len() - len + 1);
        let place = (first + at as u64) * PAGE as u64;
        match draw >> 56 {
            0..=115 => {
                counts[0] += 1;
                for (page, out) in (at..).zip(&mut buffer.0[..len]) {
                    versions[page] = nth;
                    content::fill(seed, first + page as u64, nth, out);
                }
                let bytes = buffer.0[..len].as_flattened();
                let written = pwrite(&disk, bytes, place)?;
                if written != bytes.len() {
                    return Err(Failure::Cannot(format!(
                        "wrote {written} of {} bytes",
                        bytes.len()
                    )));
                }
            }
            116..=240 => {
                counts[1] += 1;
                read(&disk, &mut buffer, place, len)?;
                for (page, bytes) in (at..).zip(&buffer.0[..len]) {
                    check(seed, first + page as u64, versions[page], bytes, &mut scratch)?;
                }
            }
            _ => {
                counts[2] += 1;
                discard(&disk, first + at as u64, len as u64)?;
                versions[at..at + len].fill(0);
            }
        }
    }
    for at in (0..versions.len()).step_by(RUN) {
        let len = RUN.min(versions.len() - at);
        read(&disk, &mut buffer, (first + at as u64) * PAGE as u64, len)?;
        for (page, bytes) in (at..).zip(&buffer.0[..len]) {
            check(seed, first + page as u64, versions[page], bytes, &mut scratch)?;
        }
    }
    Ok(counts)
}

fn read(
    disk: impl rustix::fd::AsFd,
    buffer: &mut Buffer,
    place: u64,
    len: usize,
) -> Result<(), Failure> {
    let bytes = buffer.0[..len].as_flattened_mut();
    let wanted = bytes.len();
    let got = pread(disk, bytes, place)?;
    if got == wanted {
        return Ok(());
    }
    Err(Failure::Cannot(format!("read {got} of {wanted} bytes at {place}")))
}

/// The kernel turns it into a discard after which the pages must read as zeros.
fn discard(disk: impl rustix::fd::AsFd, first: u64, pages: u64) -> Result<(), Failure> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(disk, flags, first * PAGE as u64, pages * PAGE as u64)?;
    Ok(())
}

fn check(
    seed: u64,
    index: u64,
    version: u64,
    page: &content::Page,
    scratch: &mut content::Page,
) -> Result<(), Failure> {
    if version > 0 {
        return content::wrong(content::fill, (seed, index, version), page, scratch)
            .map_or(Ok(()), |what| Err(Failure::Wrong(what)));
    }
    match page.iter().position(|&byte| byte != 0) {
        None => Ok(()),
        Some(at) => {
            Err(Failure::Wrong(format!("page {index}, which was discarded, is not zero at {at}")))
        }
    }
}
