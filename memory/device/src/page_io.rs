//! A thread's path between plain pages and the store.

mod patch;

use std::sync::Arc;

use codec::{Codec, Encoded, Encoder, Settings, SettingsError};
use pulse::Slot;
use store::{Page, Worker, MAX_OBJECT};

use crate::counters::{add, Counters};
use crate::dictionaries::Dictionaries;
use crate::fetcher::{damaged, fetch};
use crate::flight::{DoPages, WaitForPages};
use crate::pages::{Damage, PageReader, CRC};
use crate::records::{Records, Thread};
use crate::request::{Buffer, Errno, Extent, Op, PAGE};

/// A thread's settings without an accelerator: a single page needs no gzip header and trailer
/// around its stream.
fn in_software(settings: Settings) -> Result<Settings, SettingsError> {
    match settings.codec() {
        Codec::DeflateQz => Settings::new(Codec::Zlib, Some(settings.level())),
        _ => Ok(settings),
    }
}

/// The most heap memory, in bytes, of a thread that reads and writes pages: codec contexts,
/// buffers, flights. Dictionaries are counted separately.
pub fn thread_heap(settings: Settings) -> usize {
    let contexts = match (settings.codec(), settings.level()) {
        (Codec::Zlib | Codec::DeflateQz, level) if level > 3 => 712,
        (Codec::Zlib | Codec::DeflateQz, _) => 208,
        (Codec::Zstd, level) if level > 9 => 276,
        (Codec::Zstd, _) => 108,
        // lz4 works on the stack.
        _ => 8,
    };
    (contexts + 312) << 10
}

/// A page whose compressed form is longer is stored uncompressed: reading it then costs a copy, and
/// decompression would cost microseconds to save less than 1/32 of a page.
const LONGEST: usize = PAGE - PAGE / 32;

/// Pages discarded between two heartbeats.
const AT_ONCE: u64 = 4096;

/// A thread's codec contexts, buffers and access to the store.
pub(crate) struct PageIo {
    records: Arc<Records>,
    worker: Worker,
    encoder: Encoder,
    reader: PageReader,
    /// The encoder's output.
    coded: Box<[u8]>,
    /// The store's object, while a part of a page is changed.
    object: Box<[u8; MAX_OBJECT]>,
    /// The plain page, while a part of it is changed.
    plain: Box<[u8; PAGE]>,
    /// The place of the thread's counters and heartbeat.
    place: usize,
}

impl PageIo {
    /// Allocates all memory for this thread: also compresses and decompresses a page, because
    /// codecs allocate at first use.
    pub(crate) fn new(
        records: &Arc<Records>,
        worker: Worker,
        thread: Thread,
    ) -> Result<Self, SettingsError> {
        let mut this = Self {
            records: Arc::clone(records),
            encoder: if records.dictionaries.may_be() {
                Encoder::with_dictionaries(in_software(records.settings)?, PAGE)?
            } else {
                Encoder::with_limit(in_software(records.settings)?, PAGE)?
            },
            reader: PageReader::new(worker.store()),
            worker,
            coded: vec![0; PAGE].into_boxed_slice(),
            object: Box::new([0; MAX_OBJECT]),
            plain: Box::new([0; PAGE]),
            place: records.place(thread),
        };
        this.slot().assign();
        // Not a repeated value, so that the codec itself runs.
        for (at, byte) in this.plain.iter_mut().enumerate() {
            *byte = (at / 7).to_le_bytes()[0];
        }
        let encoded = this.encoder.encode(&this.plain[..], &mut this.coded);
        if encoded.codec != Codec::Raw {
            let payload = &this.coded[..encoded.len];
            let page = Page::Object { tag: encoded.codec.to_wire(), len: encoded.len };
            this.object[..encoded.len].copy_from_slice(payload);
            this.reader
                .unpack(0, page, &this.object, &mut this.plain)
                .expect("what was just encoded");
        }
        Ok(this)
    }

    /// The thread's heartbeat.
    #[inline]
    pub(crate) fn slot(&self) -> &Slot {
        self.records.slot(self.place)
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.records.counters(self.place)
    }

    fn change(
        &mut self,
        op: Op,
        page: u64,
        buffer: &Buffer,
        first: u32,
        count: u32,
    ) -> Result<(), Errno> {
        let mut result = Ok(());
        let pages = page + u64::from(first)..page + u64::from(first) + u64::from(count);
        match op {
            Op::Discard | Op::WriteZeroes { keep: false } => {
                add(&self.counters().notify_free, u64::from(count));
                let mut start = pages.start;
                // In parts, so that a large discard shows progress.
                while start < pages.end {
                    let end = pages.end.min(start + AT_ONCE);
                    self.worker.discard(start..end);
                    self.slot().advance();
                    start = end;
                }
            }
            Op::WriteZeroes { keep: true } => {
                for index in pages {
                    // The value zero fits the entry, so only a page out of range can fail.
                    let stored = self.worker.put_same(index, 0).map_err(|_| Errno::Invalid);
                    self.slot().advance();
                    result = result.and(stored);
                }
            }
            Op::Write => {
                for number in first..first + count {
                    let plain = buffer.written(number as usize);
                    let stored = self.write(page + u64::from(number), plain);
                    self.slot().advance();
                    result = result.and(stored);
                    // The request has failed, and each further page would wait for memory in vain.
                    if stored == Err(Errno::NoSpace) {
                        break;
                    }
                }
            }
            Op::Flush | Op::Read => {}
        }
        result
    }

    /// Stores a page.
    #[inline]
    pub(crate) fn write(&mut self, index: u64, plain: &[u8; PAGE]) -> Result<(), Errno> {
        let dictionaries = &self.records.dictionaries;
        let (encoded, tag) = encode(&mut self.encoder, dictionaries, plain, &mut self.coded);
        let stored = match encoded.codec {
            Codec::SameFilled => {
                let word = self.coded.first_chunk().expect("longer than a word");
                self.worker.put_same(index, u64::from_le_bytes(*word))
            }
            codec if codec != Codec::Raw && encoded.len <= LONGEST => {
                self.worker.put(index, tag, &self.coded[..encoded.len])
            }
            _ => self.worker.put(index, Codec::Raw.to_wire(), plain),
        };
        add(&self.counters().pages_written, 1);
        stored.map_err(|error| self.refused(&error))
    }

    /// Stores a page that repeats one 64-bit value.
    pub(crate) fn write_same(&mut self, index: u64, word: u64) -> Result<(), Errno> {
        let stored = self.worker.put_same(index, word);
        add(&self.counters().pages_written, 1);
        stored.map_err(|error| self.refused(&error))
    }

    /// Stores a page from a deflate stream of a QAT device, with the CRC-32 of the device's input.
    #[inline]
    pub(crate) fn write_offloaded(
        &mut self,
        index: u64,
        plain: &[u8; PAGE],
        stream: &[u8],
        crc32: u32,
    ) -> Result<(), Errno> {
        let len = stream.len() + CRC;
        let stored = if len <= LONGEST {
            let object = &mut self.coded[..len];
            object[..stream.len()].copy_from_slice(stream);
            object[stream.len()..].copy_from_slice(&crc32.to_le_bytes());
            self.worker.put(index, Codec::DeflateQz.to_wire(), object)
        } else {
            self.worker.put(index, Codec::Raw.to_wire(), plain)
        };
        add(&self.counters().pages_written, 1);
        stored.map_err(|error| self.refused(&error))
    }

    /// The first run of pages of one kind, in `most` pages from `page`.
    pub(crate) fn extent(&self, page: u64, most: u64) -> Result<Extent, Errno> {
        let end = page.saturating_add(most).min(self.worker.store().pages());
        let kind = |index| match self.worker.peek(index) {
            Ok((Page::Absent, _)) => (true, true),
            Ok((Page::Same(0), _)) => (false, true),
            // A damaged page counts as stored.
            _ => (false, false),
        };
        if page >= end {
            return Err(Errno::Invalid);
        }
        let (hole, zero) = kind(page);
        let pages =
            1 + (page + 1..end).take_while(|&index| kind(index) == (hole, zero)).count() as u64;
        Ok(Extent { pages, hole, zero })
    }

    #[cold]
    fn refused(&self, error: &store::PutError) -> Errno {
        add(&self.counters().failed_writes, 1);
        match error {
            store::PutError::Full { .. } => Errno::NoSpace,
            _ => Errno::Invalid,
        }
    }

    #[cold]
    fn damaged(&self, damage: Damage) -> Errno {
        damaged(self.counters(), &self.records, damage)
    }
}

impl WaitForPages for PageIo {
    fn wait(&mut self, page: u64, buffer: &Buffer, first: u32, count: u32) -> Result<(), Errno> {
        let Self { reader, worker, records, place: at, .. } = self;
        let counted = (records.counters(*at), &**records);
        records
            .slot(*at)
            .while_waiting(|| fetch(reader, worker, counted, (page, buffer), first, count))
    }
}

impl DoPages for PageIo {
    #[inline]
    fn run(
        &mut self,
        op: Op,
        page: u64,
        buffer: &Buffer,
        first: u32,
        count: u32,
    ) -> Option<Result<(), Errno>> {
        if op != Op::Read {
            return Some(self.change(op, page, buffer, first, count));
        }
        let mut result = Ok(());
        for number in first..first + count {
            #[expect(unsafe_code, reason = "the page of the buffer is ours")]
            // SAFETY: the caller has exclusive use of this page of the buffer.
            let out = unsafe { buffer.read(number as usize) };
            let read = match self.reader.read(&self.worker, page + u64::from(number), true, out) {
                Ok(Page::Backed) => {
                    // The thread that reads these pages again counts the pages before this one.
                    return None;
                }
                Ok(_) => Ok(()),
                Err(damage) => Err(self.damaged(damage)),
            };
            self.slot().advance();
            result = result.and(read);
        }
        add(&self.counters().pages_read, u64::from(count));
        Some(result)
    }
}

/// Compresses a page, with the newest dictionary if there is one. Returns the tag too.
#[inline]
fn encode(
    encoder: &mut Encoder,
    dictionaries: &Dictionaries,
    plain: &[u8; PAGE],
    coded: &mut [u8],
) -> (Encoded, u8) {
    let Some((tag, dictionary)) = dictionaries.newest() else {
        let encoded = encoder.encode(plain, coded);
        return (encoded, encoded.codec.to_wire());
    };
    match encoder.encode_with(Some(dictionary), plain, coded) {
        (encoded, true) => (encoded, tag),
        (encoded, false) => (encoded, encoded.codec.to_wire()),
    }
}
