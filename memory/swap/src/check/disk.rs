//! Checks of the disk, and of how it is swapped to.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::{Eyes, Found, Not};

impl Eyes {
    pub(super) fn swapped_to(&self, disk: &Path) -> Found {
        let swaps = self.read("proc/swaps")?;
        let disk_name = disk.to_string_lossy();
        let areas = crate::area::find(&swaps, &disk_name).map(|(_, used)| used);
        match crate::area::sum(areas) {
            Some(used) => {
                Ok(format!("{}: {} of {} KiB used", disk.display(), used.used_kib, used.size_kib))
            }
            None => Err(format!("{} is not in /proc/swaps", disk.display()).into()),
        }
    }

    fn queue(&self, disk: &Path, name: &str) -> Result<String, String> {
        let device = disk.file_name().unwrap_or_default().to_string_lossy();
        let text = self.read(&format!("sys/class/block/{device}/queue/{name}"))?;
        Ok(text.trim().to_owned())
    }

    fn queue_number(&self, disk: &Path, name: &str) -> Result<u64, String> {
        let text = self.queue(disk, name)?;
        text.parse().map_err(|_| format!("queue/{name} of {} is {text:?}", disk.display()))
    }

    /// Checks that the disk accepts discards and that the kernel issues some. Only the kernel's log
    /// shows whether `swapon` asked for discards; no file does.
    pub(super) fn discards(&self, disk: &Path) -> Found {
        let max = self.queue_number(disk, "discard_max_bytes")?;
        let granularity = self.queue_number(disk, "discard_granularity")?;
        if max == 0 || granularity > 4096 {
            return Err(format!(
                "{max} bytes at a time, in units of {granularity}: freed swap stays stored"
            )
            .into());
        }
        let able = format!("the disk discards in units of {granularity} bytes");
        let unseen = |why: &str| Not::Seen(format!("{able}; whether swapon asked for it: {why}"));
        let log = self.log.as_ref().map_err(|why| unseen(why))?;
        let swaps = self.read("proc/swaps")?;
        let disk = disk.to_string_lossy();
        let mut areas = crate::area::find(&swaps, &disk).map(|(name, _)| name).peekable();
        if areas.peek().is_none() {
            return Err(unseen("it is not in /proc/swaps"));
        }
        for area in areas {
            match log.iter().rev().find_map(|line| swapon_flags(line, area)) {
                Some(flags) if flags.contains('c') => {}
                Some(_) => {
                    let how = "swapoff, and swapon --discard=pages";
                    let what = "swapon has not asked for discards: freed swap stays stored";
                    return Err(format!("{area}: {what}; {how}").into());
                }
                None => return Err(unseen("the kernel's log does not have it any more")),
            }
        }
        Ok(format!("freed swap is discarded, in units of {granularity} bytes"))
    }

    pub(super) fn disk_queue(&self, disk: &Path) -> Found {
        let rotational = self.queue_number(disk, "rotational")?;
        let logical = self.queue_number(disk, "logical_block_size")?;
        let physical = self.queue_number(disk, "physical_block_size")?;
        if (rotational, logical, physical) != (0, 4096, 4096) {
            return Err(format!(
                "rotational {rotational}, blocks of {logical} bytes, physical ones of {physical}; \
                 not 0 and 4096"
            )
            .into());
        }
        Ok("not rotational, blocks of 4096 bytes".into())
    }

    /// Checks that the disk has no volatile cache: the kernel sends flushes to such a disk, which
    /// are useless here.
    pub(super) fn disk_cache(&self, disk: &Path) -> Found {
        let cache = self.queue(disk, "write_cache")?;
        let fua = self.queue(disk, "fua")?;
        if (cache.as_str(), fua.as_str()) != ("write through", "0") {
            return Err(
                format!("its cache is {cache:?}, fua {fua}: the kernel sends flushes").into()
            );
        }
        Ok("nothing to flush".into())
    }

    /// Checks the age of the ublk driver by the kernel's version; `None` for another driver's disk.
    pub(super) fn ublk_driver(&self, disk: &Path) -> Option<Found> {
        if !disk.file_name()?.to_str()?.starts_with("ublkb") {
            return None;
        }
        let release = self.read("proc/sys/kernel/osrelease").map_err(Not::from);
        Some(release.and_then(|release| driver(release.trim())))
    }

    /// Checks that the kernel does not hibernate. A process that has called `own` keeps it from
    /// doing so.
    pub(super) fn hibernation(&self) -> Found {
        if crate::precautions::can_hibernate(&self.root.join("sys/power/disk")) {
            return Err(
                "the host can hibernate: the kernel would freeze the server, and then swap to \
                        it; boot with nohibernate, or with secretmem.enable=1 (Linux 5.14 on)"
                    .to_owned()
                    .into(),
            );
        }
        Ok("the host does not hibernate".into())
    }

    pub(super) fn page_cluster(&self) -> Found {
        match self.read("proc/sys/vm/page-cluster")?.trim() {
            "0" => Ok("pages are read one at a time".into()),
            other => Err(format!(
                "{other}: each fault reads 2^{other} pages, decompressing what may not be wanted; sysctl vm.page-cluster=0"
            )
            .into()),
        }
    }
}

/// Whether the ublk driver of this kernel gives a disk another server whenever one dies.
fn driver(release: &str) -> Found {
    const LATE_WORK: (u32, u32) = (6, 7);
    const SOUND: (u32, u32) = (6, 15);
    let version = version(release);
    let version = version.ok_or_else(|| format!("the kernel calls its version {release:?}"))?;
    if version >= SOUND {
        return Ok(format!(
            "Linux {release}: another server takes the disk over whenever one dies"
        ));
    }
    let work = if version < LATE_WORK {
        ""
    } else {
        "its driver may still work for a dead server when the next one begins, which then has to \
         be replaced, too; and "
    };
    Err(format!(
        "Linux {release}: {work}what is swapped out is lost if a server is killed in the \
         milliseconds in which it takes the disk over; boot Linux 6.15 or later, or serve with \
         --nbd in place of --ublk"
    )
    .into())
}

/// The first two numbers of a kernel's version, such as `6.12.95-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The flags in the kernel's log line of the swapon of `disk`: `SS` for no seeks, `D` for a disk
/// that discards, `s` for one discard of the whole area, `c` for discards of freed clusters.
fn swapon_flags<'a>(line: &'a str, disk: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once("Adding ")?;
    let (named, rest) = rest.split_once(" swap on ")?.1.split_once(" Priority:")?;
    if named.trim_end().trim_end_matches('.') != disk {
        return None;
    }
    let (_, across) = rest.split_once(" across:")?;
    // Without flags only the size follows.
    Some(across.trim().split_once(' ').map_or("", |(_, flags)| flags))
}

/// The kernel's log, as far back as it goes.
pub(super) fn kernel_log() -> Result<Vec<String>, String> {
    let read = || {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd: OwnedFd = rustix::fs::open("/dev/kmsg", flags, Mode::empty())?;
        let mut file = File::from(fd);
        let mut lines = Vec::new();
        let mut record = [0; 8192];
        // More records than a log of 16 MiB has.
        for _ in 0..1 << 18 {
            match file.read(&mut record) {
                Ok(0) => break,
                Ok(len) => {
                    let text = String::from_utf8_lossy(&record[..len]);
                    // The other records are of no interest, and there may be many.
                    if text.contains(" swap on ") {
                        lines.push(text.lines().next().unwrap_or_default().to_owned());
                    }
                }
                // EAGAIN is the end of the log. EPIPE: records were overwritten; the next read
                // returns the oldest.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                Err(error) => return Err(error),
            }
        }
        Ok(lines)
    };
    read().map_err(|error| format!("cannot read /dev/kmsg: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_line_of_a_swapon_is_found_by_the_disks_whole_name() {
        let said = "6,412,5042,-;Adding 524284k swap on /dev/ublkb1.  Priority:100 extents:1 \
                    across:524284k SSDsc";
        assert_eq!(swapon_flags(said, "/dev/ublkb1"), Some("SSDsc"));
        assert_eq!(swapon_flags(said, "/dev/ublkb"), None);
        assert_eq!(swapon_flags(said, "/dev/ublkb10"), None);
        let plain = said.replace(" SSDsc", " ");
        assert_eq!(swapon_flags(&plain, "/dev/ublkb1"), Some(""));
        for cut in 0..said.len() {
            let _ = swapon_flags(&said[..cut], "/dev/ublkb1");
        }
    }
}
