//! Options, errors and counts of writing an image.

use std::io;
use std::path::PathBuf;

use std::sync::Arc;

use codec::{DecodeError, Settings, SettingsError};
use qat::{Hang, Qat, Unfinished};

/// Options for writing an image.
#[derive(Clone, Debug)]
pub struct Options {
    /// Codec and level for the units.
    pub settings: Settings,
    /// Raises and lowers zstd's level, from that of `settings` on, so that compression keeps up
    /// with the pages that arrive. Other codecs keep their level.
    pub adapt: bool,
    /// Device that compresses units of codec qatzip.
    pub device: Option<Arc<Qat>>,
    /// Plain bytes in a full unit.
    pub unit_bytes: usize,
    /// Compression threads.
    pub threads: usize,
}

/// Default of [`Options::unit_bytes`]; `docs/image.md` has the figures behind it.
const UNIT_BYTES: usize = 128 << 10;

impl Default for Options {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let settings = Settings::default();
        Self { settings, adapt: false, device: None, unit_bytes: UNIT_BYTES, threads }
    }
}

/// The reason that no image was written. There is no file at its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The file system failed.
    #[error("cannot {what} {path}", path = path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// Path of the image.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The image has its name, which could not be made durable, and could not be removed either.
    #[error("cannot make the name {path} durable, and cannot remove it", path = path.display())]
    Stays {
        /// Path of the image.
        path: PathBuf,
        /// The kernel's error when the name was to be made durable.
        source: io::Error,
    },
    /// A pack that a save shares is not there any more.
    #[error("cannot find pack {path}, with which this save shares pages: another process has removed it although the store is locked (a server of files may have lost the lock), so save again", path = path.display())]
    PackGone {
        /// Path of the pack.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Memory or threads could not be allocated.
    #[error("cannot set up compression")]
    SetUp(#[source] io::Error),
    /// The codec could not be set up.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A compression thread is in a call of the accelerator's library that does not return, and
    /// with it units of the image.
    #[error("{0}: the image cannot be completed. Look at the QAT device and its driver (`platen qat status`, the kernel's log), and repeat this with --accelerator none")]
    Accelerator(#[from] Hang),
    /// No compression thread has the accelerator that the user requires.
    #[error(transparent)]
    NoEngine(#[from] qat::NoEngine),
    /// The page size or the unit size is outside the format's limits.
    #[error(transparent)]
    Shape(#[from] crate::Damage),
    /// A unit does not decode to its pages: this host's memory or a codec is faulty.
    #[error("unit {unit} does not decode to its pages ({error}): check this host's memory, and save again")]
    Unit {
        /// Number of the unit.
        unit: u64,
        /// The codec's error.
        error: DecodeError,
    },
    /// The store cannot be read.
    #[error("store {path}", path = path.display())]
    Store {
        /// Path of the store.
        path: PathBuf,
        /// The defect.
        source: crate::Damage,
    },
    /// A save of the store is damaged. While it exists, no pack is removed.
    #[error("save {name}: repair or remove it first")]
    Save {
        /// Name of the save.
        name: String,
        /// The defect.
        source: crate::Damage,
    },
    /// A save of the store cannot be read by this user. While it exists, no pack is removed.
    #[error("save {name} is another user's, and the packs that it names are unknown, so none is removed: let the owner of the store's folder run platen image gc, if that user can read all saves, or else ask the owner of {name} to make it readable or to remove it")]
    Foreign {
        /// Name of the save.
        name: String,
        /// The kernel's error.
        source: crate::Damage,
    },
    /// No save may have this name.
    #[error("'{}' cannot be the name of a save: give it at most 200 bytes of UTF-8, no / and no dot at the beginning, and neither packs nor platen-store", name.escape_default())]
    Name {
        /// The name.
        name: String,
    },
    /// A RAM block is outside the format's limits.
    #[error("RAM block '{name}' of {len} bytes: {what}")]
    Blocks {
        /// Name of the block.
        name: String,
        /// Length of the block, bytes.
        len: u64,
        /// The violated limit.
        what: &'static str,
    },
    /// The index or the state exceeds its limit.
    #[error("{what} exceeds the limit of an image")]
    TooLong {
        /// The part that is too long.
        what: &'static str,
    },
}

impl From<Unfinished> for WriteError {
    fn from(error: Unfinished) -> Self {
        match error {
            Unfinished::Hang(hang) => Self::Accelerator(hang),
            Unfinished::Thread(error) => Self::SetUp(error),
        }
    }
}

/// Pages and bytes of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Length of the file, bytes; in a store, of the save and of its new pack.
    pub file_bytes: u64,
    /// Pages in slots, superseded ones included.
    pub slots: u64,
    /// Pages in slots that a later version of the page supersedes.
    pub superseded: u64,
    /// Pages received as zero, each version counted.
    pub zero: u64,
    /// Pages received as same-filled with another word, each version counted.
    pub filled: u64,
    /// Pages never received; 0 until the image is finished.
    pub unsent: u64,
    /// Pages that are equal to a page in the store or to an earlier page of the save, each version
    /// counted.
    pub shared: u64,
    /// Pages of `slots` that are stored as differences from pages that the store had.
    pub differences: u64,
    /// Units of the store that were not shared, because they are damaged.
    pub damaged: u64,
}
