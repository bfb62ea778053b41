//! The device's own threads: workers, which do pages of split requests, and fetch threads, which
//! wait for the backing device.
#![expect(unsafe_code, reason = "workers follow invitations to flights")]

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::dispatch::{Dispatch, Fetch, Invitation, Next};
use crate::fetcher::Fetcher;
use crate::guard::IoPath;
use crate::page_io::PageIo;
use crate::records::Records;

/// The name of the fetch threads, before a dash and their number.
pub const FETCH_THREAD: &str = "fetch";

/// Shared by a device and its queues. The threads end when the last reference is dropped.
pub(crate) struct Threads {
    pub(crate) records: Arc<Records>,
    pub(crate) dispatch: Arc<Dispatch>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    pub(crate) fn new(records: Records, dispatch: Dispatch) -> Self {
        let handles = Mutex::new(Vec::with_capacity(records.workers + dispatch.fetchers));
        Self { records: Arc::new(records), dispatch: Arc::new(dispatch), handles }
    }

    pub(crate) fn handles(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn start_worker(&self, number: usize, mut pages: PageIo) -> io::Result<()> {
        let dispatch = Arc::clone(&self.dispatch);
        let thread = thread::Builder::new().name(format!("device-{number}"));
        self.handles().push(thread.spawn(move || work(&dispatch, &mut pages))?);
        Ok(())
    }

    pub(crate) fn start_fetcher(&self, number: usize, mut fetcher: Fetcher) -> io::Result<()> {
        let dispatch = Arc::clone(&self.dispatch);
        let thread = thread::Builder::new().name(format!("{FETCH_THREAD}-{number}"));
        self.handles().push(thread.spawn(move || fetch(&dispatch, &mut fetcher))?);
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.dispatch.stop();
        for thread in std::mem::take(&mut *self.handles()) {
            // A thread that panicked has reported its panic.
            let _ = thread.join();
        }
    }
}

/// A worker: follows invitations until it has to stop.
fn work(dispatch: &Dispatch, pages: &mut PageIo) {
    let _path = IoPath::enter();
    while let Next::Work(Invitation { queue, flight: number }) =
        dispatch.invitations.wait(None, &dispatch.stop)
    {
        pages.slot().begin();
        let station = dispatch.station(queue);
        let flight = &station.flights[usize::from(number)];
        // SAFETY: this thread was invited, and releases the invitation below.
        let last = unsafe {
            flight.work(pages, |first, count| dispatch.fetch(queue, number, first, count))
        };
        flight.release();
        if last {
            station.finish(number);
        }
        pages.slot().end();
    }
}

/// A fetch thread: reads pages that other threads found on the backing device, until it has to
/// stop.
fn fetch(dispatch: &Dispatch, fetcher: &mut Fetcher) {
    let _path = IoPath::enter();
    while let Next::Work(Fetch { queue, flight: number, first, count }) =
        dispatch.fetches.wait(None, &dispatch.stop)
    {
        let station = dispatch.station(queue);
        let flight = &station.flights[usize::from(number)];
        // SAFETY: this thread was invited for these pages, and releases the invitation below.
        let last = unsafe { flight.fetch(fetcher, first, count) };
        flight.release();
        if last {
            station.finish(number);
        }
    }
}
