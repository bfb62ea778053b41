//! Defects of an image.

use std::io;
use std::sync::Arc;

use codec::DecodeError;

use crate::layout::{
    HEADER_LEN, MAX_BLOCKS, MAX_INDEX, MAX_RAM, STORE_VERSION, TRAILER_LEN, VERSION,
};

/// The reason that an image, or a part of it, cannot be read. The file or its disk is at fault. The
/// caller adds the path.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The file system failed.
    #[error("cannot read {what}")]
    Io {
        /// The part that was read.
        what: String,
        /// The kernel's error.
        source: Arc<io::Error>,
    },
    /// The file is no image.
    #[error("not an image of platen: the file does not begin with PLATENVM; an image is what `platen save` writes")]
    NoImage,
    /// The image has a version that is not supported.
    #[error("image of version {version}, and this platen reads versions {VERSION} and {STORE_VERSION}: use the platen that wrote it, or a newer one")]
    Version {
        /// The version in the header or trailer.
        version: u32,
    },
    /// The page size or the unit size is outside the format's limits.
    #[error("pages of {page_size} bytes in units of {unit_bytes}: images have pages of 4096 to 65536 bytes in units of 65536 to 524288")]
    Shape {
        /// Page size, bytes.
        page_size: u64,
        /// Plain bytes in a full unit.
        unit_bytes: u64,
    },
    /// The file is shorter than header and trailer.
    #[error("the file has {len} bytes, and header and trailer alone have {}: the image is cut off", HEADER_LEN + TRAILER_LEN)]
    Short {
        /// Length of the file.
        len: u64,
    },
    /// The file does not end with a trailer.
    #[error("the file of {len} bytes does not end with a trailer: the image is cut off, or was never finished")]
    Unfinished {
        /// Length of the file.
        len: u64,
    },
    /// The trailer states another file length.
    #[error("the trailer is of a file of {stated} bytes, and this one has {got}")]
    FileLength {
        /// Length in the trailer.
        stated: u64,
        /// Length of the file.
        got: u64,
    },
    /// The checksum of the header is wrong, or its reserved bytes are not zero.
    #[error("the header (bytes 0 to 63) is damaged")]
    Header,
    /// The checksum of the trailer is wrong, or its reserved bytes are not zero.
    #[error("the trailer (the last 96 bytes) is damaged")]
    Trailer,
    /// The trailer places state and index outside the file, in another order or with gaps.
    #[error("the trailer names places of state and index that are not those of an image")]
    Places,
    /// The checksum of the device state is wrong.
    #[error("the device state (bytes {offset} to {end}) is damaged")]
    State {
        /// Offset of the first byte.
        offset: u64,
        /// Offset of the last byte.
        end: u64,
    },
    /// The device state is not in the documented form.
    #[error("the device state is not what an image has: {what} at byte {at} of it")]
    StateForm {
        /// The defect.
        what: &'static str,
        /// Offset of the defect in this part.
        at: usize,
    },
    /// The checksum of the index is wrong.
    #[error("the index (bytes {offset} to {end}) is damaged")]
    Index {
        /// Offset of the first byte.
        offset: u64,
        /// Offset of the last byte.
        end: u64,
    },
    /// The index is not in the documented form.
    #[error("the index is not what an image has: {what} at byte {at} of it (limits: {MAX_RAM} bytes of RAM, {MAX_BLOCKS} blocks, {MAX_INDEX} bytes of index)")]
    IndexForm {
        /// The defect.
        what: &'static str,
        /// Offset of the defect in this part.
        at: usize,
    },
    /// The stored bytes of a unit do not match their checksum in the index.
    #[error("unit {unit} (bytes {offset} to {end}) is damaged")]
    Unit {
        /// Number of the unit.
        unit: u64,
        /// Offset of the first byte.
        offset: u64,
        /// Offset of the last byte.
        end: u64,
    },
    /// The stored bytes of a unit match their checksum, but do not decode.
    #[error("unit {unit} at byte {offset} does not decode: {error}")]
    UnitDecode {
        /// Number of the unit.
        unit: u64,
        /// Offset of the first byte.
        offset: u64,
        /// The codec's error.
        error: DecodeError,
    },
    /// The header of a unit states another plain length than the index implies.
    #[error("unit {unit} at byte {offset} states {stated} plain bytes, and has {expected}")]
    UnitLength {
        /// Number of the unit.
        unit: u64,
        /// Offset of the first byte.
        offset: u64,
        /// Plain bytes by the unit's header.
        stated: u64,
        /// Plain bytes by the index.
        expected: u64,
    },
    /// The hot set is damaged, or of another image. A restore works without it.
    #[error("the hot set: {what}")]
    HotSet {
        /// The defect.
        what: &'static str,
    },
    /// A pack of the store is damaged or missing.
    #[error("pack {id:032x} of its store")]
    Pack {
        /// Name of the pack.
        id: u128,
        /// The defect; units are counted in the pack.
        #[source]
        damage: Box<Damage>,
    },
    /// The checksum of a pack's page hashes is wrong.
    #[error("the hashes of pages (bytes {offset} to {end}) are damaged")]
    Hashes {
        /// Offset of the first byte.
        offset: u64,
        /// Offset of the last byte.
        end: u64,
    },
    /// The index places a page where its packs have none.
    #[error("the index places pages in unit {unit}, which does not hold them")]
    Place {
        /// Number of the unit, through all packs of the save.
        unit: u64,
    },
    /// The page of a seed is another save's, which shares a pack with the seed's save.
    #[error("it is a page of another save, and was not offered")]
    OfAnotherSave,
    /// A page that is stored as a difference does not have its checksum.
    #[error(
        "page {nth} of unit {unit}, a difference from another page, is not the page that was saved"
    )]
    Page {
        /// Number of the unit.
        unit: u64,
        /// Number of the page in the unit.
        nth: usize,
    },
    /// A page does not have its hash.
    #[error(
        "page {nth} of unit {unit} does not have its hash, although the unit has its checksum"
    )]
    PageHash {
        /// Number of the unit.
        unit: u64,
        /// Number of the page in the unit.
        nth: usize,
    },
    /// The key file of a store is damaged.
    #[error("the store's file is damaged")]
    Store,
    /// The hash over the file is wrong.
    #[error("the hash over the file is {got:032x}, expected {expected:032x}, although each part has its checksum")]
    Hash {
        /// Hash in the trailer.
        expected: u128,
        /// Hash of the file's bytes.
        got: u128,
    },
}

impl PartialEq for Damage {
    /// Compares the messages, since `io::Error` has no equality.
    fn eq(&self, other: &Self) -> bool {
        self.chain() == other.chain()
    }
}

impl Damage {
    /// The message with those of its causes.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut error: &dyn std::error::Error = self;
        while let Some(source) = error.source() {
            text += &format!(": {source}");
            error = source;
        }
        text
    }

    /// Whether the file is withheld from this process, and is not damaged by that: another process
    /// has removed it, or this user may not read it.
    pub fn is_withheld(&self) -> bool {
        let kinds = [
            io::ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::StaleNetworkFileHandle,
        ];
        match self {
            Self::Io { source, .. } => kinds.contains(&source.kind()),
            Self::Pack { damage, .. } => damage.is_withheld(),
            _ => false,
        }
    }

    /// Whether this user may not read the file, or a pack of it.
    pub fn is_forbidden(&self) -> bool {
        match self {
            Self::Io { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            Self::Pack { damage, .. } => damage.is_forbidden(),
            _ => false,
        }
    }

    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io { what: what.into(), source: Arc::new(source) }
    }
}
