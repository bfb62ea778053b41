//! Writing back and bringing back: real devices, full ones, failing ones, foreign ones, and clients
//! that write, read and discard meanwhile.
#![cfg(not(loom))]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use store::{
    format_backing, Added, BackBuffer, Batch, Disk, DiskError, FileDisk, GetError, Options, Page,
    Seen, Store, Worker, WriteBackError, WrittenBack, MAX_OBJECT,
};

mod failing;
mod load;
mod refused;
#[path = "../shelf/mod.rs"]
mod shelf;
mod takeover;

fn bytes(index: u64, version: u64, len: usize) -> Vec<u8> {
    let mut state = index << 32 | version | 1 << 63;
    let mut bytes: Vec<u8> = (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()[7]
        })
        .collect();
    let version = version.to_le_bytes();
    bytes[..len.min(8)].copy_from_slice(&version[..len.min(8)]);
    bytes
}

/// Four kinds of lengths: a page as it is, and three that share blocks.
fn length(index: u64) -> usize {
    [MAX_OBJECT, 1300, 90, 3900][usize::try_from(index % 4).unwrap()]
}

fn options() -> Options {
    Options { reserve: 0, ..Options::default() }
}

fn given(pages: u64, disk: &dyn Disk) -> Arc<Store> {
    let store = Store::create(pages, options()).unwrap();
    format_backing(disk, "shelf", &store).unwrap();
    store
}

/// Opens a file that was open here before: a process that another test is starting has a copy of
/// its descriptor, with the lock, until its `execve`.
fn opened(path: &Path, size: u64) -> FileDisk {
    let begun = Instant::now();
    loop {
        match FileDisk::open(path, size) {
            Err(DiskError::InUse) if begun.elapsed() < Duration::from_secs(300) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            disk => return disk.unwrap(),
        }
    }
}

/// Writes back those of these pages that fit, in batches of 16 blocks.
fn write_back(
    worker: &mut Worker,
    pages: std::ops::Range<u64>,
) -> Result<WrittenBack, WriteBackError> {
    let mut batch = Batch::new(16);
    let mut sum = WrittenBack::default();
    let mut out = [0; MAX_OBJECT];
    let mut index = pages.start;
    loop {
        let added = match worker.look(index, &mut out) {
            _ if index >= pages.end => Added::Full,
            Ok(Page::Object { tag, len }) => batch.add(&Seen { index, tag, bytes: &out[..len] }),
            _ => Added::Unfit,
        };
        if added == Added::Full {
            let done = worker.write_back(&mut batch)?;
            sum.pages += done.pages;
            sum.changed += done.changed;
            sum.blocks += done.blocks;
            sum.left += done.left;
            if index >= pages.end || done.left > 0 {
                return Ok(sum);
            }
        } else {
            index += 1;
        }
    }
}

fn read(worker: &Worker, index: u64) -> Result<Option<Vec<u8>>, GetError> {
    let mut out = [0; MAX_OBJECT];
    loop {
        match worker.get(index, &mut out)? {
            Page::Absent => return Ok(None),
            Page::Object { len, .. } => return Ok(Some(out[..len].to_vec())),
            Page::Backed => match worker.read_back(index, &mut BackBuffer::new(), &mut out)? {
                Some(Page::Object { len, .. }) => return Ok(Some(out[..len].to_vec())),
                _ => continue,
            },
            other => panic!("page {index}: {other:?}"),
        }
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}
