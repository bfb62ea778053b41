//! A disk's swap areas: header, swapon, swapoff, and use.
//!
//! The kernel prefers slots that it has never used, and discards only whole clusters of free slots
//! (512 pages). In one area as large as the disk it would use every slot before it reuses a freed
//! one, and freed pages would stay stored until then. A disk therefore has several areas of
//! descending priority. The kernel uses an area only when those of higher priority have no free
//! slot, so at most about one area's worth of freed pages stays stored. The areas are partitions
//! added in the kernel only (`partition.rs`); the disk has no partition table.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::partition;
use crate::sys;

pub mod off;

const PAGE: usize = 4096;

/// Maximum pages of an area: the header has 32 bits for the number of the last page.
const MOST_PAGES: u64 = u32::MAX as u64;

/// Maximum areas of a disk at the start. The kernel has room for 23 to 29 in all, those of other
/// disks included.
const MOST_AREAS: u64 = 14;

/// Minimum size of an area in bytes. A smaller one costs more than it saves: each CPU fills its own
/// cluster of 2 MiB.
const LEAST_AREA: u64 = 16 << 20;
const LEAST_AREA_OF_CPU: u64 = 4 << 20;

/// Alignment of areas, in bytes.
const ALIGNMENT: u64 = 1 << 20;

/// The area's label, which tools show.
const LABEL: &[u8; 16] = b"platen\0\0\0\0\0\0\0\0\0\0";

/// Use of a disk's swap areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Size in KiB.
    pub size_kib: u64,
    /// KiB of pages that are swapped out.
    pub used_kib: u64,
    /// The highest priority among the areas. The kernel fills areas of higher priority first.
    pub priority: i64,
}

/// Creates swap areas on a disk and starts swapping to them; returns their number. The first area
/// has `priority` (0 to 32767), each further one a priority lower by one. There is a single area if
/// the disk is small, if `priority` is 0, or if the kernel refuses partitions; there are fewer if
/// the kernel refuses as many.
///
/// Enables discards, so that the kernel discards a cluster once all of its slots are free; without
/// discards the pages would stay stored.
///
/// # Errors
///
/// The disk has less than ten pages (the least that `mkswap` accepts), or is in use; an error of
/// the kernel.
pub fn begin(disk: &Path, priority: u16) -> io::Result<usize> {
    if in_use(disk)?.is_some() {
        return Err(io::Error::other(format!("{} is swapped to", disk.display())));
    }
    let mut file = File::options().read(true).write(true).open(disk)?;
    let size = file.seek(SeekFrom::End(0))?;
    // Removes the partitions of a helper that was killed.
    partition::remove_all(&file);
    let priority = priority.min(0x7fff);
    let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
    let least = (cpus * LEAST_AREA_OF_CPU).max(LEAST_AREA);
    let mut number = (size / least).min(MOST_AREAS).min(u64::from(priority) + 1);
    while number > 1 {
        let begun = split(&file, disk, size, number).and_then(|areas| on_all(&areas, priority));
        match begun {
            Ok(number) => return Ok(number),
            // Other disks may have the areas that the kernel has room for.
            Err(_) => partition::remove_all(&file),
        }
        number /= 2;
    }
    write_header(&file, size)?;
    on_all(&[disk.to_owned()], priority)
}

/// Divides a disk into `number` partitions, and writes an area's header to each.
fn split(disk: &File, path: &Path, size: u64, number: u64) -> io::Result<Vec<PathBuf>> {
    let mut areas = Vec::new();
    for (number, (start, len)) in (1..).zip(ranges(size, number)) {
        partition::add(disk, number, start, len)?;
        let area = partition::path(path, number);
        write_header(&File::options().read(true).write(true).open(&area)?, len)?;
        areas.push(area);
    }
    Ok(areas)
}

/// Start and length in bytes of each of `number` areas.
fn ranges(size: u64, number: u64) -> impl Iterator<Item = (u64, u64)> {
    let each = size / number / ALIGNMENT * ALIGNMENT;
    (0..number).map(move |nth| {
        let start = nth * each;
        (start, if nth + 1 == number { size - start } else { each })
    })
}

/// Swaps to all areas, or to none.
fn on_all(areas: &[PathBuf], priority: u16) -> io::Result<usize> {
    for (nth, area) in areas.iter().enumerate() {
        let below = u16::try_from(nth).unwrap_or(u16::MAX);
        if let Err(error) = on(area, i64::from(priority.saturating_sub(below))) {
            for begun in &areas[..nth] {
                // Few pages can be in this area yet, and they fit back into memory.
                let _ = sys::swapoff(begun);
            }
            return Err(error);
        }
    }
    Ok(areas.len())
}

/// Creates swap areas behind the last one of a disk that has grown, and starts swapping to them.
/// Returns their number: 0 for a disk that is not swapped to, or whose areas reach its end. The new
/// areas are about as large as the present ones. Each has a priority lower by one than the area
/// before it, 0 at least.
///
/// # Errors
///
/// [`can_extend`] refuses, or the kernel does. Areas that were added before the error remain.
pub fn extend(disk: &Path) -> io::Result<usize> {
    if beyond(disk)? == 0 {
        return Ok(0);
    }
    can_extend(disk)?;
    let areas = areas_of(disk)?;
    let file = File::options().read(true).write(true).open(disk)?;
    // Removes the partitions of a helper that was killed before it swapped to them.
    partition::remove_all(&file);
    let (size, partitions) = partition::of(disk)?;
    let lowest = areas.iter().map(|(_, used)| used.priority).min().unwrap_or(0);
    let mut added = 0;
    for (number, start, len) in additions(size, &partitions) {
        partition::add(&file, number, start, len)?;
        let area = partition::path(disk, number);
        write_header(&File::options().read(true).write(true).open(&area)?, len)?;
        added += 1;
        on(&area, lowest - added)?;
    }
    Ok(usize::try_from(added).unwrap_or(0))
}

/// Whether [`extend`] can add an area to this disk, to which the kernel swaps.
///
/// # Errors
///
/// The whole disk is one area, or the disk has as many areas as it can have.
pub fn can_extend(disk: &Path) -> io::Result<()> {
    let disk = fs::canonicalize(disk)?;
    let areas = areas_of(&disk)?;
    if areas.iter().any(|(area, _)| *area == disk) {
        return Err(io::Error::other(format!(
            "{} is a single swap area, whose size its header fixes",
            disk.display()
        )));
    }
    if areas.len() >= partition::LAST as usize {
        let most = partition::LAST;
        return Err(io::Error::other(format!("{} has {most} swap areas already", disk.display())));
    }
    Ok(())
}

/// The size of a disk in bytes, according to the kernel.
///
/// # Errors
///
/// There is no such disk.
pub fn size(disk: &Path) -> io::Result<u64> {
    partition::of(disk).map(|(size, _)| size)
}

/// Bytes behind the last swap area of a disk. Returns 0 for a disk that is not swapped to, and if
/// the rest is too small for an area.
///
/// # Errors
///
/// The kernel does not report it.
pub fn beyond(disk: &Path) -> io::Result<u64> {
    let disk = fs::canonicalize(disk)?;
    let areas = areas_of(&disk)?;
    let (size, mut partitions) = partition::of(&disk)?;
    partitions.retain(|one| {
        let path = partition::path(&disk, one.number);
        areas.iter().any(|(area, _)| *area == path)
    });
    let whole = areas.iter().filter(|(area, _)| *area == disk).map(|(_, used)| used.size_kib << 10);
    let end = partitions.iter().map(partition::Partition::end).chain(whole).max();
    // An area's size is reported without its header.
    let rest = size.saturating_sub(end.unwrap_or(size));
    Ok(if rest < ALIGNMENT { 0 } else { rest })
}

/// Number, start and length in bytes of the partitions to add behind these ones of a disk of `size`
/// bytes.
fn additions(size: u64, partitions: &[partition::Partition]) -> Vec<(u32, u64, u64)> {
    let (Some(end), Some(number), Some(usual)) = (
        partitions.iter().map(partition::Partition::end).max(),
        partitions.iter().map(|one| one.number).max(),
        partitions.iter().map(|one| one.len).max(),
    ) else {
        return Vec::new();
    };
    let rest = size.saturating_sub(end);
    let room = u64::from(partition::LAST.saturating_sub(number));
    let count = (rest / usual.max(LEAST_AREA)).clamp(1, room.max(1)).min(room);
    if count == 0 || rest < ALIGNMENT {
        return Vec::new();
    }
    (number + 1..)
        .zip(ranges(rest, count))
        .map(|(at, (start, len))| (at, end + start, len))
        .collect()
}

/// Starts swapping to an area that has a header.
fn on(area: &Path, priority: i64) -> io::Result<()> {
    const PREFER: i32 = 0x8000;
    const DISCARD: i32 = 0x1_0000;
    const DISCARD_PAGES: i32 = 0x4_0000;
    let priority = i32::try_from(priority.clamp(0, 0x7fff)).expect("15 bits");
    sys::swapon(area, PREFER | priority | DISCARD | DISCARD_PAGES)
}

/// Use of a disk's areas; `None` if it has none.
///
/// # Errors
///
/// `/proc/swaps` cannot be read.
pub fn in_use(disk: &Path) -> io::Result<Option<Use>> {
    let areas = areas_of(disk)?;
    Ok(sum(areas.into_iter().map(|(_, used)| used)))
}

/// The areas' device nodes, as `swapoff` takes them; empty if the kernel does not report them.
pub fn nodes(disk: &Path) -> Vec<PathBuf> {
    areas_of(disk).unwrap_or_default().into_iter().map(|(node, _)| node).collect()
}

fn areas_of(disk: &Path) -> io::Result<Vec<(PathBuf, Use)>> {
    let disk = fs::canonicalize(disk).unwrap_or_else(|_| PathBuf::from(disk));
    let swaps = match fs::read_to_string("/proc/swaps") {
        // A kernel without swap.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        swaps => swaps?,
    };
    let disk = disk.to_string_lossy();
    Ok(find(&swaps, &disk).map(|(name, used)| (PathBuf::from(name), used)).collect())
}

/// The use of several areas together.
pub(crate) fn sum(areas: impl Iterator<Item = Use>) -> Option<Use> {
    areas.reduce(|all, one| Use {
        size_kib: all.size_kib + one.size_kib,
        used_kib: all.used_kib + one.used_kib,
        priority: all.priority.max(one.priority),
    })
}

/// Finds the areas of `disk`, the disk itself or its partitions, in the text of `/proc/swaps`.
pub(crate) fn find<'a>(swaps: &'a str, disk: &'a str) -> impl Iterator<Item = (&'a str, Use)> {
    swaps.lines().skip(1).filter_map(move |line| {
        let mut fields = line.split_whitespace();
        // Spaces in a name are written as \040; block devices have none.
        let name = fields.next()?;
        if name != disk && !partition::is_of(name, disk) {
            return None;
        }
        let _kind = fields.next()?;
        let mut number = || fields.next()?.parse::<i64>().ok();
        let size_kib = u64::try_from(number()?).ok()?;
        let used_kib = u64::try_from(number()?).ok()?;
        Some((name, Use { size_kib, used_kib, priority: number()? }))
    })
}

/// Writes the header of an area of `size` bytes.
fn write_header(area: &File, size: u64) -> io::Result<()> {
    let mut uuid = [0; 16];
    io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut uuid)?;
    area.write_all_at(&header(size, uuid)?, 0)?;
    area.sync_all()
}

/// The first page of an area of `size` bytes.
///
/// # Errors
///
/// The area has too few pages.
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

#[cfg(test)]
mod tests;
