//! Verifies every byte of an image.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::Xxh3;

use crate::layout::{HEADER_LEN, TRAILER_LEN};
use crate::reader::read_at;
use crate::{Content, Damage, Image, Units};

/// The result of [`verify`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Length of the file, bytes.
    pub bytes: u64,
    /// Units that were read.
    pub units: u64,
    /// Damaged parts: at most [`Report::MOST`] units, and one finding about the whole file.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Maximum number of damaged units in the list. One disk error may damage more units than
    /// anybody reads.
    pub const MOST: usize = 100;
}

/// One damaged part.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The defect.
    pub damage: Damage,
    /// Runs of affected pages: block, first page, number of pages.
    pub pages: Vec<(String, u64, u64)>,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.damage)?;
        if let Damage::Io { source, .. } = &self.damage {
            write!(f, ": {source}")?;
        }
        for (at, (name, first, pages)) in self.pages.iter().enumerate() {
            let before = if at == 0 { "; it holds" } else { "," };
            write!(f, "{before} pages {first} to {} of {name}", first + pages - 1)?;
        }
        Ok(())
    }
}

/// Reads every byte of the image at `path` and reports the damaged parts. An image without findings
/// is byte for byte as written.
pub fn verify(path: &Path) -> Report {
    let image = match Image::open(path) {
        Ok(image) => image,
        Err(damage) => {
            let bytes = path.metadata().map_or(0, |metadata| metadata.len());
            let findings = vec![Finding { damage, pages: Vec::new() }];
            return Report { bytes, units: 0, findings };
        }
    };
    let mut report = Report { bytes: image.file_len(), ..Report::default() };
    let mut units = Units::new();
    let mut plain = vec![0; image.shape().unit_bytes()];
    for unit in 0..image.index().units.len() as u64 {
        report.units += 1;
        if let Err(damage) = units.read(&image, unit, &mut plain) {
            if report.findings.len() < Report::MOST {
                report.findings.push(Finding { damage, pages: pages_of(&image, unit) });
            }
        }
    }
    if let Err(damage) = whole(&image) {
        // A wrong hash only repeats the findings about units.
        if report.findings.is_empty() || !matches!(damage, Damage::Hash { .. }) {
            report.findings.push(Finding { damage, pages: Vec::new() });
        }
    }
    report
}

/// Compares the checksums of the stored bytes of all units, on `threads` threads. Unlike [`verify`]
/// it decodes nothing, and ends at the first damaged unit.
///
/// # Errors
///
/// [`Damage`] names a damaged unit.
pub fn check_units(image: &Image, threads: usize) -> Result<(), Damage> {
    let next = AtomicU64::new(0);
    let end = image.index().units.len() as u64;
    let check = || {
        let mut units = Units::new();
        loop {
            // Relaxed: the number is all that the threads share.
            let unit = next.fetch_add(1, Ordering::Relaxed);
            if unit >= end {
                return Ok(());
            }
            if let Err(damage) = units.check(image, unit) {
                // The other threads end after the units at which they are.
                next.store(end, Ordering::Relaxed);
                return Err(damage);
            }
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(check)).collect();
        let mut result = check();
        for other in others {
            result = result.and(other.join().expect("checking does not panic"));
        }
        result
    })
}

/// Compares the hash over the file.
fn whole(image: &Image) -> Result<(), Damage> {
    let end = image.file_len() - TRAILER_LEN as u64;
    let mut hash = Xxh3::new();
    let mut chunk = vec![0; 1 << 20];
    let mut at = 0;
    while at < end {
        let len = usize::try_from(end - at).map_or(chunk.len(), |left| left.min(chunk.len()));
        read_at(image.file(), &mut chunk[..len], at, "the file")?;
        hash.update(&chunk[..len]);
        at += len as u64;
    }
    debug_assert!(end >= HEADER_LEN as u64);
    let (expected, got) = (image.trailer().hash, hash.digest128());
    if expected == got {
        Ok(())
    } else {
        Err(Damage::Hash { expected, got })
    }
}

/// The first few runs of guest pages whose bytes are in `unit`.
fn pages_of(image: &Image, unit: u64) -> Vec<(String, u64, u64)> {
    const MOST: usize = 8;
    let size = image.shape().unit_pages();
    let (begin, end) = (unit * size, unit * size + size);
    let mut runs = Vec::new();
    for block in &image.index().blocks {
        for extent in &block.extents {
            let Content::Slot(slot) = extent.content else { continue };
            let (from, to) = (slot.max(begin), (slot + extent.pages).min(end));
            if from < to && runs.len() < MOST {
                runs.push((block.name.clone(), extent.first + from - slot, to - from));
            }
        }
    }
    runs
}
