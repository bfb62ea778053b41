//! The identity of a file: a path may lead to another process's file later.

use rustix::fs::stat;
use std::path::Path;

/// Device and inode of a file.
pub(super) type Place = (u64, u64);

/// The file at `path`; `None` if there is none, or it cannot be seen.
pub(super) fn place(path: &Path) -> Option<Place> {
    let there = stat(path).ok()?;
    Some((there.st_dev, there.st_ino))
}
