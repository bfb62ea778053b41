//! The server's side of training: when to train, on which pages, and whether to use the result.
//!
//! ```text
//!  enough pages, or others than last time ─► ask ─► samples, a few at a time ─► wait ─► try ─► install
//!                                             ╎  through a channel (channel.rs)  ╎
//!                                 the supervisor starts a process (trainer.rs) ──╯
//! ```
//!
//! Before pages depend on a dictionary, this thread tries it: the held-out pages are read from the
//! store again, compressed with it, decompressed and compared, and its gain has to be enough. A
//! trainer that dies, hangs or sends invalid data costs only the round.
//!
//! No training starts while memory is short, and a running one is abandoned, because a trainer
//! needs memory. On a host that swaps to this store, this server would have to free that memory.

mod round;
mod samples;
mod trial;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use codec::{Codec, Decoder, Dictionary, Encoder};
use device::{Dictionaries, PageReader, PAGE};
use store::{Store, Worker, MAX_DICTIONARY};

use crate::channel::{Channel, SAMPLES};
use crate::error::StartError;
use crate::settings::Settings;
use crate::stats::Counters;

/// Pages that a step reads, sends or tries: less than a millisecond.
const AT_ONCE: usize = 16;

/// How often to poll the channel.
const LOOK: Duration = Duration::from_millis(50);

/// Starts processes that call [`train`](crate::train) for a server. The callbacks must neither
/// block nor allocate.
pub struct Trainer {
    /// Codec and level of new writes: only zstd has dictionaries.
    pub settings: codec::Settings,
    /// Asks for a process that trains with this socket. If there is none, the callback drops the
    /// socket, which the policy detects.
    pub start: Box<dyn FnMut(OwnedFd) + Send>,
    /// Called when the last requested process is no longer needed, and may be ended.
    pub stop: Box<dyn FnMut() + Send>,
}

/// The most heap memory of training, in bytes, for new pages of these settings: the memory of a
/// thread for requests, a decoder and samples.
pub(crate) fn memory(new: codec::Settings) -> usize {
    device::thread_heap(new) + Dictionary::context_memory(new.level()) + (320 << 10)
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer").field("settings", &self.settings).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum State {
    Idle,
    /// A trainer gets samples: its deadline, the next entry, the eligible pages to skip before the
    /// next sample, and whether the trainer has yet to read the last one.
    Giving {
        until: Instant,
        cursor: u64,
        skip: u64,
        full: bool,
    },
    /// All samples are sent, except for the bytes in the buffer. The trainer's deadline.
    Given(Instant),
    /// A dictionary is being tried: the next held-out page, and the sums so far.
    Trying {
        room: Arc<Dictionary>,
        len: usize,
        next: usize,
        had: Had,
    },
}

/// The cost of pages without the new dictionary and with it.
#[derive(Clone, Copy, Debug, Default)]
struct Had {
    pages: usize,
    before: u64,
    after: u64,
    cpu_before: Duration,
    cpu_after: Duration,
}

/// Codec contexts, buffers and access to the store for training.
pub(crate) struct Training {
    worker: Worker,
    reader: PageReader,
    encoder: Encoder,
    decoder: Decoder,
    dictionaries: Arc<Dictionaries>,
    trainer: Trainer,
    channel: Channel,
    bytes: Box<[u8; MAX_DICTIONARY]>,
    plain: Box<[u8; PAGE]>,
    again: Box<[u8; PAGE]>,
    coded: Box<[u8]>,
    /// The sampled pages.
    indices: Box<[u64; SAMPLES]>,
    found: usize,
    /// One of this many eligible pages is a sample.
    every: u64,
    state: State,
    /// Whether memory was short at the last step.
    pressed: bool,
    round: u64,
    /// The earliest start of the next round.
    next: Instant,
    period: Duration,
    pauses: u32,
    least: u64,
    /// Pages held, and objects freed, at the start of the last round with a result, and of the
    /// current one.
    last: Option<(u64, u64)>,
    this: Option<(u64, u64)>,
    counters: Arc<Counters>,
}

impl Training {
    /// Allocates all memory; `None` if there are to be no dictionaries.
    pub(crate) fn new(
        store: &Arc<Store>,
        settings: &Settings,
        trainer: Trainer,
        counters: &Arc<Counters>,
    ) -> Result<Option<Self>, StartError> {
        let reader = PageReader::new(store);
        let dictionaries = Arc::clone(reader.dictionaries());
        let codec = trainer.settings;
        if !settings.trains() || codec.codec() != Codec::Zstd || dictionaries.rooms() == 0 {
            return Ok(None);
        }
        let mut this = Self {
            worker: store.worker().ok_or(StartError::Full)?,
            reader,
            encoder: Encoder::with_dictionaries(codec, PAGE).map_err(StartError::Codec)?,
            decoder: Decoder::new(),
            last: (store.dictionaries() > 0).then(|| (held(store), store.objects_freed())),
            this: None,
            dictionaries,
            trainer,
            channel: Channel::new(),
            bytes: Box::new([0; MAX_DICTIONARY]),
            plain: Box::new([0; PAGE]),
            again: Box::new([0; PAGE]),
            coded: vec![0; PAGE].into_boxed_slice(),
            indices: vec![0; SAMPLES].into_boxed_slice().try_into().expect("as many"),
            found: 0,
            every: 1,
            state: State::Idle,
            pressed: false,
            // No two servers of a store share round numbers.
            round: store.generation() << 32,
            next: Instant::now(),
            period: Duration::from_secs(settings.dictionary_period),
            pauses: 0,
            least: settings.dictionary_pages,
            counters: Arc::clone(counters),
        };
        // A context allocates at its first use, and not for a same-filled page.
        for (at, byte) in this.plain.iter_mut().enumerate() {
            *byte = (at / 7).to_le_bytes()[0];
        }
        this.encoder.encode(&this.plain[..], &mut this.coded);
        Ok(Some(this))
    }

    /// Ends the pause.
    #[cfg(test)]
    pub(crate) fn end_pause(&mut self) {
        self.next = Instant::now();
    }

    /// Makes the trainer late.
    #[cfg(test)]
    pub(crate) fn lose_patience(&mut self) {
        if let State::Giving { until, .. } | State::Given(until) = &mut self.state {
            *until = Instant::now();
        }
    }

    /// Whether a dictionary is being tried.
    #[cfg(test)]
    pub(crate) fn is_trying(&self) -> bool {
        matches!(self.state, State::Trying { .. })
    }

    /// How long training has nothing to do.
    pub(crate) fn wait(&self) -> Duration {
        match self.state {
            State::Idle => Duration::from_secs(1),
            State::Given(_) | State::Giving { full: true, .. } => LOOK,
            State::Trying { .. } if self.pressed => LOOK,
            State::Giving { .. } | State::Trying { .. } => Duration::from_millis(1),
        }
    }

    /// Does some work, if there is any. `pressed` means that memory is short.
    pub(crate) fn step(&mut self, pressed: bool) {
        self.pressed = pressed;
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => self.begin_if_due(pressed),
            State::Giving { .. } | State::Given(_) if pressed => self.make_room(),
            State::Giving { until, .. } | State::Given(until) if Instant::now() >= until => {
                self.late();
            }
            State::Giving { until, cursor, skip, .. } => match self.give(until, cursor, skip) {
                Ok(state) => self.state = state,
                Err(over) => self.over(over),
            },
            State::Given(until) => match self.look_for_dictionary(until) {
                Ok(()) => {}
                Err(over) => self.over(over),
            },
            // Installing it would take memory.
            state @ State::Trying { .. } if pressed => self.state = state,
            State::Trying { room, len, next, had } => self.try_out(room, len, next, had),
        }
    }
}

impl std::fmt::Debug for Training {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Training").field("state", &self.state).finish_non_exhaustive()
    }
}

/// Pages that are compressed: neither same-filled nor uncompressed.
fn held(store: &Store) -> u64 {
    let stats = store.stats();
    (stats.orig_data_size / PAGE as u64)
        .saturating_sub(stats.same_pages)
        .saturating_sub(stats.huge_pages)
        .saturating_sub(stats.grouped_pages)
        .saturating_sub(stats.bd_count)
}
