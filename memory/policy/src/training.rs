//! The server's side of training: when, on what, and whether to believe what comes of it.
//!
//! ```text
//!  enough pages, or others than last time ─► ask ─► samples, a few at a time ─► wait ─► try ─► install
//!                                             ╎           in the file            ╎
//!                                 somebody starts a process (trainer.rs) ────────╯
//! ```
//!
//! A dictionary is tried by this thread before pages depend on it: the pages that were held out are read from the store
//! once more, compressed with it, decompressed and compared, and it has to bring as much here as its maker
//! says. A trainer that dies, hangs or lies costs the round.

use std::sync::Arc;
use std::time::{Duration, Instant};

use codec::{Codec, Decoder, Dictionary, Encoder};
use device::{codec_of, Dictionaries, PageReader, PAGE, RECOMPRESSED};
use store::{Page, Store, Worker, MAX_DICTIONARY};

use crate::ground::{Ground, Phase, Question, SAMPLES};
use crate::settings::Settings;
use crate::stats::{add as count, Counters};
use crate::thread::{thread_cpu, StartError};
use crate::trainer::{cost, gain, is_held_out, pays, FEWEST, PATIENCE};

/// Entries of the table that a step looks at.
const LOOK_AT: u64 = 4096;

/// Pages that a step reads or tries: less than a millisecond.
const AT_ONCE: usize = 16;

/// How long to wait for a trainer to begin, and then for what it makes of the samples.
const START: Duration = Duration::from_secs(30);

/// How often to look for what a trainer says.
const LOOK: Duration = Duration::from_millis(50);

/// A pause gets no longer than this many times the first one.
const MOST_PAUSES: u32 = 24;

/// Who starts a process that calls [`train`](crate::train) for a server.
pub struct Trainer {
    /// What the two share.
    pub ground: Ground,
    /// Codec and level that pages are written with: only zstd has dictionaries.
    pub settings: codec::Settings,
    /// Asks for the process. It may neither wait nor allocate.
    pub start: Box<dyn FnMut() + Send>,
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer").field("settings", &self.settings).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum State {
    Idle,
    /// Somebody was asked to start a trainer.
    Asked(Instant),
    /// Looking for samples: the next entry, and eligible pages to leave out before the next one.
    Gathering {
        cursor: u64,
        skip: u64,
    },
    /// The trainer has the samples.
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
    round: u64,
    /// Not before then.
    next: Instant,
    period: Duration,
    pauses: u32,
    least: u64,
    /// Pages held, and objects freed, when the last round began that came to a result; and the one that is on.
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
            bytes: Box::new([0; MAX_DICTIONARY]),
            plain: Box::new([0; PAGE]),
            again: Box::new([0; PAGE]),
            coded: vec![0; Encoder::roomy(PAGE)].into_boxed_slice(),
            indices: vec![0; SAMPLES].into_boxed_slice().try_into().expect("as many"),
            found: 0,
            every: 1,
            state: State::Idle,
            // No two servers of a store have the same rounds: a trainer of the last one may be there yet.
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
        if let State::Asked(since) | State::Given(since) = &mut self.state {
            *since = long_ago;
        }
    }

    /// When to come again.
    pub(crate) fn wait(&self) -> Duration {
        match self.state {
            State::Idle => Duration::from_secs(1),
            State::Asked(_) | State::Given(_) => LOOK,
            State::Gathering { .. } | State::Trying { .. } => Duration::from_millis(1),
        }
    }

    /// A bit of work, if there is any.
    pub(crate) fn step(&mut self) {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => self.begin_if_due(),
            State::Asked(since) => self.look_for_trainer(since),
            State::Gathering { cursor, skip } => self.gather(cursor, skip),
            State::Given(since) => self.look_for_dictionary(since),
            State::Trying { room, len, next, had } => self.try_out(room, len, next, had),
        }
    }

    fn begin_if_due(&mut self) {
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
        count(&self.counters.dictionary_rounds, 1);
        self.this = Some((held, freed));
        self.every = (held / SAMPLES as u64).max(1);
        self.round += 1;
        if self.ask(Phase::Asked, 0).is_none() {
            return self.fail();
        }
        (self.trainer.start)();
        self.state = State::Asked(Instant::now());
    }

    /// Writes the question; how many bytes the dictionary has that there is.
    fn ask(&mut self, phase: Phase, current: usize) -> Option<()> {
        let level = self.trainer.settings.level();
        let question = Question { round: self.round, phase, samples: self.found, current, level };
        self.trainer.ground.ask(&question).ok()
    }

    fn look_for_trainer(&mut self, since: Instant) {
        match self.trainer.ground.answered(self.round, &mut self.bytes) {
            Some(Ok(answer)) if answer.phase == Phase::Ready => {
                self.found = 0;
                self.state = State::Gathering { cursor: 0, skip: self.every / 2 };
            }
            Some(_) => self.lied(),
            None if since.elapsed() > START => self.late(),
            None => self.state = State::Asked(since),
        }
    }

    fn gather(&mut self, from: u64, mut skip: u64) {
        let pages = self.worker.store().pages();
        let to = from.saturating_add(LOOK_AT).min(pages);
        let before = self.found;
        for index in from..to {
            if self.found == SAMPLES {
                return self.give();
            }
            if self.found - before == AT_ONCE {
                self.state = State::Gathering { cursor: index, skip };
                return;
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
            if self.trainer.ground.put_sample(self.found, &self.plain).is_err() {
                return self.fail();
            }
            self.indices[self.found] = index;
            self.found += 1;
        }
        if to < pages {
            self.state = State::Gathering { cursor: to, skip };
        } else {
            self.give();
        }
    }

    /// A page of its own that compresses, and was not compressed again for being idle.
    fn is_eligible(&self, index: u64) -> bool {
        matches!(self.worker.peek(index), Ok((Page::Object { tag, .. }, _))
            if tag & RECOMPRESSED == 0 && codec_of(tag) == Some(Codec::Zstd))
    }

    fn give(&mut self) {
        let store = self.worker.store();
        let newest = store.dictionaries().checked_sub(1);
        let there = newest.and_then(|place| store.dictionary(place, &mut self.bytes).ok());
        let current = there.map_or(0, |found| found.len);
        let written = self.trainer.ground.put_current(&self.bytes[..current]).ok();
        if self.found / 3 < FEWEST
            || written.and_then(|()| self.ask(Phase::Given, current)).is_none()
        {
            return self.fail();
        }
        self.state = State::Given(Instant::now());
    }

    fn look_for_dictionary(&mut self, since: Instant) {
        match self.trainer.ground.answered(self.round, &mut self.bytes) {
            Some(Ok(answer)) if answer.phase == Phase::Done => {
                let Some(mut room) = self.dictionaries.take_room() else { return self.fail() };
                let digested = Arc::get_mut(&mut room)
                    .is_some_and(|room| room.digest(&self.bytes[..answer.len]).is_ok());
                if !digested {
                    self.dictionaries.give_back(room);
                    return self.lied();
                }
                let had = Had::default();
                self.state = State::Trying { room, len: answer.len, next: 0, had };
            }
            Some(Ok(answer)) if answer.phase == Phase::NoGain => {
                count(&self.counters.dictionary_no_gain, 1);
                self.last = self.this;
                self.end(true);
            }
            Some(Ok(_)) | None if since.elapsed() <= PATIENCE => self.state = State::Given(since),
            Some(Err(_)) => self.lied(),
            _ => self.late(),
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

    /// The trainer has said nothing for too long: it was killed, or never started.
    fn late(&mut self) {
        count(&self.counters.dictionary_late, 1);
        self.end(true);
    }

    /// What it said is not what a trainer says.
    fn lied(&mut self) {
        count(&self.counters.dictionary_refused, 1);
        self.end(true);
    }

    fn fail(&mut self) {
        count(&self.counters.dictionary_put_off, 1);
        self.end(true);
    }

    /// Ends the round; the next one is the later the more of them brought nothing.
    fn end(&mut self, in_vain: bool) {
        self.worker.rest();
        self.trainer.ground.release();
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
