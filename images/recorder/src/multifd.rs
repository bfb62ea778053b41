//! Records a multifd migration: a main channel, and channels with pages.
//!
//! Pages of different channels are ordered only by barriers. QEMU ends the pages of each channel
//! with a SYNC packet, and then writes a barrier record to the main channel. Between two barriers
//! it sends no page twice. So a channel waits behind its SYNC until the main channel has passed the
//! barrier, and the main channel waits there for all channels, as in a destination QEMU: the last
//! version of a page is passed on last, and no page is held back. QEMU waits for neither: it has
//! written all SYNC packets before the barrier.

use std::io::{self, Read};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use image::RamBlock;

use crate::packet::Table;
use crate::record::{parse, Ending, Recorded};
use crate::source::{unknown, Source};
use crate::target::Target;
use crate::{RecordError, Sink};

/// One multifd migration, whose pages are passed to one sink. Each connection is read on a thread
/// of its own.
pub struct Multifd<S: Sink> {
    /// `None` once the migration is recorded.
    sink: Mutex<Option<S>>,
    state: Mutex<State<S::Error>>,
    pub(crate) changed: Condvar,
}

pub(crate) struct State<E> {
    pub(crate) phase: Phase,
    /// The first error.
    error: Option<RecordError<E>>,
    /// The RAM, once the main channel has announced it.
    pub(crate) table: Option<Arc<Table>>,
    /// Barriers that the main channel has passed.
    pub(crate) barriers: u64,
    /// The channels by number; `None` before their first packet.
    pub(crate) records: Vec<Option<ChannelRecord>>,
    /// The VM's UUID in the first packets.
    pub(crate) uuid: Option<[u8; 16]>,
    /// Whether something followed the last barrier.
    pub(crate) late: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Recording,
    Recorded,
    Failed,
}

/// The record of one channel.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChannelRecord {
    pub(crate) syncs: u64,
    /// Whether pages have followed the last SYNC.
    pub(crate) open: bool,
    pub(crate) ended: bool,
    pub(crate) pages: u64,
    pub(crate) zeros: u64,
    pub(crate) bytes: u64,
    /// Pages and zero pages by the tokeniser's count, and whether it has lost its place.
    pub(crate) judged: (u64, u64, bool),
}

/// The error of a recording that something else has ended.
pub(crate) fn ended<E>(at: u64) -> RecordError<E> {
    let text = "the recording was ended";
    RecordError::Io { at, source: io::Error::new(io::ErrorKind::ConnectionAborted, text) }
}

impl<S: Sink> Multifd<S> {
    /// Begins to record a migration with that many multifd channels.
    pub fn new(channels: u8, sink: S) -> Self {
        let state = State {
            phase: Phase::Recording,
            error: None,
            table: None,
            barriers: 0,
            records: vec![None; usize::from(channels)],
            uuid: None,
            late: false,
        };
        Self { sink: Mutex::new(Some(sink)), state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Records the main channel. Returns the rest of the stream and the sink once every channel has
    /// passed the last barrier.
    ///
    /// # Errors
    ///
    /// The first error of any channel: see [`record`](crate::record()).
    pub fn main<R: Read>(
        &self,
        reader: R,
        ending: Ending,
    ) -> Result<(Recorded, S), RecordError<S::Error>> {
        let leaving = Leaving::new(self);
        let parsed = parse(&mut Source::new(reader), &mut Shared(self), ending);
        let result = parsed.and_then(|(recorded, _)| self.finish(recorded));
        leaving.without_panic();
        result.map_err(|error| {
            self.fail(error);
            self.state().error.take().unwrap_or_else(|| ended(0))
        })
    }

    /// Makes every wait end, and [`Multifd::main`] fail with `why` unless it has failed already.
    /// Reads have to end by themselves.
    pub fn abandon(&self, why: io::Error) {
        self.fail(RecordError::Io { at: 0, source: why });
    }

    /// Whether the migration is recorded or has failed.
    pub fn is_over(&self) -> bool {
        self.state().phase != Phase::Recording
    }

    /// Whether the recording has failed.
    pub fn has_failed(&self) -> bool {
        self.state().phase == Phase::Failed
    }

    /// Whether a page is being passed to the sink.
    pub fn is_storing(&self) -> bool {
        matches!(self.sink.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Whether a channel had pages or a SYNC behind the last barrier: the recorded pages are then
    /// not those of the VM.
    pub fn has_late_pages(&self) -> bool {
        self.state().late
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State<S::Error>> {
        // No code panics while it holds this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `store` with the sink.
    pub(crate) fn store(
        &self,
        store: impl FnOnce(&mut S) -> Result<(), S::Error>,
    ) -> Result<(), RecordError<S::Error>> {
        let Ok(mut sink) = self.sink.lock() else { return Err(ended(0)) };
        let sink = sink.as_mut().ok_or_else(|| ended(0))?;
        store(sink).map_err(RecordError::Sink)
    }

    /// Notes an error. Later errors follow from the first one.
    pub(crate) fn fail(&self, error: RecordError<S::Error>) {
        let mut state = self.state();
        if state.phase == Phase::Recording {
            state.phase = Phase::Failed;
            state.error = Some(error);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Checks what all channels have sent, and takes the sink.
    fn finish(&self, mut recorded: Recorded) -> Result<(Recorded, S), RecordError<S::Error>> {
        let mut state = self.state();
        if state.phase != Phase::Recording {
            return Err(ended(recorded.bytes));
        }
        for (number, record) in (0..=u8::MAX).zip(&state.records) {
            let record = record.unwrap_or_default();
            if record.syncs != state.barriers || record.open {
                let what = "pages or a SYNC behind the end of RAM";
                return Err(unknown(record.bytes, what).of_channel(number));
            }
            for (what, ours, theirs) in [
                ("pages", record.pages, record.judged.0),
                ("zero pages", record.zeros, record.judged.1),
                ("gaps", 0, u64::from(record.judged.2)),
            ] {
                if ours != theirs {
                    return Err(RecordError::Disagree { what, ours, theirs }.of_channel(number));
                }
            }
            recorded.pages += record.pages;
            recorded.zeros += record.zeros;
            recorded.bytes += record.bytes;
        }
        state.phase = Phase::Recorded;
        drop(state);
        self.changed.notify_all();
        // No channel passes on pages any more.
        let sink = self.sink.lock().ok().and_then(|mut sink| sink.take());
        sink.map(|sink| (recorded, sink)).ok_or_else(|| ended(0))
    }
}

/// Makes the recording fail if the thread of a connection panics.
pub(crate) struct Leaving<'a, S: Sink> {
    multifd: &'a Multifd<S>,
    has_panicked: bool,
}

impl<'a, S: Sink> Leaving<'a, S> {
    pub(crate) fn new(multifd: &'a Multifd<S>) -> Self {
        Self { multifd, has_panicked: true }
    }

    pub(crate) fn without_panic(mut self) {
        self.has_panicked = false;
    }
}

impl<S: Sink> Drop for Leaving<'_, S> {
    fn drop(&mut self) {
        if self.has_panicked {
            self.multifd.fail(ended(0));
        }
    }
}

/// The main channel's view of the migration.
struct Shared<'a, S: Sink>(&'a Multifd<S>);

impl<S: Sink> Shared<'_, S> {
    fn store(&self, store: impl FnOnce(&mut S) -> Result<(), S::Error>) -> Result<(), S::Error> {
        // After a panic of another thread, `finish` fails.
        let mut sink = self.0.sink.lock().unwrap_or_else(PoisonError::into_inner);
        store(sink.as_mut().expect("`finish` takes it, after the last page"))
    }
}

impl<S: Sink> Sink for Shared<'_, S> {
    type Error = S::Error;

    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), S::Error> {
        self.store(|sink| sink.blocks(page_size, blocks))?;
        let table = Table { page_size, blocks: blocks.to_vec() };
        self.0.state().table = Some(Arc::new(table));
        self.0.changed.notify_all();
        Ok(())
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), S::Error> {
        self.store(|sink| sink.page(block, page, bytes))
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), S::Error> {
        self.store(|sink| sink.zero(block, page))
    }
}

impl<S: Sink> Target for Shared<'_, S> {
    fn is_multifd(&self) -> bool {
        true
    }

    fn barrier(&mut self, at: u64) -> Result<(), RecordError<S::Error>> {
        let mut state = self.0.state();
        let barrier = state.barriers + 1;
        loop {
            if state.phase != Phase::Recording {
                return Err(ended(at));
            }
            let mut missing = false;
            for (channel, record) in (0..=u8::MAX).zip(&state.records) {
                let ChannelRecord { syncs, ended, bytes, .. } = record.unwrap_or_default();
                if ended && syncs < barrier {
                    let during = "before the SYNC for which the main channel waits";
                    return Err(RecordError::Ends { at: bytes, during }.of_channel(channel));
                }
                missing |= syncs < barrier;
            }
            if !missing {
                break;
            }
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.barriers = barrier;
        drop(state);
        self.0.changed.notify_all();
        Ok(())
    }
}
