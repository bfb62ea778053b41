//! Partitions of a disk that exist only in the kernel: nothing is written to the disk (`BLKPG` of
//! `linux/blkpg.h`).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::sys;

/// The highest number of a partition here.
const LAST: u32 = 16;

/// Adds partition `number`, `len` bytes from byte `start` on.
///
/// # Errors
///
/// An error of the kernel: EINVAL if the disk cannot have partitions, EBUSY if two overlap.
pub(crate) fn add(disk: &File, number: u32, start: u64, len: u64) -> io::Result<()> {
    sys::add_partition(disk, number, start, len)
}

/// Removes all partitions that nothing uses.
pub(crate) fn remove_all(disk: &File) {
    for number in 1..=LAST {
        // ENXIO: there is none. EBUSY: it is in use, and stays.
        let _ = sys::remove_partition(disk, number);
    }
}

/// The device node of a disk's partition.
pub(crate) fn path(disk: &Path, number: u32) -> PathBuf {
    let disk = disk.to_string_lossy();
    PathBuf::from(format!("{disk}{}{number}", separator(&disk)))
}

/// Whether the block device `name` is a partition of `disk`.
pub(crate) fn is_of(name: &str, disk: &str) -> bool {
    let number = name.strip_prefix(disk).and_then(|rest| rest.strip_prefix(separator(disk)));
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// The kernel's rule: a `p` behind a name that ends in a digit.
fn separator(disk: &str) -> &'static str {
    if disk.ends_with(|last: char| last.is_ascii_digit()) {
        "p"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_named_as_the_kernel_names_them() {
        assert_eq!(path(Path::new("/dev/ublkb0"), 3), Path::new("/dev/ublkb0p3"));
        assert_eq!(path(Path::new("/dev/sda"), 3), Path::new("/dev/sda3"));
        for (name, disk, is) in [
            ("/dev/ublkb0p3", "/dev/ublkb0", true),
            ("/dev/ublkb0p12", "/dev/ublkb0", true),
            ("/dev/ublkb0", "/dev/ublkb0", false),
            ("/dev/ublkb0p", "/dev/ublkb0", false),
            ("/dev/ublkb0px", "/dev/ublkb0", false),
            ("/dev/ublkb01", "/dev/ublkb0", false),
            ("/dev/sda3", "/dev/sda", true),
            ("/dev/sdab", "/dev/sda", false),
        ] {
            assert_eq!(is_of(name, disk), is, "{name} of {disk}");
        }
    }
}
