//! Verifies every byte of an image.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use delta::page_hash;
use twox_hash::xxhash3_128::Hasher;

use crate::layout::{Trailer, HEADER_LEN, TRAILER_LEN};
use crate::pack::PageHash;
use crate::packs::OpenPack;
use crate::part::read_at;
use crate::{Content, Damage, Image, ImageFile, Store, Units, WriteError};

/// The result of [`verify`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Length of the file, bytes; of a save, with its packs.
    pub bytes: u64,
    /// Units that were read.
    pub units: u64,
    /// Damaged parts: at most [`Report::MOST`] units, and one finding about the whole file.
    pub findings: Vec<Finding>,
}

impl Report {
    /// The most damaged units in the list. One disk error may damage more units than a person
    /// reads.
    pub const MOST: usize = 100;
}

/// One damaged part.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The defect.
    pub damage: Damage,
    /// Runs of affected pages: block, first page, number of pages.
    pub pages: Vec<(String, u64, u64)>,
    /// Whether the image lacks bytes by the defect. A save has all of its bytes if only other saves
    /// use the damaged unit of its pack.
    pub is_used: bool,
}

impl Finding {
    /// A defect outside of the units.
    fn of(damage: Damage) -> Self {
        Self { damage, pages: Vec::new(), is_used: true }
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.damage.chain())?;
        for (at, (name, first, pages)) in self.pages.iter().enumerate() {
            let before = if at == 0 { "; it holds" } else { "," };
            write!(f, "{before} pages {first} to {} of {name}", first + pages - 1)?;
        }
        if !self.is_used {
            f.write_str("; this save does not use it")?;
        }
        Ok(())
    }
}

/// Reads every byte of the image at `path`, or of the save at `path` and its packs, and reports the
/// damaged parts. An image without findings is byte for byte as written.
pub fn verify(path: &Path) -> Report {
    verify_but(path, &mut HashSet::new())
}

/// As [`verify`], but skips the packs in `sound`, and adds packs without damage to it: the saves of
/// a store share packs.
pub fn verify_but(path: &Path, sound: &mut HashSet<u128>) -> Report {
    let image = match Image::open(path) {
        Ok(image) => image,
        Err(damage) => {
            let bytes = path.metadata().map_or(0, |metadata| metadata.len());
            let findings = vec![Finding::of(damage)];
            return Report { bytes, units: 0, findings };
        }
    };
    let mut report = Report { bytes: image.file_len(), ..Report::default() };
    let packs = &image.packs().packs;
    let key = if packs.is_empty() { None } else { report.note(key_of(path)) };
    let used: HashSet<u64> = used_units(&image).into_iter().collect();
    let mut units = Units::new();
    let mut plain = vec![0; image.shape().unit_bytes()];
    let in_one_file = image.index().units.len() as u64;
    let whole = [(None, 0..in_one_file)];
    let parts = packs.iter().map(|pack| (Some(pack), pack.first..pack.first + pack.units));
    let parts: Vec<_> = if packs.is_empty() { whole.into() } else { parts.collect() };
    for (pack, numbers) in parts {
        if pack.is_some_and(|pack| sound.contains(&pack.id)) {
            continue;
        }
        // `whole`: every byte of the pack was compared, and is as it was written.
        let (before, mut whole) = (report.findings.len(), true);
        let hashes = pack.and_then(|pack| report.note(pack.hashes())).unwrap_or_default();
        let mut hashes = hashes.chunks_exact(size_of::<PageHash>());
        for unit in numbers {
            report.units += 1;
            let pages = usize::try_from(image.index().unit_pages(unit)).unwrap_or(usize::MAX);
            let expected: Vec<_> = hashes.by_ref().take(pages).collect();
            let read = match image.bases(unit) {
                // The save does not use this unit, since it lacks its base pages.
                Some(None) => {
                    whole = false;
                    units.decode(&image, unit, &mut plain).map(|_| ())
                }
                _ => units.read(&image, unit, &mut plain).and_then(|len| {
                    let Some(key) = &key else { return Ok(()) };
                    compare(&image, pack, unit, key, &plain[..len], &expected)
                }),
            };
            if let Err(damage) = read {
                whole = false;
                let (pages, is_used) = (pages_of(&image, unit), used.contains(&unit));
                report.damaged(Finding { damage, pages, is_used });
            }
        }
        if let Some(pack) = pack {
            report.bytes += pack.trailer.file_len;
            let named = |damage| Damage::Pack { id: pack.id, damage: Box::new(damage) };
            report.whole(whole_file(&pack.file, &pack.trailer).map_err(named));
            if whole && key.is_some() && report.findings.len() == before {
                sound.insert(pack.id);
            }
        }
    }
    report.whole(whole_file(image.file(), image.trailer()));
    report
}

impl Report {
    /// Whether the image has all of its bytes.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|finding| !finding.is_used)
    }

    /// Adds a damaged unit. In a full list one that the image uses takes the place of one that it
    /// does not use: the list always shows whether the image is sound.
    fn damaged(&mut self, finding: Finding) {
        if self.findings.len() < Self::MOST {
            return self.findings.push(finding);
        }
        let unused = self.findings.iter_mut().find(|found| !found.is_used);
        if let Some(unused) = unused.filter(|_| finding.is_used) {
            *unused = finding;
        }
    }

    /// Adds the defect, if there is one.
    fn note<T>(&mut self, result: Result<T, Damage>) -> Option<T> {
        let note = |damage| self.findings.push(Finding::of(damage));
        result.map_err(note).ok()
    }

    /// Adds the result for a whole file. A wrong hash only repeats findings about its parts.
    fn whole(&mut self, result: Result<(), Damage>) {
        if let Err(damage) = result {
            let inner = match &damage {
                Damage::Pack { damage, .. } => damage,
                damage => damage,
            };
            if self.findings.is_empty() || !matches!(inner, Damage::Hash { .. }) {
                self.findings.push(Finding::of(damage));
            }
        }
    }
}

/// The key of the store in which the save at `path` lies.
fn key_of(path: &Path) -> Result<[u8; 32], Damage> {
    match Store::of(path) {
        Ok(Some((store, _))) => Ok(*store.key()),
        Err(WriteError::Store { source, .. }) => Err(source),
        Ok(None) | Err(_) => Err(Damage::Store),
    }
}

/// Compares the hashes of a unit's pages.
fn compare(
    image: &Image,
    pack: Option<&OpenPack>,
    unit: u64,
    key: &[u8; 32],
    plain: &[u8],
    expected: &[&[u8]],
) -> Result<(), Damage> {
    let Some(pack) = pack else { return Ok(()) };
    let pages = plain.chunks_exact(image.shape().page_size());
    for (nth, (page, expected)) in pages.zip(expected).enumerate() {
        if page_hash(key, page) != *expected {
            let damage = Box::new(Damage::PageHash { unit: unit - pack.first, nth });
            return Err(Damage::Pack { id: pack.id, damage });
        }
    }
    Ok(())
}

/// Compares the checksums of the stored bytes of all units, or of those that a save uses, on
/// `threads` threads. Unlike [`verify`] it decodes nothing, and ends at the first damaged unit.
///
/// # Errors
///
/// [`Damage`] names a damaged unit.
pub fn check_units(image: &Image, threads: usize) -> Result<(), Damage> {
    let used = used_units(image);
    let next = AtomicUsize::new(0);
    let check = || {
        let mut units = Units::new();
        loop {
            // Relaxed: the number is all that the threads share.
            let &unit = used.get(next.fetch_add(1, Ordering::Relaxed))?;
            if let Err(damage) = units.check(image, unit) {
                // The other threads end after the units at which they are.
                next.store(used.len(), Ordering::Relaxed);
                return Some((unit, damage));
            }
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(check)).collect();
        let here = check();
        let others = others.into_iter().map(|other| other.join().expect("checking does not panic"));
        let damaged = others.collect::<Vec<_>>().into_iter().chain([here]).flatten();
        // All units before it have been checked, whichever thread was first.
        damaged.min_by_key(|(unit, _)| *unit).map_or(Ok(()), |(_, damage)| Err(damage))
    })
}

/// The units that hold pages of the image or base pages of those.
fn used_units(image: &Image) -> Vec<u64> {
    let per = image.shape().unit_pages();
    if !image.is_save() {
        return (0..image.index().units.len() as u64).collect();
    }
    let mut used = Vec::new();
    for extent in image.index().blocks.iter().flat_map(|block| &block.extents) {
        let Content::Slot(slot) = extent.content else { continue };
        used.extend(slot / per..=(slot + extent.pages - 1) / per);
    }
    used.sort_unstable();
    used.dedup();
    let bases = used.iter().filter_map(|&unit| image.bases(unit)?.as_ref());
    let bases: Vec<u64> = bases.flat_map(|list| list.iter().map(|base| base.slot / per)).collect();
    used.extend(bases);
    used.sort_unstable();
    used.dedup();
    used
}

/// Compares the hash over a file.
fn whole_file(file: &ImageFile, trailer: &Trailer) -> Result<(), Damage> {
    let end = trailer.file_len - TRAILER_LEN as u64;
    let mut hash = Hasher::new();
    let mut chunk = vec![0; 1 << 20];
    let mut at = 0;
    while at < end {
        let len = usize::try_from(end - at).map_or(chunk.len(), |left| left.min(chunk.len()));
        read_at(file, &mut chunk[..len], at, "the file")?;
        hash.write(&chunk[..len]);
        at += len as u64;
    }
    debug_assert!(end >= HEADER_LEN as u64);
    let (expected, got) = (trailer.hash, hash.finish_128());
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the list ended with the first hundred, and a save whose damage came after those
    /// of other saves counted as sound.
    #[test]
    fn a_full_list_shows_whether_the_image_is_sound() {
        let unit = |is_used| Finding { damage: Damage::Store, pages: Vec::new(), is_used };
        let mut report = Report::default();
        for _ in 0..2 * Report::MOST {
            report.damaged(unit(false));
        }
        assert!(report.is_sound() && report.findings.len() == Report::MOST);
        report.damaged(unit(true));
        assert!(!report.is_sound() && report.findings.len() == Report::MOST);
        for _ in 0..2 * Report::MOST {
            report.damaged(unit(true));
        }
        assert_eq!(report.findings.iter().filter(|found| found.is_used).count(), Report::MOST);
    }
}
