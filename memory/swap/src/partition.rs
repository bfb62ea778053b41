//! Partitions of a disk that exist only in the kernel: nothing is written to the disk (`BLKPG` of
//! `linux/blkpg.h`).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::sys;

/// The highest number of a partition that this module adds.
pub(crate) const LAST: u32 = 20;

/// A partition of a disk; start and length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    pub(crate) number: u32,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl Partition {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// The size of a disk in bytes, and its partitions.
///
/// # Errors
///
/// There is no such disk.
pub(crate) fn of(disk: &Path) -> io::Result<(u64, Vec<Partition>)> {
    let name = disk.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    read(&Path::new("/sys/class/block").join(name))
}

/// Reads size and partitions from the disk's folder in sysfs.
fn read(folder: &Path) -> io::Result<(u64, Vec<Partition>)> {
    const SECTOR: u64 = 512;
    let number = |path: &Path| -> io::Result<u64> {
        let text = fs::read_to_string(path)?;
        text.trim()
            .parse()
            .map_err(|_| io::Error::other(format!("{} has {text:?}", path.display())))
    };
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let folder = entry?.path();
        // Only partitions have this file.
        if !folder.join("partition").exists() {
            continue;
        }
        all.push(Partition {
            number: u32::try_from(number(&folder.join("partition"))?).unwrap_or(u32::MAX),
            start: number(&folder.join("start"))?.saturating_mul(SECTOR),
            len: number(&folder.join("size"))?.saturating_mul(SECTOR),
        });
    }
    all.sort_unstable_by_key(|one| one.start);
    Ok((number(&folder.join("size"))?.saturating_mul(SECTOR), all))
}

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
    fn partitions_and_sizes_are_read_in_sectors() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path();
        let put = |name: &str, text: &str| {
            let path = disk.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("size", "4096\n");
        put("queue/rotational", "0\n");
        for (number, start, len) in [("2", "2048", "1024"), ("1", "0", "2048")] {
            put(&format!("p{number}/partition"), number);
            put(&format!("p{number}/start"), start);
            put(&format!("p{number}/size"), len);
        }
        let (size, all) = read(disk).unwrap();
        let [one, two] = all[..] else { panic!("{all:?}") };
        assert_eq!((size, two.number, two.end()), (2 << 20, 2, 3072 * 512));
        assert_eq!(one, Partition { number: 1, start: 0, len: 1 << 20 });
        put("p2/size", "x");
        assert!(read(disk).unwrap_err().to_string().contains("p2/size has \"x\""));
        assert!(of(Path::new("/dev/no-such-disk")).is_err());
    }

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
