//! A backing device in memory that outlives servers and fails on command.
#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod gate;

use std::io;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use store::{Block, Disk};

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) blocks: Mutex<Vec<Block>>,
    /// The errnos with which reads and writes fail; 0 for none.
    pub(crate) fail_reads: AtomicI32,
    pub(crate) fail_writes: AtomicI32,
    /// After this many more blocks, writes fail once.
    pub(crate) good_writes: AtomicU64,
    /// Called between a read's start and its end.
    pub(crate) pause: fn(),
}

#[derive(Clone, Debug)]
pub(crate) struct Shelf(pub(crate) Arc<Inner>);

impl Shelf {
    pub(crate) fn new(blocks: usize) -> Self {
        Self::pausing(blocks, || {})
    }

    pub(crate) fn pausing(blocks: usize, pause: fn()) -> Self {
        Self(Arc::new(Inner {
            blocks: Mutex::new(vec![Block::ZERO; blocks]),
            fail_reads: AtomicI32::new(0),
            fail_writes: AtomicI32::new(0),
            good_writes: AtomicU64::new(u64::MAX),
            pause,
        }))
    }

    pub(crate) fn boxed(&self) -> Box<dyn Disk> {
        Box::new(self.clone())
    }
}

impl Disk for Shelf {
    fn blocks(&self) -> io::Result<u64> {
        Ok(self.0.blocks.lock().unwrap().len() as u64)
    }

    fn read(&self, block: u32, out: &mut Block) -> io::Result<()> {
        let errno = self.0.fail_reads.load(Ordering::Relaxed);
        if errno != 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        (self.0.pause)();
        // In halves at different times, as a device may transfer them.
        for half in [0..2048, 2048..4096] {
            let blocks = self.0.blocks.lock().unwrap();
            let from = blocks.get(block as usize).ok_or(io::ErrorKind::UnexpectedEof)?;
            out.0[half.clone()].copy_from_slice(&from.0[half]);
        }
        Ok(())
    }

    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()> {
        let fail = || io::Error::from_raw_os_error(self.0.fail_writes.load(Ordering::Relaxed));
        if self.0.fail_writes.load(Ordering::Relaxed) != 0
            && self.0.good_writes.load(Ordering::Relaxed) == 0
        {
            return Err(fail());
        }
        for (at, from) in (block as usize..).zip(blocks) {
            if self.0.fail_writes.load(Ordering::Relaxed) != 0 {
                let left = self.0.good_writes.load(Ordering::Relaxed);
                if left == 0 {
                    return Err(fail());
                }
                self.0.good_writes.store(left - 1, Ordering::Relaxed);
            }
            for half in [0..2048, 2048..4096] {
                let mut all = self.0.blocks.lock().unwrap();
                let to = all.get_mut(at).ok_or(io::Error::from_raw_os_error(28))?;
                to.0[half.clone()].copy_from_slice(&from.0[half]);
            }
        }
        Ok(())
    }
}
