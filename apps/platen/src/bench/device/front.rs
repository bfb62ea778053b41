//! What is measured: anything that keeps pages compressed.

use anyhow::Context;
use codec::Settings;
use device::{Buffer, Device, DeviceOptions, DeviceQueue, Op, Queue, Request, PAGE};
use rustix::event::{poll, PollFd, PollFlags};
use std::sync::Arc;
use store::{Keeper, Options, Store};

/// Bytes: of the pages stored, of their compressed forms, of all memory for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) plain: u64,
    pub(super) compressed: u64,
    pub(super) used: u64,
}

/// A store of pages, used by one thread.
pub(super) trait Front {
    /// Writes whole pages from `page` on.
    fn write(&mut self, page: u64, bytes: &[u8]) -> anyhow::Result<()>;
    /// Reads whole pages from `page` on.
    fn read(&mut self, page: u64, bytes: &mut [u8]) -> anyhow::Result<()>;
    fn memory(&mut self) -> anyhow::Result<Memory>;
    /// Gives back what fragmentation holds.
    fn compact(&mut self) -> anyhow::Result<()>;
}

/// platen's device, in this process.
pub(super) struct Own {
    queue: DeviceQueue,
    store: Arc<Store>,
    _device: Device,
    _keeper: Keeper,
}

impl Own {
    pub(super) fn new(settings: Settings, pages: u64, workers: usize) -> anyhow::Result<Self> {
        let store = Store::create(pages, Options { reserve: 16 << 20, ..Options::default() })?;
        let keeper = Keeper::start(&store).context("keeper")?;
        let device = Device::new(&store, &DeviceOptions { settings, workers, depth: 64 })?;
        Ok(Self { queue: device.queue()?, store, _device: device, _keeper: keeper })
    }

    pub(super) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    #[expect(unsafe_code, reason = "the device takes buffers as addresses")]
    fn run(&mut self, op: Op, page: u64, start: *mut u8, len: usize) -> anyhow::Result<()> {
        // SAFETY: the callers have the bytes until this returns, and then the request is over.
        let buffer = unsafe { Buffer::new(start, len) };
        let pages = u32::try_from(len / PAGE)?;
        let mut done = self.queue.submit(0, Request { op, page, pages, buffer });
        while done.is_none() {
            if self.queue.arm() {
                let _ = poll(&mut [PollFd::new(&self.queue.fd(), PollFlags::IN)], None);
            }
            self.queue.reap(&mut |_, result| done = Some(result));
        }
        Ok(done.expect("just seen")?)
    }
}

impl Front for Own {
    fn write(&mut self, page: u64, bytes: &[u8]) -> anyhow::Result<()> {
        self.run(Op::Write, page, bytes.as_ptr().cast_mut(), bytes.len())
    }

    fn read(&mut self, page: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        self.run(Op::Read, page, bytes.as_mut_ptr(), bytes.len())
    }

    fn memory(&mut self) -> anyhow::Result<Memory> {
        let stats = self.store.stats();
        Ok(Memory {
            plain: stats.orig_data_size,
            compressed: stats.compr_data_size,
            // Table and superblock are in it; what is ready for the next writes is not.
            used: stats.mem_used_total - stats.mem_ready,
        })
    }

    fn compact(&mut self) -> anyhow::Result<()> {
        self.store.compact();
        Ok(())
    }
}
