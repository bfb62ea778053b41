//! The server's side of training: when, on what, and whether to believe what comes of it.
//!
//! ```text
//!  enough pages, or others than last time ─► ask ─► samples, a few at a time ─► wait ─► try ─► install
//!                                             ╎  through a channel (channel.rs)  ╎
//!                                 somebody starts a process (trainer.rs) ────────╯
//! ```
//!
//! A dictionary is tried by this thread before pages depend on it: the pages that were held out are
//! read from the store once more, compressed with it, decompressed and compared, and it has to
//! bring as much here as its maker says. A trainer that dies, hangs or lies costs the round.
//!
//! None is begun while memory is short, and one that is on then is given up, for a trainer takes
//! some. On a host that swaps to this store that is more than a courtesy: what a trainer takes,
//! this server has to make room for.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use codec::{Codec, Decoder, Dictionary, Encoder};
use device::{codec_of, Dictionaries, PageReader, PAGE, RECOMPRESSED};
use store::{Page, Store, Worker, MAX_DICTIONARY};

use crate::channel::{Channel, Over, Question, SAMPLES};
use crate::error::StartError;
use crate::settings::Settings;
use crate::stats::{add as count, thread_cpu, Counters};
use crate::trainer::{cost, gain, is_held_out, pays, FEWEST};

/// Entries of the table that a step looks at.
const LOOK_AT: u64 = 4096;

/// Pages that a step reads, sends or tries: less than a millisecond.
const AT_ONCE: usize = 16;

/// How long a trainer may take, from when it is asked for: to be started, to take samples, to
/// train.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often to look for what a trainer says, or whether it has taken what was said.
const LOOK: Duration = Duration::from_millis(50);

/// How long to wait with a round for which there would be reason while memory is short.
const PRESSED: Duration = Duration::from_secs(10);

/// A pause gets no longer than this many times the first one.
const MOST_PAUSES: u32 = 24;

/// Who starts processes that call [`train`](crate::train) for a server. Neither word may wait or
/// allocate.
pub struct Trainer {
    /// Codec and level that pages are written with: only zstd has dictionaries.
    pub settings: codec::Settings,
    /// Asks for a process that trains with what comes through this socket. Whoever does not hear
    /// it, or has no process, drops the socket, which tells as much.
    pub start: Box<dyn FnMut(OwnedFd) + Send>,
    /// The one that was asked for last is not waited for any more: it may be ended.
    pub stop: Box<dyn FnMut() + Send>,
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer").field("settings", &self.settings).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum State {
    Idle,
    /// A trainer gets samples: the next entry, eligible pages to leave out before the next one, and
    /// whether it has not yet taken the last ones.
    Giving {
        since: Instant,
        cursor: u64,
        skip: u64,
        full: bool,
    },
    /// It has all of them, but for what is on its way.
    Given(Instant),
    /// Its dictionary is tried: the next page held out, and what was had so far.
    Trying {
        room: Arc<Dictionary>,
        len: usize,
        next: usize,
        had: Had,
    },
}

/// What pages cost without the new dictionary, and with it.
#[derive(Clone, Copy, Debug, Default)]
struct Had {
    pages: usize,
    before: u64,
    after: u64,
    cpu_before: Duration,
    cpu_after: Duration,
}

/// Contexts, buffers and access to the store for training.
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
    /// Which pages the samples are.
    indices: Box<[u64; SAMPLES]>,
    found: usize,
    /// Of every so many eligible pages one is a sample.
    every: u64,
    state: State,
    /// Whether memory was short at the last step.
    pressed: bool,
    round: u64,
    /// Not before then.
    next: Instant,
    period: Duration,
    pauses: u32,
    least: u64,
    /// Pages held, and objects freed, when the last round began that came to a result; and the one
    /// that is on.
    last: Option<(u64, u64)>,
    this: Option<(u64, u64)>,
    counters: Arc<Counters>,
}

impl Training {
    /// One with all its memory; `None` where there are to be no dictionaries.
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
            encoder: Encoder::with_dictionaries(codec).map_err(StartError::Codec)?,
            decoder: Decoder::new(),
            last: (store.dictionaries() > 0).then(|| (held(store), store.objects_freed())),
            this: None,
            dictionaries,
            trainer,
            channel: Channel::new(),
            bytes: Box::new([0; MAX_DICTIONARY]),
            plain: Box::new([0; PAGE]),
            again: Box::new([0; PAGE]),
            coded: vec![0; Encoder::roomy(PAGE)].into_boxed_slice(),
            indices: vec![0; SAMPLES].into_boxed_slice().try_into().expect("as many"),
            found: 0,
            every: 1,
            state: State::Idle,
            pressed: false,
            // No two servers of a store have the same rounds.
            round: store.generation() << 32,
            next: Instant::now(),
            period: Duration::from_secs(settings.dictionary_period),
            pauses: 0,
            least: settings.dictionary_pages,
            counters: Arc::clone(counters),
        };
        // Contexts take their memory when they are first used, and not for one word over and over.
        for (at, byte) in this.plain.iter_mut().enumerate() {
            *byte = (at / 7).to_le_bytes()[0];
        }
        this.encoder.encode(&this.plain[..], &mut this.coded);
        Ok(Some(this))
    }

    /// As if the pause were over.
    #[cfg(test)]
    pub(crate) fn end_pause(&mut self) {
        self.next = Instant::now();
    }

    /// As if the trainer had not been heard of for long.
    #[cfg(test)]
    pub(crate) fn lose_patience(&mut self) {
        let long_ago =
            Instant::now().checked_sub(2 * PATIENCE).expect("the machine is up for longer");
        if let State::Giving { since, .. } | State::Given(since) = &mut self.state {
            *since = long_ago;
        }
    }

    /// Whether a dictionary is being tried.
    #[cfg(test)]
    pub(crate) fn is_trying(&self) -> bool {
        matches!(self.state, State::Trying { .. })
    }

    /// When to come again.
    pub(crate) fn wait(&self) -> Duration {
        match self.state {
            State::Idle => Duration::from_secs(1),
            State::Given(_) | State::Giving { full: true, .. } => LOOK,
            State::Trying { .. } if self.pressed => LOOK,
            State::Giving { .. } | State::Trying { .. } => Duration::from_millis(1),
        }
    }

    /// A bit of work, if there is any; `pressed` while memory is short.
    pub(crate) fn step(&mut self, pressed: bool) {
        self.pressed = pressed;
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => self.begin_if_due(pressed),
            State::Giving { .. } | State::Given(_) if pressed => self.make_room(),
            State::Giving { since, .. } | State::Given(since) if since.elapsed() > PATIENCE => {
                self.late();
            }
            State::Giving { since, cursor, skip, .. } => match self.give(since, cursor, skip) {
                Ok(state) => self.state = state,
                Err(over) => self.over(over),
            },
            State::Given(since) => match self.look_for_dictionary(since) {
                Ok(()) => {}
                Err(over) => self.over(over),
            },
            // Its place in the store will take memory.
            state @ State::Trying { .. } if pressed => self.state = state,
            State::Trying { room, len, next, had } => self.try_out(room, len, next, had),
        }
    }

    fn begin_if_due(&mut self, pressed: bool) {
        if Instant::now() < self.next || self.dictionaries.rooms() == 0 {
            return;
        }
        let store = self.worker.store();
        let (held, freed) = (held(store), store.objects_freed());
        // Other pages than those of the last time: most were written since, or there are many more.
        let others = self.last.is_none_or(|(then, before)| {
            freed.saturating_sub(before) >= then || held >= then.saturating_mul(4)
        });
        if held < self.least || !others {
            // That takes its time to change.
            self.next = Instant::now() + Duration::from_secs(1);
            return;
        }
        if pressed {
            count(&self.counters.dictionary_pressed, 1);
            self.next = Instant::now() + PRESSED;
            return;
        }
        count(&self.counters.dictionary_rounds, 1);
        self.this = Some((held, freed));
        self.every = (held / SAMPLES as u64).max(1);
        self.found = 0;
        self.round += 1;
        let newest = store.dictionaries().checked_sub(1);
        let there = newest.and_then(|place| store.dictionary(place, &mut self.bytes).ok());
        let current = there.map_or(0, |found| found.len);
        let question = Question { round: self.round, level: self.trainer.settings.level() };
        match self.channel.open(&question, &self.bytes[..current]) {
            Ok(theirs) => {
                (self.trainer.start)(theirs);
                let (since, skip) = (Instant::now(), self.every / 2);
                self.state = State::Giving { since, cursor: 0, skip, full: false };
            }
            Err(_) => self.fail(),
        }
    }

    /// Gives the trainer a few samples, as many as it takes.
    fn give(&mut self, since: Instant, from: u64, mut skip: u64) -> Result<State, Over> {
        let full = |cursor, skip| State::Giving { since, cursor, skip, full: true };
        if !self.channel.flush()? {
            return Ok(full(from, skip));
        }
        let pages = self.worker.store().pages();
        let to = from.saturating_add(LOOK_AT).min(pages);
        let before = self.found;
        for index in from..to {
            if self.found == SAMPLES {
                return Ok(self.end_samples(since));
            }
            if self.found - before == AT_ONCE {
                return Ok(State::Giving { since, cursor: index, skip, full: false });
            }
            if !self.is_eligible(index) {
                continue;
            }
            if skip > 0 {
                skip -= 1;
                continue;
            }
            match self.reader.read(&self.worker, index, false, &mut self.plain) {
                Ok(Page::Object { .. }) => {}
                // Somebody has written it, or whoever reads it is told.
                _ => continue,
            }
            skip = self.every - 1;
            self.indices[self.found] = index;
            self.found += 1;
            self.channel.put_sample(&self.plain);
            if !self.channel.flush()? {
                return Ok(full(index + 1, skip));
            }
        }
        if to < pages {
            Ok(State::Giving { since, cursor: to, skip, full: false })
        } else {
            Ok(self.end_samples(since))
        }
    }

    /// After all of them: too few are not worth a dictionary.
    fn end_samples(&mut self, since: Instant) -> State {
        if self.found / 3 < FEWEST {
            self.fail();
            return State::Idle;
        }
        self.channel.put_end();
        State::Given(since)
    }

    /// A page of its own that compresses, and was not compressed again for being idle.
    fn is_eligible(&self, index: u64) -> bool {
        matches!(self.worker.peek(index), Ok((Page::Object { tag, .. }, _))
            if tag & RECOMPRESSED == 0 && codec_of(tag) == Some(Codec::Zstd))
    }

    fn look_for_dictionary(&mut self, since: Instant) -> Result<(), Over> {
        self.state = State::Given(since);
        if !self.channel.flush()? {
            return Ok(());
        }
        let Some(answer) = self.channel.receive(&mut self.bytes)? else { return Ok(()) };
        if answer.len == 0 {
            count(&self.counters.dictionary_no_gain, 1);
            self.last = self.this;
            self.end(true);
            return Ok(());
        }
        let Some(mut room) = self.dictionaries.take_room() else {
            self.fail();
            return Ok(());
        };
        let bytes = &self.bytes[..answer.len];
        if Arc::get_mut(&mut room).is_some_and(|room| room.digest(bytes).is_ok()) {
            // It has said all that it has to say.
            self.channel.close();
            let had = Had::default();
            self.state = State::Trying { room, len: answer.len, next: 0, had };
            Ok(())
        } else {
            self.dictionaries.give_back(room);
            Err(Over::Lied)
        }
    }

    fn try_out(&mut self, room: Arc<Dictionary>, len: usize, from: usize, mut had: Had) {
        let to = (from + 3 * AT_ONCE).min(self.found);
        for number in (from..to).filter(|&number| is_held_out(number)) {
            let index = self.indices[number];
            let there = self.is_eligible(index)
                && self.reader.read(&self.worker, index, false, &mut self.plain).is_ok();
            if !there {
                continue;
            }
            let newest = self.dictionaries.newest().map(|(_, newest)| newest);
            let begun = thread_cpu();
            let (encoded, _) = self.encoder.encode_with(newest, &self.plain[..], &mut self.coded);
            let between = thread_cpu();
            had.before += cost(encoded.codec, encoded.len);
            let (encoded, used) =
                self.encoder.encode_with(Some(&room), &self.plain[..], &mut self.coded);
            had.cpu_after += thread_cpu().saturating_sub(between);
            had.cpu_before += between.saturating_sub(begun);
            if used {
                let payload = &self.coded[..encoded.len];
                let decoded = self.decoder.decode_with(&room, payload, &mut self.again[..]);
                if decoded.is_err() || self.again != self.plain {
                    self.drop_room(room);
                    return self.lied();
                }
            }
            had.after += cost(encoded.codec, encoded.len);
            had.pages += 1;
        }
        if to < self.found {
            self.state = State::Trying { room, len, next: to, had };
            return;
        }
        let gain = gain(had.before, had.after);
        if had.pages < FEWEST || !pays(gain, had.cpu_before, had.cpu_after) {
            self.drop_room(room);
            count(&self.counters.dictionary_no_gain, 1);
            self.last = self.this;
            return self.end(true);
        }
        self.encoder.forget_dictionary();
        let store = self.worker.store();
        match self.dictionaries.install(store, room, &self.bytes[..len], gain) {
            Ok(_) => {
                count(&self.counters.dictionary_installed, 1);
                self.last = self.this;
                self.pauses = 0;
                self.end(false);
            }
            Err(_) => self.fail(),
        }
    }

    fn drop_room(&mut self, room: Arc<Dictionary>) {
        self.encoder.forget_dictionary();
        self.dictionaries.give_back(room);
    }

    /// The trainer is gone, or lies.
    fn over(&mut self, over: Over) {
        match over {
            Over::Gone => self.late(),
            Over::Lied => self.lied(),
        }
    }

    /// The trainer has not said in time what it had to say: it was killed, hangs, or was never
    /// started.
    fn late(&mut self) {
        count(&self.counters.dictionary_late, 1);
        self.give_up();
    }

    /// What it said is not what a trainer says.
    fn lied(&mut self) {
        count(&self.counters.dictionary_refused, 1);
        self.give_up();
    }

    /// It may keep the memory that others need now.
    fn make_room(&mut self) {
        count(&self.counters.dictionary_pressed, 1);
        self.give_up();
    }

    fn fail(&mut self) {
        count(&self.counters.dictionary_put_off, 1);
        self.give_up();
    }

    /// Ends the round before its time, and the trainer.
    fn give_up(&mut self) {
        (self.trainer.stop)();
        self.end(true);
    }

    /// Ends the round; the next one is the later the more of them brought nothing.
    fn end(&mut self, in_vain: bool) {
        self.worker.rest();
        self.channel.close();
        if in_vain {
            self.pauses = (self.pauses * 2).clamp(1, MOST_PAUSES);
        }
        self.next = Instant::now() + self.period * self.pauses.max(1);
        self.state = State::Idle;
    }
}

/// Pages of their own that compress.
fn held(store: &Store) -> u64 {
    let stats = store.stats();
    (stats.orig_data_size / PAGE as u64)
        .saturating_sub(stats.same_pages)
        .saturating_sub(stats.huge_pages)
        .saturating_sub(stats.grouped_pages)
        .saturating_sub(stats.bd_count)
}

impl std::fmt::Debug for Training {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Training").field("state", &self.state).finish_non_exhaustive()
    }
}
