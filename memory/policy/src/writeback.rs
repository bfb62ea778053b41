//! A writeback pass: reads the wanted pages, writes them to the backing device in batches, and
//! frees their memory.
//!
//! All memory is allocated when the pass is created. Only this part of the policy waits for a disk.

use std::str::FromStr;
use std::sync::Arc;

use codec::{Codec, Encoder};
use device::{codec_of, PageReader, PAGE, RECOMPRESSED};
use store::{Added, Batch, Page, Seen, Store, Worker, WriteBackError};

use crate::error::StartError;
use crate::settings::{Settings, SettingsError};
use crate::stats::{add as count, Counters};
use crate::sweep::pays;

/// Table entries that a step looks at.
const LOOK_AT: u64 = 4096;

/// Unmarked pages that a step tries to compress.
const TRIES: u32 = 32;

/// Pages to write back, with zram's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Uncompressed pages.
    Huge,
    /// Idle pages.
    Idle,
    /// Uncompressed idle pages.
    HugeIdle,
    /// Pages that recompression did not make smaller.
    Incompressible,
}

impl What {
    /// The names on the command line.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("huge", Self::Huge),
        ("idle", Self::Idle),
        ("huge_idle", Self::HugeIdle),
        ("incompressible", Self::Incompressible),
    ];
}

impl FromStr for What {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::NAMES.into_iter().find(|(name, _)| *name == text);
        let none = || format!("'{text}' is none of huge, idle, huge_idle, incompressible");
        found.map(|(_, what)| what).ok_or_else(none)
    }
}

/// The pages of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// Pages that the settings want written back, under memory pressure or not.
    Policy { pressed: bool },
    /// Pages of a request.
    Asked(What),
}

/// Whether a pass writes a page back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    No,
    Yes,
    /// If it does not compress. Recompression has not marked it: it has not come to the page, or
    /// there is no room for the marked form.
    IfIncompressible,
}

/// Codec contexts, buffers and access to the store for writeback.
pub(crate) struct WriteBack {
    worker: Worker,
    reader: PageReader,
    encoder: Encoder,
    batch: Batch,
    plain: Box<[u8; PAGE]>,
    coded: Box<[u8]>,
    /// The next page to look at, during a pass.
    cursor: Option<u64>,
    /// Whether passes come without a request, as far as is known.
    by_itself: bool,
    settings: Settings,
    counters: Arc<Counters>,
}

/// The most heap memory of writeback, in bytes.
pub(crate) fn memory(codec: codec::Settings, batch: u32) -> usize {
    // A reader comes on top of these.
    Encoder::memory_with_limit(codec, PAGE) + Batch::memory(batch as usize) + 2 * PAGE + (312 << 10)
}

impl WriteBack {
    /// Allocates all memory; `None` for a store without a backing device.
    pub(crate) fn new(
        store: &Arc<Store>,
        settings: &Settings,
        counters: &Arc<Counters>,
    ) -> Result<Option<Self>, StartError> {
        if !store.has_backing() {
            return Ok(None);
        }
        settings.check()?;
        let wrong =
            |_| SettingsError::Codec { codec: settings.codec.clone(), level: settings.level };
        let mut this = Self {
            worker: store.worker().ok_or(StartError::Full)?,
            reader: PageReader::new(store),
            encoder: Encoder::with_limit(settings.codec()?, PAGE).map_err(wrong)?,
            batch: Batch::new(settings.writeback_batch_size as usize),
            plain: Box::new([0; PAGE]),
            coded: vec![0; PAGE].into_boxed_slice(),
            cursor: None,
            by_itself: false,
            settings: settings.clone(),
            counters: Arc::clone(counters),
        };
        // The encoder allocates at its first use, and not for a same-filled page.
        for (at, byte) in this.plain.iter_mut().enumerate() {
            *byte = (at / 7).to_le_bytes()[0];
        }
        this.encoder.encode(&this.plain[..], &mut this.coded);
        Ok(Some(this))
    }

    /// Begins with passes of the policy's own. `pressure` tells whether memory pressure is noticed.
    pub(crate) fn begin(&mut self, pressure: bool) {
        self.by_itself = pressure || !self.settings.writeback_pressed_only;
        // Until a pass finds that it cannot write.
        self.worker.store().expect_writeback(self.by_itself);
    }

    /// One step of a pass, at most one batch; starts a pass if there is none. Returns whether the
    /// pass goes on.
    pub(crate) fn step(&mut self, wanted: Wanted) -> bool {
        if self.settings.writeback_pressed_only
            && matches!(wanted, Wanted::Policy { pressed: false })
        {
            return self.end();
        }
        let from = match self.cursor {
            Some(cursor) => cursor,
            None => {
                count(&self.counters.writeback_passes, 1);
                if matches!(wanted, Wanted::Asked(_)) {
                    // A request means that the user has removed the cause of the failure.
                    self.worker.store().resume_backing();
                }
                0
            }
        };
        let pages = self.worker.store().pages();
        let to = from.saturating_add(LOOK_AT).min(pages);
        if self.batch.is_empty() {
            self.set_limit();
        }
        let (mut next, mut full, mut tries) = (to, false, 0);
        for index in from..to {
            let verdict = self.verdict(index, wanted);
            if verdict == Verdict::No {
                continue;
            }
            let trial = verdict == Verdict::IfIncompressible;
            full = self.add(index, trial) == Added::Full;
            tries += u32::from(trial);
            if full || tries == TRIES {
                next = index + u64::from(!full);
                break;
            }
        }
        let done = next >= pages;
        // A batch that is not full is continued with the next pages.
        let goes_on = !(full || done && !self.batch.is_empty()) || self.flush();
        if done || !goes_on {
            return self.end();
        }
        self.cursor = Some(next);
        true
    }

    /// Ends the pass, if there is one: it does not go on.
    fn end(&mut self) -> bool {
        self.cursor = None;
        self.batch.clear();
        self.worker.rest();
        false
    }

    /// Whether the pass wants this page.
    fn verdict(&self, index: u64, wanted: Wanted) -> Verdict {
        let Ok((page, age)) = self.worker.peek(index) else { return Verdict::No };
        let (huge, hopeless) = match page {
            Page::Object { tag, .. } => {
                let raw = codec_of(tag) == Some(Codec::Raw);
                (raw, raw && tag & RECOMPRESSED != 0)
            }
            Page::Grouped => (false, false),
            _ => return Verdict::No,
        };
        let of = &self.settings;
        let is_wanted = match wanted {
            Wanted::Asked(What::Huge) => huge,
            Wanted::Asked(What::Idle) => age >= of.idle,
            Wanted::Asked(What::HugeIdle) => huge && age >= of.idle,
            Wanted::Asked(What::Incompressible) => hopeless,
            Wanted::Policy { pressed } => {
                let (idle, huge_idle) = if pressed {
                    (of.writeback_idle_pressed, of.writeback_huge_idle_pressed)
                } else {
                    (of.writeback_idle, of.writeback_huge_idle)
                };
                if age < idle && age >= huge_idle && huge && !hopeless {
                    return Verdict::IfIncompressible;
                }
                age >= idle || hopeless && age >= huge_idle
            }
        };
        if is_wanted {
            Verdict::Yes
        } else {
            Verdict::No
        }
    }

    /// Reads a page and adds it to the batch; `Full` if the batch has to be written first. With
    /// `trial` only a page that does not compress.
    fn add(&mut self, index: u64, trial: bool) -> Added {
        match self.reader.read(&self.worker, index, false, &mut self.plain) {
            Ok(Page::Object { tag, len }) => {
                if trial {
                    let encoded = self.encoder.encode(&self.plain[..], &mut self.coded);
                    let gain = self.settings.gain as usize;
                    if codec_of(tag) != Some(Codec::Raw) || pays(&encoded, len, gain) {
                        return Added::Unfit;
                    }
                }
                let bytes = &self.reader.object()[..len];
                self.batch.add(&Seen { index, tag, bytes })
            }
            Ok(Page::Grouped) => {
                let encoded = self.encoder.encode(&self.plain[..], &mut self.coded);
                let (tag, bytes) = match encoded.codec {
                    Codec::Raw | Codec::SameFilled => (Codec::Raw.to_wire(), &self.plain[..]),
                    codec => (RECOMPRESSED | codec.to_wire(), &self.coded[..encoded.len]),
                };
                self.batch.add_grouped(index, self.reader.group(), tag, bytes)
            }
            Ok(_) => Added::Unfit,
            Err(_) => {
                // The client that reads the page gets the error.
                count(&self.counters.damaged, 1);
                Added::Unfit
            }
        }
    }

    /// Limits the batch to the rest of the daily limit.
    fn set_limit(&mut self) {
        let left = if self.settings.writeback_limit_enable {
            let written = self.worker.store().written_today();
            self.settings.writeback_limit.saturating_sub(written)
        } else {
            u64::MAX
        };
        self.batch.set_limit(left);
    }

    /// Writes the batch, if allowed; returns whether there may be more.
    fn flush(&mut self) -> bool {
        let goes_on = self.try_flush();
        // Pages that do not compress pile up in memory if they cannot be written.
        self.worker.store().expect_writeback(goes_on && self.by_itself);
        goes_on
    }

    fn try_flush(&mut self) -> bool {
        let blocks = self.batch.blocks() as u64;
        if blocks == 0 {
            // Full without any block: the daily limit is used up.
            let spent = self.settings.writeback_limit_enable
                && self.worker.store().written_today() >= self.settings.writeback_limit;
            count(&self.counters.writeback_limited, u64::from(spent));
            return !spent;
        }
        let floor = self.settings.backing_free.saturating_add(blocks * PAGE as u64);
        if self.worker.store().backing_space().is_some_and(|space| space < floor) {
            count(&self.counters.writeback_no_space, 1);
            return false;
        }
        let (done, failed) = match self.worker.write_back(&mut self.batch) {
            Ok(done) => (done, false),
            Err(WriteBackError::Stopped { done, .. }) => (done, true),
            Err(_) => return false,
        };
        count(&self.counters.writeback_failed, failed.into());
        count(&self.counters.pages_written_back, done.pages);
        count(&self.counters.writeback_changed, done.changed);
        count(&self.counters.writeback_full, u64::from(done.left > 0));
        self.set_limit();
        !failed && done.left == 0
    }
}

impl std::fmt::Debug for WriteBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WriteBack").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
