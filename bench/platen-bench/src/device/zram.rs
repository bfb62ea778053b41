//! A private zram device: added, measured, removed.

use anyhow::{bail, ensure, Context};
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::front::{Front, Lane, Memory};

const CONTROL: &str = "/sys/class/zram-control";

/// Devices that there are, and whether a signal has asked for the end.
static DEVICES: AtomicUsize = AtomicUsize::new(0);
static ENDING: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C and SIGTERM remove the devices: with one open, its next request is an error, and
/// the device goes with its owner; without one the process ends.
pub(super) fn remove_at_signals() -> anyhow::Result<()> {
    Ok(ctrlc::set_handler(|| {
        ENDING.store(true, Ordering::SeqCst);
        if DEVICES.load(Ordering::SeqCst) == 0 {
            std::process::exit(130);
        }
    })?)
}

/// A new device, hot-added, and hot-removed when dropped. No other device is touched.
pub(super) struct Zram {
    number: u32,
    sys: PathBuf,
    file: Option<File>,
    _counted: Counted,
}

/// One of [`DEVICES`].
struct Counted;

impl Counted {
    fn new() -> Self {
        DEVICES.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        DEVICES.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Why zram is unavailable; `None` if it is available.
pub(super) fn missing() -> Option<String> {
    if !Path::new(CONTROL).join("hot_add").exists() {
        return Some(format!("no {CONTROL} (try modprobe zram)"));
    }
    (!rustix::process::geteuid().is_root()).then(|| "adding a zram device needs root".to_owned())
}

/// The algorithms in the text of `comp_algorithm`, where the chosen one is in brackets.
fn named(known: &str) -> impl Iterator<Item = &str> {
    known.split([' ', '[', ']', '\n']).filter(|one| !one.is_empty())
}

impl Zram {
    /// The algorithms that this kernel's zram names.
    pub(super) fn algorithms() -> anyhow::Result<Vec<String>> {
        let known = Self::add()?.known()?;
        Ok(named(&known).map(str::to_owned).collect())
    }

    pub(super) fn new(algorithm: &str, bytes: u64) -> anyhow::Result<Self> {
        let mut this = Self::add()?;
        let known = this.known()?;
        if !named(&known).any(|one| one == algorithm) {
            bail!("this kernel's zram has no {algorithm} (it has {})", known.trim());
        }
        fs::write(this.sys.join("comp_algorithm"), algorithm)?;
        this.open(bytes)?;
        Ok(this)
    }

    /// Adds a device, which is removed when dropped.
    fn add() -> anyhow::Result<Self> {
        let counted = Counted::new();
        let added = fs::read_to_string(Path::new(CONTROL).join("hot_add")).context("hot_add")?;
        let number = added.trim().parse().with_context(|| format!("hot_add says '{added}'"))?;
        let sys = PathBuf::from(format!("/sys/block/zram{number}"));
        Ok(Self { number, sys, file: None, _counted: counted })
    }

    fn known(&self) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self.sys.join("comp_algorithm"))?)
    }

    /// Gives the device its size, and opens its disk.
    fn open(&mut self, bytes: u64) -> anyhow::Result<()> {
        fs::write(self.sys.join("disksize"), bytes.to_string()).context("disksize")?;
        let node = self.disk();
        let direct = OFlags::DIRECT.bits().cast_signed();
        let start = Instant::now();
        self.file = Some(loop {
            match OpenOptions::new().read(true).write(true).custom_flags(direct).open(&node) {
                Ok(file) => break file,
                Err(_) if start.elapsed() < Duration::from_secs(2) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot open {}", node.display()))
                }
            }
        });
        Ok(())
    }

    /// The block device.
    pub(super) fn disk(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.number))
    }

    fn file(&self) -> &File {
        self.file.as_ref().expect("open until dropped")
    }
}

impl Front for Zram {
    fn write(&mut self, page: u64, bytes: &[u8]) -> anyhow::Result<()> {
        Lane::write(&mut &*self, page, bytes)
    }

    fn read(&mut self, page: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        Lane::read(&mut &*self, page, bytes)
    }

    fn memory(&mut self) -> anyhow::Result<Memory> {
        let text = fs::read_to_string(self.sys.join("mm_stat"))?;
        let fields: Vec<u64> =
            text.split_whitespace().map_while(|field| field.parse().ok()).collect();
        match fields[..] {
            [plain, compressed, used, ..] => Ok(Memory { plain, compressed, used }),
            _ => bail!("mm_stat says '{text}'"),
        }
    }

    fn compact(&mut self) -> anyhow::Result<()> {
        Ok(fs::write(self.sys.join("compact"), "1")?)
    }
}

impl Lane for &Zram {
    fn write(&mut self, page: u64, bytes: &[u8]) -> anyhow::Result<()> {
        ensure!(!ENDING.load(Ordering::Relaxed), "interrupted by a signal");
        Ok(self.file().write_all_at(bytes, page * device::PAGE as u64)?)
    }

    fn read(&mut self, page: u64, bytes: &mut [u8]) -> anyhow::Result<()> {
        ensure!(!ENDING.load(Ordering::Relaxed), "interrupted by a signal");
        Ok(self.file().read_exact_at(bytes, page * device::PAGE as u64)?)
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        self.file = None;
        // Another process (udev) may have it open at this moment.
        for _ in 0..200 {
            let reset = fs::write(self.sys.join("reset"), "1");
            let removed = fs::write(Path::new(CONTROL).join("hot_remove"), self.number.to_string());
            if reset.is_ok() && removed.is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("platen: zram{} could not be removed again", self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_names_its_algorithms() {
        let named: Vec<_> = named("lzo-rle lzo lz4 [zstd] \n").collect();
        assert_eq!(named, ["lzo-rle", "lzo", "lz4", "zstd"]);
    }
}
