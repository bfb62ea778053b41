//! Byte-granular reads and writes of a device by one thread, which waits for each request.
#![expect(unsafe_code, reason = "the device gets the buffer as an address")]

use device::{Buffer, Errno, Op, Queue, Request, PAGE};
use rustix::event::{poll, PollFd, PollFlags};

/// A queue, and a buffer for its requests.
pub(crate) struct Disk<Q> {
    queue: Q,
    /// Whole pages for reads, and for writes of unaligned data. The device accepts any alignment.
    bytes: Vec<u8>,
}

/// The pages that a range of bytes touches: the first page, and the number of pages.
fn around(offset: u64, len: usize) -> (u64, usize) {
    let page = PAGE as u64;
    let first = offset / page;
    let end = (offset + len as u64).div_ceil(page);
    // At most `len` pages and two more.
    (first, usize::try_from(end - first).unwrap_or(usize::MAX))
}

impl<Q: Queue> Disk<Q> {
    pub(crate) fn new(queue: Q) -> Self {
        Self { queue, bytes: Vec::new() }
    }

    /// Reads `len` bytes at `offset`.
    pub(crate) fn read(&mut self, offset: u64, len: usize) -> Result<&[u8], Errno> {
        let (first, pages) = around(offset, len);
        let room = pages * PAGE;
        if self.bytes.len() < room {
            // The kernel's requests, and so this buffer, are a MiB at most.
            self.bytes.resize(room, 0);
        }
        // SAFETY: `bytes` has that many, and nothing accesses them before `perform` reports the end
        // of the request.
        let buffer = unsafe { Buffer::new(self.bytes.as_mut_ptr(), room) };
        self.perform(Op::Read, first, pages as u64, buffer)?;
        let from = usize::try_from(offset % PAGE as u64).unwrap_or(0);
        Ok(&self.bytes[from..from + len])
    }

    /// Writes all of `data` at `offset`.
    pub(crate) fn write(&mut self, mut offset: u64, mut data: &[u8]) -> Result<(), Errno> {
        let page = PAGE as u64;
        let within = usize::try_from(offset % page).unwrap_or(0);
        if within > 0 {
            let (head, rest) = data.split_at(data.len().min(PAGE - within));
            self.queue.patch(offset / page, within, head)?;
            offset += head.len() as u64;
            data = rest;
        }
        let (whole, tail) = data.split_at(data.len() / PAGE * PAGE);
        if !whole.is_empty() {
            // SAFETY: the device promises only to read a write's buffer, and `whole` lives until
            // `perform` reports the end of the request.
            let buffer = unsafe { Buffer::new(whole.as_ptr().cast_mut(), whole.len()) };
            self.perform(Op::Write, offset / page, (whole.len() / PAGE) as u64, buffer)?;
        }
        if !tail.is_empty() {
            self.queue.patch((offset + whole.len() as u64) / page, 0, tail)?;
        }
        Ok(())
    }

    /// Zeros `len` bytes at `offset`, within the device; whole pages by `op`.
    pub(crate) fn zero(&mut self, op: Op, offset: u64, len: u64) -> Result<(), Errno> {
        const ZEROS: [u8; PAGE] = [0; PAGE];
        let page = PAGE as u64;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let within = at % page;
            if within > 0 || end - at < page {
                let n = (page - within).min(end - at);
                let bytes = &ZEROS[..usize::try_from(n).unwrap_or(0)];
                self.queue.patch(at / page, usize::try_from(within).unwrap_or(0), bytes)?;
                at += n;
            } else {
                let pages = ((end - at) / page).min(u64::from(u32::MAX));
                self.perform(op, at / page, pages, Buffer::NONE)?;
                at += pages * page;
            }
        }
        Ok(())
    }

    /// Submits a request and waits for it.
    fn perform(&mut self, op: Op, page: u64, pages: u64, buffer: Buffer) -> Result<(), Errno> {
        let pages = u32::try_from(pages).map_err(|_| Errno::Invalid)?;
        if let Some(done) = self.queue.submit(0, Request { op, page, pages, buffer }) {
            return done;
        }
        loop {
            let mut done = None;
            self.queue.reap(&mut |_, result| done = Some(result));
            if let Some(done) = done {
                return done;
            }
            if self.queue.arm() {
                // After a signal, poll the queue again.
                let _ = poll(&mut [PollFd::from_borrowed_fd(self.queue.fd(), PollFlags::IN)], None);
            }
        }
    }
}
