//! A file of an image: on this host, or served by another one.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A file that another host serves. Its bytes never change.
pub trait RemoteFile: Debug + Send + Sync {
    /// Length, bytes. It bounds every read.
    fn len(&self) -> u64;

    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the bytes from `at` on. Any number of threads call it at once.
    ///
    /// # Errors
    ///
    /// The file ends before; or the other host cannot read it or cannot be reached.
    fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()>;
}

/// A file of an image.
#[derive(Debug)]
pub enum ImageFile {
    /// A file of this host.
    Local(File),
    /// A file of another host.
    Remote(Box<dyn RemoteFile>),
}

impl From<File> for ImageFile {
    fn from(file: File) -> Self {
        Self::Local(file)
    }
}

impl ImageFile {
    pub(crate) fn len(&self) -> io::Result<u64> {
        match self {
            Self::Local(file) => Ok(file.metadata()?.len()),
            Self::Remote(file) => Ok(file.len()),
        }
    }

    pub(crate) fn read_exact_at(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Self::Local(file) => file.read_exact_at(out, at),
            Self::Remote(file) => file.read_exact_at(out, at),
        }
    }
}
