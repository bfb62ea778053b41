//! Requests up to 32 KiB, done directly.

use super::*;

impl<Q: Queue> Connection<'_, Q> {
    /// Returns whether the read is done. If not, some of it needs a wait, and nothing has happened.
    pub(super) fn read_small(&mut self, cookie: u64, offset: u64, len: usize) -> bool {
        let header = self.output.len;
        if self.session.structured {
            let length = u32::try_from(len).expect("a small read");
            if len == 0 {
                self.output.put(&empty_chunk(cookie));
                return true;
            }
            self.output.put(&data_chunk(cookie, true, offset, length));
        } else {
            self.output.put(&simple_reply(cookie, None));
        }
        let (page, at) = split(offset);
        let pages = (at + len).div_ceil(PAGE);
        let read = if at == 0 && len.is_multiple_of(PAGE) {
            at_once(self.queue, page, pages, self.output.extend(len))
        } else {
            let edge = &mut self.edge[..pages * PAGE];
            let read = at_once(self.queue, page, pages, edge);
            self.output.put(&self.edge[at..at + len]);
            read
        };
        match read {
            Some(Ok(())) => {}
            Some(Err(errno)) => {
                self.output.len = header;
                self.fail(cookie, errno.into(), true);
            }
            None => self.output.len = header,
        }
        read.is_some()
    }

    /// Writes the first `len` bytes of the input.
    pub(super) fn write_small(&mut self, offset: u64, len: usize) -> Result<(), Errno> {
        let parts = Parts::of(offset, len);
        let bytes = &mut self.input.bytes[self.input.start..self.input.start + len];
        let mut result = parts.patch(self.queue, bytes);
        if parts.pages > 0 {
            let body = &mut bytes[parts.body.clone()];
            let (page, pages) = (parts.page, parts.pages);
            let done =
                now(self.queue, &mut self.uses, &mut self.slices, Op::Write, page, pages, body);
            result = result.and(done);
        }
        result
    }

    pub(super) fn trim(&mut self, offset: u64, length: u64) -> Result<(), Errno> {
        // Partial pages stay: a trim is only advice.
        let first = offset.div_ceil(PAGE as u64);
        let end = (offset + length) / PAGE as u64;
        self.bare(Op::Discard, first, end.saturating_sub(first))
    }

    pub(super) fn zero(&mut self, offset: u64, length: u64, keep: bool) -> Result<(), Errno> {
        let page = PAGE as u64;
        let head = (page - offset % page) % page;
        if head >= length {
            let (index, at) = split(offset);
            let len = usize::try_from(length).expect("less than a page");
            return if len == 0 { Ok(()) } else { self.queue.patch(index, at, &ZEROS[..len]) };
        }
        let mut result = Ok(());
        if head > 0 {
            let (index, at) = split(offset);
            result = self.queue.patch(index, at, &ZEROS[at..]);
        }
        let first = (offset + head) / page;
        let end = (offset + length) / page;
        result = result.and(self.bare(Op::WriteZeroes { keep }, first, end - first));
        let (index, tail) = split(offset + length);
        if tail > 0 {
            result = result.and(self.queue.patch(index, 0, &ZEROS[..tail]));
        }
        result
    }

    pub(super) fn bare(&mut self, op: Op, page: u64, pages: u64) -> Result<(), Errno> {
        if pages == 0 {
            return Ok(());
        }
        let pages = usize::try_from(pages).expect("below 2^20 pages in 4 GiB");
        now(self.queue, &mut self.uses, &mut self.slices, op, page, pages, &mut [])
    }

    pub(super) fn status(&mut self, cookie: u64, offset: u64, length: u64, one: bool) {
        let end = offset + length;
        let mut extents = [(0_u32, 0_u32); EXTENTS];
        let mut number = 0;
        let (mut page, _) = split(offset);
        let last = end.div_ceil(PAGE as u64).min(page + LOOKED_AT);
        while page < last && number < if one { 1 } else { EXTENTS } {
            let Ok(extent) = self.queue.extent(page, last - page) else {
                return self.fail(cookie, Error::Invalid, true);
            };
            let from = offset.max(page * PAGE as u64);
            page += extent.pages;
            let to = end.min(page * PAGE as u64);
            let flags =
                if extent.hole { STATE_HOLE } else { 0 } | if extent.zero { STATE_ZERO } else { 0 };
            extents[number] = (u32::try_from(to - from).expect("within a request"), flags);
            number += 1;
        }
        self.output.put(&status_chunk(cookie, number));
        for (length, flags) in &extents[..number] {
            self.output.put(&length.to_be_bytes());
            self.output.put(&flags.to_be_bytes());
        }
    }
}
