//! One thread's way from plain pages to the store and back.

use std::sync::Arc;

use codec::{Codec, DecodeError, Decoder, Encoder, SettingsError};
use store::{Change, GetError, ModifyError, Page, Worker, MAX_OBJECT};

use crate::device::Shared;
use crate::request::{Buffer, Errno, Extent, Op, PAGE};
use crate::stats::{add, Counters};

/// A page whose compressed form is longer is stored as it is: reading it then costs a copy, where a
/// decoder would take microseconds to save less than a 32nd of a page.
const LONGEST: usize = PAGE - PAGE / 32;

/// Why a page could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The store cannot give its bytes.
    #[error(transparent)]
    Stored(#[from] GetError),
    /// Its bytes are those that were stored, and are of no codec we know.
    #[error("page {index}: stored with tag {tag}, which no codec has")]
    Tag {
        /// The page.
        index: u64,
        /// The tag.
        tag: u8,
    },
    /// Its bytes are those that were stored, and do not decode.
    #[error("page {index}: {error}")]
    Decode {
        /// The page.
        index: u64,
        /// What the codec said.
        error: DecodeError,
    },
}

/// Contexts, buffers and access to the store of one thread.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    worker: Worker,
    encoder: Encoder,
    decoder: Decoder,
    /// What the encoder makes.
    coded: Box<[u8]>,
    /// What the store gives.
    object: Box<[u8; MAX_OBJECT]>,
    /// A whole page, while a part of it is changed.
    plain: Box<[u8; PAGE]>,
    number: usize,
}

impl Engine {
    /// One for the counters `number`, with all its memory: it compresses and decompresses once.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        worker: Worker,
        number: usize,
    ) -> Result<Self, SettingsError> {
        let mut this = Self {
            shared: Arc::clone(shared),
            worker,
            encoder: Encoder::new(shared.settings)?,
            decoder: Decoder::new(),
            coded: vec![0; Encoder::roomy(PAGE)].into_boxed_slice(),
            object: Box::new([0; MAX_OBJECT]),
            plain: Box::new([0; PAGE]),
            number,
        };
        // Not one word over and over, so that the codec itself runs.
        for (at, byte) in this.plain.iter_mut().enumerate() {
            *byte = (at / 7).to_le_bytes()[0];
        }
        let encoded = this.encoder.encode(&this.plain[..], &mut this.coded);
        if encoded.codec != Codec::Raw {
            let payload = &this.coded[..encoded.len];
            this.decoder
                .decode_payload(encoded.codec, payload, &mut this.plain[..])
                .expect("what was just encoded");
        }
        Ok(this)
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.shared.counters[self.number]
    }

    /// Does `count` pages of a request from its page `first` on, and gives its first failure.
    ///
    /// For a read the caller has these pages of the buffer to itself.
    pub(crate) fn run(
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
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes { keep: false } => {
                add(&self.counters().notify_free, u64::from(count));
                self.worker.discard(pages);
            }
            Op::WriteZeroes { keep: true } => {
                for index in pages {
                    // Zero fits the entry, so that only a page that is not there could fail.
                    let stored = self.worker.put_same(index, 0).map_err(|_| Errno::Invalid);
                    result = result.and(stored);
                }
            }
            Op::Write => {
                for number in first..first + count {
                    let plain = buffer.written(number as usize);
                    let stored = self.write(page + u64::from(number), plain);
                    result = result.and(stored);
                    // Each page would wait for memory anew, and the request has failed already.
                    if stored == Err(Errno::NoSpace) {
                        break;
                    }
                }
            }
            Op::Read => {
                for number in first..first + count {
                    #[expect(unsafe_code, reason = "the page of the buffer is ours")]
                    // SAFETY: the caller has this page of the buffer to itself.
                    let out = unsafe { buffer.read(number as usize) };
                    let read = self.read(page + u64::from(number), out);
                    result = result.and(read);
                }
            }
        }
        result
    }

    /// Stores a page.
    #[inline]
    pub(crate) fn write(&mut self, index: u64, plain: &[u8; PAGE]) -> Result<(), Errno> {
        let encoded = self.encoder.encode(plain, &mut self.coded);
        let stored = match encoded.codec {
            Codec::SameFilled => {
                let word = self.coded.first_chunk().expect("longer than a word");
                self.worker.put_same(index, u64::from_le_bytes(*word))
            }
            codec if codec != Codec::Raw && encoded.len <= LONGEST => {
                self.worker.put(index, codec.to_wire(), &self.coded[..encoded.len])
            }
            _ => self.worker.put(index, Codec::Raw.to_wire(), plain),
        };
        add(&self.counters().pages_written, 1);
        stored.map_err(|error| self.refused(&error))
    }

    /// Reads a page.
    #[inline]
    pub(crate) fn read(&mut self, index: u64, out: &mut [u8; PAGE]) -> Result<(), Errno> {
        add(&self.counters().pages_read, 1);
        let page = match self.worker.get(index, &mut self.object) {
            Ok(page) => page,
            Err(error) => return Err(self.damaged(error.into())),
        };
        if let Err(damage) = unpack(&mut self.decoder, index, page, &self.object, out) {
            return Err(self.damaged(damage));
        }
        Ok(())
    }

    /// Changes a part of a page.
    pub(crate) fn patch(&mut self, index: u64, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        let range = at.checked_add(bytes.len()).filter(|&end| end <= PAGE).map(|end| at..end);
        let Some(range) = range else {
            add(&self.counters().invalid_io, 1);
            return Err(Errno::Invalid);
        };
        add(&self.counters().pages_written, 1);
        let Self { worker, encoder, decoder, coded, object, plain, .. } = self;
        let mut damage = None;
        let modified = worker.modify(index, object, |page, object| {
            if let Err(found) = unpack(decoder, index, page, object, plain) {
                damage = Some(found);
                return None;
            }
            plain[range.clone()].copy_from_slice(bytes);
            let encoded = encoder.encode(&plain[..], coded);
            let (tag, payload) = match encoded.codec {
                Codec::SameFilled => {
                    let word = coded.first_chunk().expect("longer than a word");
                    return Some(Change::Same(u64::from_le_bytes(*word)));
                }
                codec if codec != Codec::Raw && encoded.len <= LONGEST => {
                    (codec, &coded[..encoded.len])
                }
                _ => (Codec::Raw, &plain[..]),
            };
            object[..payload.len()].copy_from_slice(payload);
            Some(Change::Object { tag: tag.to_wire(), len: payload.len() })
        });
        match (modified, damage) {
            (Ok(()), _) => Ok(()),
            (Err(_), Some(damage)) => Err(self.damaged(damage)),
            (Err(ModifyError::Get(error)), None) => Err(self.damaged(error.into())),
            (Err(ModifyError::Put(error)), None) => Err(self.refused(&error)),
            (Err(_), None) => Err(Errno::Io),
        }
    }

    /// The first run of one kind in `most` pages from `page` on.
    pub(crate) fn extent(&self, page: u64, most: u64) -> Result<Extent, Errno> {
        let end = page.saturating_add(most).min(self.worker.store().pages());
        let kind = |index| match self.worker.peek(index) {
            Ok((Page::Absent, _)) => (true, true),
            Ok((Page::Same(0), _)) => (false, true),
            // One that is damaged is stored.
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
        add(&self.counters().failed_reads, 1);
        // The first one is for a person to read; the others are counted.
        let _ = self.shared.damage.set(damage);
        Errno::Io
    }
}

/// The plain page of what the store gave.
#[inline]
fn unpack(
    decoder: &mut Decoder,
    index: u64,
    page: Page,
    object: &[u8; MAX_OBJECT],
    out: &mut [u8; PAGE],
) -> Result<(), Damage> {
    let (codec, payload) = match page {
        Page::Absent => {
            out.fill(0);
            return Ok(());
        }
        Page::Same(word) => {
            let word = word.to_le_bytes();
            for chunk in out.chunks_exact_mut(word.len()) {
                chunk.copy_from_slice(&word);
            }
            return Ok(());
        }
        Page::Object { tag, len } => {
            let codec = Codec::from_wire(tag).ok_or(Damage::Tag { index, tag })?;
            (codec, &object[..len])
        }
    };
    let decoded = decoder.decode_payload(codec, payload, out);
    decoded.map_err(|error| Damage::Decode { index, error })
}
