//! A swap area: its header, swapon, swapoff, and its use.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::sys;

const PAGE: usize = 4096;

/// The most pages of an area: the header has 32 bits for the last page's number.
const MOST_PAGES: u64 = u32::MAX as u64;

/// The area's label, which tools show.
const LABEL: &[u8; 16] = b"platen\0\0\0\0\0\0\0\0\0\0";

/// How an area is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Size in KiB.
    pub size_kib: u64,
    /// KiB swapped out to it.
    pub used_kib: u64,
    /// Areas of higher priority are filled first.
    pub priority: i64,
}

/// Writes the header of an area onto a block device.
///
/// # Errors
///
/// A device of less than ten pages (the least that `mkswap` accepts), or in use; the kernel's.
pub fn make(disk: &Path) -> io::Result<()> {
    if in_use(disk)?.is_some() {
        return Err(io::Error::other(format!("{} is swapped to", disk.display())));
    }
    let mut file = File::options().read(true).write(true).open(disk)?;
    let size = io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
    let mut uuid = [0; 16];
    io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut uuid)?;
    file.write_all_at(&header(size, uuid)?, 0)?;
    file.flush()?;
    file.sync_all()
}

/// The first page of an area of `size` bytes.
///
/// # Errors
///
/// Too few pages.
fn header(size: u64, mut uuid: [u8; 16]) -> io::Result<[u8; PAGE]> {
    let pages = (size / PAGE as u64).min(MOST_PAGES);
    if pages < 10 {
        return Err(io::Error::other(format!("{size} bytes are too few for a swap area")));
    }
    let last = u32::try_from(pages - 1).expect("at most 2^32 - 2");
    // A random UUID, version 4.
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    let mut page = [0; PAGE];
    // The first KiB is for boot loaders. Then: version, last page, number of bad pages, UUID,
    // label.
    page[1024..1028].copy_from_slice(&1_u32.to_ne_bytes());
    page[1028..1032].copy_from_slice(&last.to_ne_bytes());
    page[1036..1052].copy_from_slice(&uuid);
    page[1052..1068].copy_from_slice(LABEL);
    page[4086..].copy_from_slice(b"SWAPSPACE2");
    Ok(page)
}

/// Starts swapping to an area that [`make`] has written, with discards: the kernel discards a
/// cluster of pages as soon as all of it is free; otherwise its contents would stay in memory.
/// `priority` is 0 to 32767.
///
/// # Errors
///
/// The kernel's: EINVAL without a header, EBUSY when it is on already.
pub fn on(disk: &Path, priority: u16) -> io::Result<()> {
    const PREFER: i32 = 0x8000;
    const DISCARD: i32 = 0x1_0000;
    const DISCARD_PAGES: i32 = 0x4_0000;
    sys::swapon(disk, PREFER | i32::from(priority.min(0x7fff)) | DISCARD | DISCARD_PAGES)
}

/// Stops swapping to an area: first reads everything in it back into memory, which may take long.
///
/// If memory runs out meanwhile, the kernel kills the caller before any other process, so the
/// caller must be a process that nothing depends on.
///
/// # Errors
///
/// The kernel's: ENOMEM when memory does not suffice.
pub fn off(disk: &Path) -> io::Result<()> {
    sys::swapoff(disk)
}

/// The area's use; `None` if it is not swapped to.
///
/// # Errors
///
/// `/proc/swaps` cannot be read.
pub fn in_use(disk: &Path) -> io::Result<Option<Use>> {
    let disk = fs::canonicalize(disk).unwrap_or_else(|_| PathBuf::from(disk));
    let swaps = match fs::read_to_string("/proc/swaps") {
        // A kernel without swap.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        swaps => swaps?,
    };
    Ok(find(&swaps, &disk.to_string_lossy()))
}

pub(crate) fn find(swaps: &str, disk: &str) -> Option<Use> {
    swaps.lines().skip(1).find_map(|line| {
        let mut words = line.split_whitespace();
        // /proc/swaps writes a space as \040; our disks' names have none.
        if words.next()? != disk {
            return None;
        }
        let _kind = words.next()?;
        let mut number = || words.next()?.parse::<i64>().ok();
        let size_kib = u64::try_from(number()?).ok()?;
        let used_kib = u64::try_from(number()?).ok()?;
        Some(Use { size_kib, used_kib, priority: number()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_header_is_one_that_other_tools_know() {
        let page = header(1 << 20, [0xff; 16]).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&page, 0).unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let asked = Command::new("blkid").args(["-p", "-o", "export"]).arg(file.path()).output();
        let Ok(said) = asked else {
            println!("skipped: no blkid");
            return;
        };
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("TYPE=swap") && said.contains("LABEL=platen"), "{said}");
        assert!(said.contains("UUID=ffffffff-ffff-4fff-bfff-ffffffffffff"), "{said}");
    }

    #[test]
    fn the_last_page_is_the_devices_last_or_the_most_that_can_be_counted() {
        let last = |size| {
            let page = header(size, [0; 16]).unwrap();
            u32::from_ne_bytes(page[1028..1032].try_into().unwrap())
        };
        assert_eq!(last(40960), 9);
        assert_eq!(last(45055), 9);
        assert_eq!(last(1 << 50), u32::MAX - 1);
        assert!(header(40959, [0; 16]).is_err());
    }

    #[test]
    fn an_area_is_found_in_the_kernels_list_by_its_whole_name() {
        let swaps = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                     /dev/ublkb10                            partition\t1024\t\t8\t\t-2\n\
                     /dev/ublkb1                             partition\t2048\t\t16\t\t100\n";
        assert_eq!(
            find(swaps, "/dev/ublkb1"),
            Some(Use { size_kib: 2048, used_kib: 16, priority: 100 })
        );
        assert_eq!(find(swaps, "/dev/ublkb"), None);
        assert_eq!(find("", "/dev/ublkb1"), None);
        assert_eq!(find("head\n/dev/ublkb1 partition\n", "/dev/ublkb1"), None);
    }
}
