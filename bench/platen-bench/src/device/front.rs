//! The common interface of the stores of compressed pages that are measured.

use anyhow::Context;
use codec::Settings;
use device::{Buffer, Device, DeviceOptions, DeviceQueue, Op, Queue, Request, PAGE};
use rustix::event::{poll, PollFd, PollFlags};
use std::sync::Arc;
use std::time::Instant;
use store::{Keeper, Options, Store};

/// Bytes: plain, compressed, and of all memory used for them.
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
    /// Frees the memory lost to fragmentation.
    fn compact(&mut self) -> anyhow::Result<()>;
}

/// A thread's access to a store of pages that several threads use.
pub(super) trait Lane {
    /// As [`Front::write`].
    fn write(&mut self, page: u64, bytes: &[u8]) -> anyhow::Result<()>;
    /// As [`Front::read`].
    fn read(&mut self, page: u64, bytes: &mut [u8]) -> anyhow::Result<()>;
}

/// A queue of platen's device, with one request in flight.
pub(super) struct OwnLane(DeviceQueue);

impl OwnLane {
    /// A new queue of `device`.
    pub(super) fn new(device: &Device) -> anyhow::Result<Self> {
        Ok(Self(device.queue()?))
    }

    #[expect(unsafe_code, reason = "the device takes buffers as addresses")]
    fn run(&mut self, op: Op, page: u64, start: *mut u8, len: usize) -> anyhow::Result<()> {
        // SAFETY: the callers hold the bytes until this returns, and then the request has
        // completed.
        let buffer = unsafe { Buffer::new(start, len) };
        let pages = u32::try_from(len / PAGE)?;
        let mut done = self.0.submit(0, Request { op, page, pages, buffer });
        while done.is_none() {
            if self.0.arm() {
                let _ = poll(&mut [PollFd::new(&self.0.fd(), PollFlags::IN)], None);
            }
            self.0.reap(&mut |_, result| done = Some(result));
        }
        Ok(done.expect("just seen")?)
    }
}

impl Lane for OwnLane {
    fn write(&mut self, page: u64, bytes: &[u8]) -> anyhow::Result<()> {
        self.run(Op::Write, page, bytes.as_ptr().cast_mut(), bytes.len())
    }

    fn read(&mut self, page: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        self.run(Op::Read, page, bytes.as_mut_ptr(), bytes.len())
    }
}

/// platen's device, in this process.
pub(super) struct Own {
    lane: OwnLane,
    store: Arc<Store>,
    device: Device,
    _keeper: Keeper,
}

impl Own {
    pub(super) fn new(settings: Settings, pages: u64, workers: usize) -> anyhow::Result<Self> {
        let store = Store::create(pages, Options { reserve: 16 << 20, ..Options::default() })?;
        let keeper = Keeper::start(&store).context("keeper")?;
        let device = Device::new(
            &store,
            &DeviceOptions { settings, workers, depth: 256, ..DeviceOptions::default() },
        )?;
        Ok(Self { lane: OwnLane::new(&device)?, store, device, _keeper: keeper })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Writes all of `bytes` from page 0 on, `each` pages per request, with `under_way` pages in
    /// flight (at least one request). Appends the microseconds from submission to completion to
    /// `times`.
    #[expect(unsafe_code, reason = "the device takes buffers as addresses")]
    pub(super) fn write_all(
        &mut self,
        bytes: &[u8],
        each: usize,
        under_way: usize,
        times: &mut Vec<f32>,
    ) -> anyhow::Result<()> {
        let most = (under_way / each).max(1);
        let start = Instant::now();
        let now = || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let mut failed = None;
        let mut requests = bytes.chunks(each * PAGE).zip((0..).step_by(each));
        let mut next = requests.next();
        while next.is_some() || self.lane.0.in_flight() > 0 {
            let Some((part, page)) = next.filter(|_| self.lane.0.in_flight() < most) else {
                if self.lane.0.arm() {
                    let _ = poll(&mut [PollFd::new(&self.lane.0.fd(), PollFlags::IN)], None);
                }
                let ended = now();
                self.lane.0.reap(&mut |began, result| {
                    times.push((ended - began) as f32 / 1e3);
                    failed = failed.or(result.err());
                });
                continue;
            };
            // SAFETY: the bytes are borrowed until the last request has completed, for which the
            // loop waits; it is a write.
            let buffer = unsafe { Buffer::new(part.as_ptr().cast_mut(), part.len()) };
            let pages = u32::try_from(part.len() / PAGE)?;
            let began = now();
            let request = Request { op: Op::Write, page, pages, buffer };
            if let Some(result) = self.lane.0.submit(began, request) {
                times.push((now() - began) as f32 / 1e3);
                failed = failed.or(result.err());
            }
            next = requests.next();
        }
        failed.map_or(Ok(()), |errno| Err(errno.into()))
    }

    pub(super) fn store(&self) -> &Arc<Store> {
        &self.store
    }
}

impl Front for Own {
    fn write(&mut self, page: u64, bytes: &[u8]) -> anyhow::Result<()> {
        self.lane.write(page, bytes)
    }

    fn read(&mut self, page: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        self.lane.read(page, bytes)
    }

    fn memory(&mut self) -> anyhow::Result<Memory> {
        let stats = self.store.stats();
        Ok(Memory {
            plain: stats.orig_data_size,
            compressed: stats.compr_data_size,
            // Includes table and superblock, but not the memory reserved for the next writes.
            used: stats.mem_used_total - stats.mem_ready,
        })
    }

    fn compact(&mut self) -> anyhow::Result<()> {
        self.store.compact();
        Ok(())
    }
}
