//! Byte ranges split into pages, and a connection's input and output buffers.

use device::{Errno, Queue, PAGE};

/// A byte offset as page and offset in the page.
pub(crate) fn split(offset: u64) -> (u64, usize) {
    let at = usize::try_from(offset % PAGE as u64).expect("below a page");
    (offset / PAGE as u64, at)
}

/// A byte range to be written: a partial page, whole pages, a partial page.
#[derive(Clone, Debug)]
pub(crate) struct Parts {
    pub(crate) offset: u64,
    /// The whole pages, as a range of the bytes.
    pub(crate) body: std::ops::Range<usize>,
    pub(crate) page: u64,
    pub(crate) pages: usize,
    pub(crate) len: usize,
}

impl Parts {
    pub(crate) fn of(offset: u64, len: usize) -> Self {
        let (_, at) = split(offset);
        let head = ((PAGE - at) % PAGE).min(len);
        let pages = (len - head) / PAGE;
        let (page, _) = split(offset + head as u64);
        Self { offset, body: head..head + pages * PAGE, page, pages, len }
    }

    /// Writes the partial pages.
    pub(crate) fn patch<Q: Queue>(&self, queue: &mut Q, bytes: &[u8]) -> Result<(), Errno> {
        let mut result = Ok(());
        let (head, tail) = (..self.body.start, self.body.end..self.len);
        if self.body.start > 0 {
            let (page, at) = split(self.offset);
            result = queue.patch(page, at, &bytes[head]);
        }
        if !tail.is_empty() {
            let (page, at) = split(self.offset + tail.start as u64);
            result = result.and(queue.patch(page, at, &bytes[tail]));
        }
        result
    }
}

/// Received bytes that are not yet parsed.
pub(crate) struct Input {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Input {
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    pub(crate) fn front(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(crate) fn take(&mut self, len: usize) {
        self.start += len;
        debug_assert!(self.start <= self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Free space, never empty: the longest message that is needed in one piece takes half of the
    /// buffer.
    pub(crate) fn back(&mut self) -> &mut [u8] {
        if self.start > 0 && self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }
}

/// Bytes to be sent.
pub(crate) struct Output {
    pub(crate) bytes: Box<[u8]>,
    pub(crate) len: usize,
}

impl Output {
    pub(crate) fn room(&self) -> usize {
        self.bytes.len() - self.len
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.extend(bytes.len()).copy_from_slice(bytes);
    }

    /// Appends `len` bytes, to be filled by the caller.
    pub(crate) fn extend(&mut self, len: usize) -> &mut [u8] {
        let start = self.len;
        self.len += len;
        &mut self.bytes[start..self.len]
    }
}
