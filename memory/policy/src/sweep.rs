//! The sweep: a pass over all pages that recompresses idle ones, in steps of about a millisecond.
//!
//! All memory is allocated when the sweep is made. A page is read without resetting its age,
//! compressed outside of the store, and stored only if it has not changed.

mod groups;

use std::sync::Arc;

use codec::{Codec, Encoded, Encoder};
use device::{codec_of, PageReader, ALONE, PAGE, RECOMPRESSED};
use store::{GroupBuffer, Page, Seen, Worker, MAX_MEMBERS, MAX_OBJECT, MAX_PAYLOAD};

use crate::settings::{Settings, SettingsError};
use crate::stats::{add as count, Counters};

/// Table entries that a step looks at.
const LOOK_AT: u64 = 4096;

/// With fewer candidates, pages are recompressed alone: a group of two or three saves little, and
/// costs a record.
const FEWEST: usize = 4;

/// The most bytes of a group's pages before compression. Together they usually become a fifth
/// smaller; if not, some pages are left out.
const MOST_BYTES: usize = MAX_PAYLOAD * 5 / 4;

/// Pages further apart than this are not neighbours: a read of one does not predict a read of the
/// other.
const NEAR: u64 = 32;

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The pass is not over.
    More,
    /// The pass stays where it is, because no memory can be spared just now.
    NoRoom,
    /// The pass is over.
    Done,
}

/// A candidate for recompression.
#[derive(Clone, Copy, Debug, Default)]
struct Idle {
    index: u64,
    tag: u8,
    len: usize,
}

/// The sweep's codec contexts, buffers and access to the store.
pub(crate) struct Sweep {
    worker: Worker,
    reader: PageReader,
    encoder: Encoder,
    /// Payload of the group being made.
    group: GroupBuffer,
    /// Objects as they were read, and the decoded pages.
    objects: Box<[[u8; MAX_OBJECT]]>,
    plain: Box<[[u8; PAGE]]>,
    coded: Box<[u8]>,
    found: [Idle; MAX_MEMBERS],
    count: usize,
    /// The next page to look at, during a pass.
    cursor: Option<u64>,
    /// How often the group at the cursor found no room.
    tries: u32,
    most: usize,
    gain: usize,
    /// The least age of a page in a group that nobody has read since the group was made, in the
    /// next pass: pages grow older in between. A page that is younger is warm unless it is idle
    /// already: under pressure it would be in the next group at once.
    unread: u8,
    counters: Arc<Counters>,
}

/// The most heap memory of a sweep, in bytes.
pub(crate) fn memory(codec: codec::Settings, group: usize) -> usize {
    let buffers = group * (MAX_OBJECT + PAGE) + group * PAGE;
    // A reader and a group's payload come on top of these.
    Encoder::memory_with_limit(codec, group * PAGE) + buffers + (312 << 10)
}

impl Sweep {
    /// Allocates all memory: also compresses once at each size that will occur, because codecs
    /// allocate at first use.
    ///
    /// # Errors
    ///
    /// [`SettingsError`].
    pub(crate) fn new(
        worker: Worker,
        settings: &Settings,
        counters: &Arc<Counters>,
    ) -> Result<Self, SettingsError> {
        settings.check()?;
        let codec = settings.codec()?;
        let wrong =
            |_| SettingsError::Codec { codec: settings.codec.clone(), level: settings.level };
        let mut this = Self {
            reader: PageReader::new(worker.store()),
            worker,
            encoder: Encoder::with_limit(codec, settings.group * PAGE).map_err(wrong)?,
            group: GroupBuffer::new(),
            objects: vec![[0; MAX_OBJECT]; settings.group].into_boxed_slice(),
            plain: vec![[0; PAGE]; settings.group].into_boxed_slice(),
            coded: vec![0; settings.group * PAGE].into_boxed_slice(),
            found: [Idle::default(); MAX_MEMBERS],
            count: 0,
            cursor: None,
            tries: 0,
            most: settings.group,
            gain: settings.gain as usize,
            unread: settings.idle.min(settings.idle_pressed) + 1,
            counters: Arc::clone(counters),
        };
        // Not same-filled pages, so that the codec itself runs.
        let pages = this.plain.as_flattened_mut();
        for (at, byte) in pages.iter_mut().enumerate() {
            *byte = (at / 7).to_le_bytes()[0];
        }
        // A context allocates when it first meets a size; no larger size than these occurs.
        for count in (1..=settings.group).rev().filter(|count| count.is_power_of_two()) {
            this.encoder.encode(&this.plain.as_flattened()[..count * PAGE], &mut this.coded);
        }
        Ok(this)
    }

    /// Increments the age of `count` pages from `from`.
    pub(crate) fn grow_older(&self, from: u64, count: u64) {
        self.worker.grow_older(from..from.saturating_add(count));
    }

    pub(crate) fn pages(&self) -> u64 {
        self.worker.store().pages()
    }

    /// One step of a pass over the pages that are at least `idle` periods old; starts a pass if
    /// there is none.
    pub(crate) fn step(&mut self, idle: u8) -> Step {
        let from = match self.cursor {
            Some(cursor) => cursor,
            None => {
                count(&self.counters.passes, 1);
                0
            }
        };
        let pages = self.pages();
        let to = from.saturating_add(LOOK_AT).min(pages);
        self.count = 0;
        let mut sum = 0;
        for index in from..to {
            let Some(page) = self.idle(index, idle) else { continue };
            let last = self.count.checked_sub(1).map(|last| self.found[last].index);
            let near = last.is_none_or(|last| index - last <= NEAR);
            if !near || self.count == self.most || sum + page.len > MOST_BYTES {
                // This page starts the next group.
                return self.flush(index, pages);
            }
            self.found[self.count] = page;
            self.count += 1;
            sum += page.len;
        }
        self.flush(to, pages)
    }

    /// Returns the page if it is a candidate. Also takes pages out of their group that should not
    /// be in it.
    fn idle(&mut self, index: u64, idle: u8) -> Option<Idle> {
        match self.worker.peek(index).ok()? {
            (Page::Object { tag, len }, age) if age >= idle => {
                let known = tag & RECOMPRESSED != 0;
                let raw = codec_of(tag)? == Codec::Raw;
                let hopeless = known && (raw || tag & ALONE != 0);
                (!hopeless).then_some(Idle { index, tag, len })
            }
            (Page::Grouped, age) => {
                self.tend_group(index, age < idle.min(self.unread));
                None
            }
            _ => None,
        }
    }

    /// Recompresses the candidates; the pass continues at `next`.
    fn flush(&mut self, next: u64, pages: u64) -> Step {
        let first = self.found[0].index;
        let mut next = next;
        let done = if self.count >= FEWEST { self.join(&mut next) } else { self.alone() };
        if !done {
            count(&self.counters.no_room, 1);
            self.tries += 1;
            if self.tries < 4 {
                self.cursor = Some(first);
                return Step::NoRoom;
            }
        }
        self.tries = 0;
        self.cursor = (next < pages).then_some(next);
        if self.cursor.is_some() {
            Step::More
        } else {
            // Otherwise the worker's slabs would stay half empty until the next pass.
            self.worker.rest();
            Step::Done
        }
    }

    /// Reads the candidates into `objects` and `plain`, and drops those that have changed.
    fn read_found(&mut self) {
        let mut kept = 0;
        for at in 0..self.count {
            let Idle { index, .. } = self.found[at];
            match self.reader.read(&self.worker, index, false, &mut self.plain[kept]) {
                Ok(Page::Object { tag, len }) => {
                    self.objects[kept][..len].copy_from_slice(&self.reader.object()[..len]);
                    self.found[kept] = Idle { index, tag, len };
                    kept += 1;
                }
                Ok(_) => count(&self.counters.pages_changed, 1),
                // The client that reads the page gets the error.
                Err(_) => count(&self.counters.damaged, 1),
            }
        }
        self.count = kept;
    }

    /// Recompresses the candidates one by one, unless that was done before; `false` if there is no
    /// room.
    fn alone(&mut self) -> bool {
        let found = self.found;
        let known = |idle: &&Idle| idle.tag & RECOMPRESSED == 0;
        let mut kept = 0;
        for idle in found[..self.count].iter().filter(known) {
            self.found[kept] = *idle;
            kept += 1;
        }
        self.count = kept;
        self.read_found();
        (0..self.count).all(|at| self.recompress(at, 0))
    }

    /// Stores one candidate, read as number `at`, in its smallest form; `false` if there is no
    /// room. `mark` is added to its tag.
    fn recompress(&mut self, at: usize, mark: u8) -> bool {
        let idle = self.found[at];
        let encoded = self.encoder.encode(&self.plain[at], &mut self.coded);
        let old = &self.objects[at][..idle.len];
        let (tag, bytes) = match encoded.codec {
            codec if pays(&encoded, idle.len, self.gain) => {
                (RECOMPRESSED | codec.to_wire(), &self.coded[..encoded.len])
            }
            // The same bytes, marked so that they are not tried again.
            _ => (idle.tag | RECOMPRESSED, old),
        };
        let seen = Seen { index: idle.index, tag: idle.tag, bytes: old };
        if tag | mark == idle.tag {
            return true;
        }
        match self.worker.replace_unchanged(&seen, tag | mark, bytes) {
            Ok(true) if bytes.len() < idle.len => {
                count(&self.counters.pages_recompressed, 1);
                count(&self.counters.bytes_saved, (idle.len - encoded.len) as u64);
            }
            Ok(true) => count(&self.counters.pages_no_gain, 1),
            Ok(false) => count(&self.counters.pages_changed, 1),
            // Only the mark has no room, and writing this page back may make it.
            Err(_) if bytes.len() == idle.len => count(&self.counters.no_room, 1),
            Err(_) => return false,
        }
        true
    }
}

/// Whether this form of a page replaces one of `len` bytes: it is smaller by `gain` per cent.
pub(crate) fn pays(encoded: &Encoded, len: usize, gain: usize) -> bool {
    !matches!(encoded.codec, Codec::SameFilled | Codec::Raw)
        && encoded.len * 100 <= len * (100 - gain)
}

impl std::fmt::Debug for Sweep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sweep").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
