//! What is not sound in an image.

use std::io;
use std::sync::Arc;

use codec::DecodeError;

use crate::layout::{HEADER_LEN, MAX_BLOCKS, MAX_INDEX, MAX_RAM, TRAILER_LEN, VERSION};

/// Why a file cannot be read as an image, or a part of it not. The file's fault, or its disk's; the
/// path is for the caller to add.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The file system said no.
    #[error("cannot read {what}")]
    Io {
        /// Which part was to be read.
        what: String,
        /// What the kernel said.
        source: Arc<io::Error>,
    },
    /// Something else than an image.
    #[error("not an image of platen: the file does not begin with PLATENVM; an image is what `platen save` writes")]
    NoImage,
    /// Of another version.
    #[error("image of version {version}, and this platen reads version {VERSION}: use the platen that wrote it, or a newer one")]
    Version {
        /// The version stated.
        version: u32,
    },
    /// Header or trailer states sizes that no image has.
    #[error("pages of {page_size} bytes in units of {unit_bytes}: images have pages of 4096 to 65536 bytes in units of 65536 to 524288")]
    Shape {
        /// Bytes of a page.
        page_size: u64,
        /// Plain bytes of a unit.
        unit_bytes: u64,
    },
    /// Too short for any image.
    #[error("the file has {len} bytes, and header and trailer alone have {}: the image is cut off", HEADER_LEN + TRAILER_LEN)]
    Short {
        /// Length of the file.
        len: u64,
    },
    /// There is no trailer at the end.
    #[error("the file of {len} bytes does not end with a trailer: the image is cut off, or was never finished")]
    Unfinished {
        /// Length of the file.
        len: u64,
    },
    /// The trailer is of a file of another length.
    #[error("the trailer is of a file of {stated} bytes, and this one has {got}")]
    FileLength {
        /// Length in the trailer.
        stated: u64,
        /// Length of the file.
        got: u64,
    },
    /// The checksum of the header does not fit.
    #[error("the header (bytes 0 to 63) is damaged")]
    Header,
    /// The checksum of the trailer does not fit.
    #[error("the trailer (the last 96 bytes) is damaged")]
    Trailer,
    /// The places of state and index do not fit the file.
    #[error("the trailer names places of state and index that are not those of an image")]
    Places,
    /// The checksum of the device state does not fit.
    #[error("the device state (bytes {offset} to {end}) is damaged")]
    State {
        /// First byte.
        offset: u64,
        /// Last byte.
        end: u64,
    },
    /// The device state has another form than documented.
    #[error("the device state is not what an image has: {what} at byte {at} of it")]
    StateForm {
        /// What is wrong.
        what: &'static str,
        /// Where.
        at: usize,
    },
    /// The checksum of the index does not fit.
    #[error("the index (bytes {offset} to {end}) is damaged")]
    Index {
        /// First byte.
        offset: u64,
        /// Last byte.
        end: u64,
    },
    /// The index has another form than documented.
    #[error("the index is not what an image has: {what} at byte {at} of it (limits: {MAX_RAM} bytes of RAM, {MAX_BLOCKS} blocks, {MAX_INDEX} bytes of index)")]
    IndexForm {
        /// What is wrong.
        what: &'static str,
        /// Where.
        at: usize,
    },
    /// The stored bytes of a unit do not have the checksum of the index.
    #[error("unit {unit} (bytes {offset} to {end}) is damaged")]
    Unit {
        /// Its number.
        unit: u64,
        /// First byte.
        offset: u64,
        /// Last byte.
        end: u64,
    },
    /// A unit is whole and does not decode.
    #[error("unit {unit} at byte {offset} does not decode: {error}")]
    UnitDecode {
        /// Its number.
        unit: u64,
        /// First byte.
        offset: u64,
        /// What the codec found.
        error: DecodeError,
    },
    /// A unit states another length than its place in the image has.
    #[error("unit {unit} at byte {offset} states {stated} plain bytes, and has {expected}")]
    UnitLength {
        /// Its number.
        unit: u64,
        /// First byte.
        offset: u64,
        /// In its header.
        stated: u64,
        /// By the index.
        expected: u64,
    },
    /// Every part has its checksum, and the whole has not its hash.
    #[error("the hash over the file is {got:032x}, expected {expected:032x}, although each part has its checksum")]
    Hash {
        /// In the trailer.
        expected: u128,
        /// Of the file.
        got: u128,
    },
}

impl PartialEq for Damage {
    /// By what is said.
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Damage {
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io { what: what.into(), source: Arc::new(source) }
    }
}
