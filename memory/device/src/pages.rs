//! A thread's path from stored to plain pages.

use std::sync::Arc;

use codec::{qz, Codec, DecodeError, Decoder};
use store::{
    dictionary_of, BackBuffer, GetError, GroupBuffer, Page, PutError, Store, Worker, MAX_MEMBERS,
    MAX_OBJECT,
};

use crate::dictionaries::Dictionaries;
use crate::request::PAGE;

/// Added to the tag of an object that the policy recompressed.
pub const RECOMPRESSED: u8 = 32;

/// Added to the tag of an object that is no smaller in a group than alone.
pub const ALONE: u8 = 16;

/// Length of the CRC-32 of the page, little-endian, after the stream of an object that a QAT device
/// made; its tag is that of [`Codec::DeflateQz`]. The store's checksum covers the device's output,
/// this one its input.
pub(crate) const CRC: usize = 4;

/// The codec that a tag names; zstd for an object that was made with a dictionary.
pub fn codec_of(tag: u8) -> Option<Codec> {
    if dictionary_of(tag).is_some() {
        return Some(Codec::Zstd);
    }
    Codec::from_wire(tag & !(RECOMPRESSED | ALONE))
}

/// Why a page could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The store cannot return its bytes.
    #[error(transparent)]
    Stored(#[from] GetError),
    /// The stored bytes are intact, but no codec has their tag.
    #[error("page {index}: stored with tag {tag}, which no codec has")]
    Tag {
        /// The page.
        index: u64,
        /// The tag.
        tag: u8,
    },
    /// The stored bytes are intact, but their dictionary is missing or damaged.
    #[error("page {index}: compressed with dictionary {place}, which is not there")]
    Dictionary {
        /// The page.
        index: u64,
        /// The dictionary's place.
        place: usize,
    },
    /// The stored bytes are intact, but do not decode.
    #[error("page {index}: {error}")]
    Decode {
        /// The page.
        index: u64,
        /// The codec's error.
        error: DecodeError,
    },
    /// The stored bytes are intact, but decode to another page than the QAT device's input.
    #[error("page {index}: made by a QAT device from bytes of CRC-32 {expected:08x}, decodes to {got:08x}")]
    Offloaded {
        /// The page.
        index: u64,
        /// CRC-32 of the page when it was written.
        expected: u32,
        /// CRC-32 of the decoded page.
        got: u32,
    },
}

/// A decoder with buffers. It caches the last group that it read, so that the group's next page
/// costs a copy.
pub struct PageReader {
    decoder: Decoder,
    dictionaries: Arc<Dictionaries>,
    /// The object of the last page that was not in a group.
    object: Box<[u8; MAX_OBJECT]>,
    group: GroupBuffer,
    /// The decoded pages of `group`; their number is `decoded`.
    plain: Box<[u8]>,
    decoded: usize,
    /// The last block read from the backing device.
    block: BackBuffer,
}

impl PageReader {
    /// Allocates all memory for pages of this store, about 0.4 MiB.
    pub fn new(store: &Store) -> Self {
        Self {
            decoder: Decoder::new(),
            dictionaries: Dictionaries::of(store, None, false),
            object: Box::new([0; MAX_OBJECT]),
            group: GroupBuffer::new(),
            plain: vec![0; MAX_MEMBERS * PAGE].into_boxed_slice(),
            decoded: 0,
            block: BackBuffer::new(),
        }
    }

    /// Reads page `index` into `out`, and returns how it was stored. Without `touch` an object's
    /// bytes are in [`object`](Self::object) afterwards, and those of a page of a group in
    /// [`group`](Self::group). With `touch` the page's age is reset, and a page that is stored
    /// uncompressed is copied to `out` alone. For [`Page::Backed`] nothing is read:
    /// [`fetch`](Self::fetch) is for threads that may wait.
    ///
    /// # Errors
    ///
    /// [`Damage`]; then the bytes in `out` are undefined.
    #[inline]
    pub fn read(
        &mut self,
        worker: &Worker,
        index: u64,
        touch: bool,
        out: &mut [u8; PAGE],
    ) -> Result<Page, Damage> {
        loop {
            let page = if touch {
                worker.get_page(index, &mut self.object, out)?
            } else {
                worker.look(index, &mut self.object)?
            };
            match page {
                Page::Backed => return Ok(page),
                Page::Object { tag, len: PAGE } if touch => {
                    if codec_of(tag) == Some(Codec::Raw) {
                        return Ok(page);
                    }
                    // No page is compressed to this length.
                    self.object.copy_from_slice(out);
                }
                _ => {}
            }
            if page != Page::Grouped {
                unpack(&mut self.decoder, &self.dictionaries, index, page, &self.object, out)?;
                return Ok(page);
            }
            // The page changed meanwhile: read it again.
            if self.read_grouped(worker, index, touch, out)? {
                return Ok(page);
            }
        }
    }

    /// As [`read`](Self::read), but waits for the backing device if the page is there.
    ///
    /// # Errors
    ///
    /// [`Damage`].
    pub fn fetch(
        &mut self,
        worker: &Worker,
        index: u64,
        touch: bool,
        out: &mut [u8; PAGE],
    ) -> Result<Page, Damage> {
        loop {
            match self.read(worker, index, touch, out)? {
                Page::Backed => {}
                page => return Ok(page),
            }
            // The page changed meanwhile: read it again.
            if let Some(page) = worker.read_back(index, &mut self.block, &mut self.object)? {
                unpack(&mut self.decoder, &self.dictionaries, index, page, &self.object, out)?;
                return Ok(Page::Backed);
            }
        }
    }

    /// Stores these bytes in memory for the page that [`fetch`](Self::fetch) last read from the
    /// backing device, if the page is still there.
    ///
    /// # Errors
    ///
    /// [`PutError`].
    pub(crate) fn bring_back(
        &self,
        worker: &mut Worker,
        index: u64,
        (tag, bytes): (u8, &[u8]),
    ) -> Result<bool, PutError> {
        worker.bring_back(index, &self.block, tag, bytes)
    }

    /// Decodes the object that the store returned for a page that is in no group.
    pub(crate) fn unpack(
        &mut self,
        index: u64,
        page: Page,
        object: &[u8; MAX_OBJECT],
        out: &mut [u8; PAGE],
    ) -> Result<(), Damage> {
        unpack(&mut self.decoder, &self.dictionaries, index, page, object, out)
    }

    #[cold]
    fn read_grouped(
        &mut self,
        worker: &Worker,
        index: u64,
        touch: bool,
        out: &mut [u8; PAGE],
    ) -> Result<bool, Damage> {
        let found = if touch {
            worker.get_group(index, &mut self.group)?
        } else {
            worker.look_group(index, &mut self.group)?
        };
        let Some(grouped) = found else { return Ok(false) };
        if !grouped.had || self.decoded == 0 {
            self.decoded = 0;
            let tag = grouped.tag;
            // Groups are made without dictionaries.
            let codec = codec_of(tag).filter(|_| dictionary_of(tag).is_none());
            let codec = codec.ok_or(Damage::Tag { index, tag })?;
            let plain = &mut self.plain[..grouped.members * PAGE];
            self.decoder
                .decode_payload(codec, self.group.payload(), plain)
                .map_err(|error| Damage::Decode { index, error })?;
            self.decoded = grouped.members;
        }
        let at = grouped.position * PAGE;
        out.copy_from_slice(&self.plain[..self.decoded * PAGE][at..at + PAGE]);
        Ok(true)
    }

    /// The store's dictionaries.
    pub fn dictionaries(&self) -> &Arc<Dictionaries> {
        &self.dictionaries
    }

    /// The stored bytes of the last page read, if it was an object.
    pub fn object(&self) -> &[u8; MAX_OBJECT] {
        &self.object
    }

    /// The number of pages of which the last group was made.
    pub fn members(&self) -> usize {
        self.decoded
    }

    /// The group that was read last.
    pub fn group(&self) -> &GroupBuffer {
        &self.group
    }
}

impl std::fmt::Debug for PageReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageReader").field("group", &self.group).finish_non_exhaustive()
    }
}

/// Decodes the object that the store returned.
#[inline]
fn unpack(
    decoder: &mut Decoder,
    dictionaries: &Dictionaries,
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
            if let Some(place) = dictionary_of(tag) {
                let dictionary =
                    dictionaries.at(place).ok_or(Damage::Dictionary { index, place })?;
                let decoded = decoder.decode_with(dictionary, &object[..len], out);
                return decoded.map_err(|error| Damage::Decode { index, error });
            }
            let codec = codec_of(tag).ok_or(Damage::Tag { index, tag })?;
            (codec, &object[..len])
        }
        Page::Grouped | Page::Backed => return Err(GetError::Lost { index }.into()),
    };
    if codec == Codec::DeflateQz {
        return unpack_offloaded(decoder, index, payload, out);
    }
    let decoded = decoder.decode_payload(codec, payload, out);
    decoded.map_err(|error| Damage::Decode { index, error })
}

/// Decodes the output of a QAT device.
fn unpack_offloaded(
    decoder: &mut Decoder,
    index: u64,
    payload: &[u8],
    out: &mut [u8; PAGE],
) -> Result<(), Damage> {
    let Some((stream, crc)) = payload.split_last_chunk::<CRC>() else {
        return Err(GetError::Lost { index }.into());
    };
    let decoded = decoder.decode_payload(Codec::Zlib, stream, out);
    decoded.map_err(|error| Damage::Decode { index, error })?;
    let (expected, got) = (u32::from_le_bytes(*crc), qz::crc32(out));
    if expected == got {
        Ok(())
    } else {
        Err(Damage::Offloaded { index, expected, got })
    }
}
