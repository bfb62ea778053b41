//! A fetch thread: reads pages, and may wait for the backing device.

use std::sync::Arc;

use store::Worker;

use crate::counters::{add, Counters};
use crate::flight::WaitForPages;
use crate::pages::{Damage, PageReader};
use crate::records::{Records, Thread};
use crate::request::{Buffer, Errno};

/// The state of a fetch thread.
pub(crate) struct Fetcher {
    records: Arc<Records>,
    worker: Worker,
    reader: PageReader,
    /// The place of the thread's counters and heartbeat.
    place: usize,
}

impl Fetcher {
    /// Allocates all memory for this thread.
    pub(crate) fn new(records: &Arc<Records>, worker: Worker, thread: Thread) -> Self {
        let reader = PageReader::new(worker.store());
        let place = records.place(thread);
        Self { records: Arc::clone(records), worker, reader, place }
    }
}

impl WaitForPages for Fetcher {
    fn wait(&mut self, page: u64, buffer: &Buffer, first: u32, count: u32) -> Result<(), Errno> {
        let Self { records, worker, reader, place } = self;
        fetch(reader, worker, (records.counters(*place), records), (page, buffer), first, count)
    }
}

/// Reads `count` pages of a request from its page `first`, from memory or from the backing device.
pub(crate) fn fetch(
    reader: &mut PageReader,
    worker: &Worker,
    (counters, records): (&Counters, &Records),
    (page, buffer): (u64, &Buffer),
    first: u32,
    count: u32,
) -> Result<(), Errno> {
    let mut result = Ok(());
    for number in first..first + count {
        #[expect(unsafe_code, reason = "the page of the buffer is ours")]
        // SAFETY: the caller has exclusive use of this page of the buffer.
        let out = unsafe { buffer.read(number as usize) };
        let read = reader.fetch(worker, page + u64::from(number), true, out);
        result = result.and(read.map(drop).map_err(|damage| damaged(counters, records, damage)));
    }
    add(&counters.pages_read, u64::from(count));
    result
}

#[cold]
pub(crate) fn damaged(counters: &Counters, records: &Records, damage: Damage) -> Errno {
    add(&counters.failed_reads, 1);
    records.note_damage(damage);
    Errno::Io
}
