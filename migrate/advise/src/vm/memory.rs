//! A sample of a guest's memory: ranges spread over its RAM, saved by `pmemsave`.

use super::backing::refuse_holes;
use super::error::VmError;
use super::ranges::ram_ranges;
use qmp::{Qmp, QmpError};
use serde_json::json;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

/// Bytes of a range: those of a relay's chunk. Neighbouring pages resemble each other: on one guest
/// zstd 1 had a ratio of 2.53 with such ranges, and of 2.35 with chunks made of ranges of a quarter
/// of it.
const RANGE: u64 = 512 << 10;
/// The most ranges: 32 MiB in all.
const RANGES: u64 = 64;
/// Single pages that show how much of the RAM is not zeros. Data lies in few and large pieces: 64
/// ranges were off by 8 % on a guest of 640 MiB.
const PROBES: u64 = 2048;
const PAGE: u64 = 4096;
/// How long QEMU may take for one range.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ranges of memory as they were at one moment each.
#[derive(Debug, Default)]
pub struct Saved {
    ranges: Vec<(u64, Vec<u8>)>,
    /// Single pages that are not all zeros, and all single pages that were examined.
    probed: Option<(u64, u64)>,
}

/// A page of [`Saved`].
#[derive(Clone, Copy, Debug)]
pub struct SavedPage<'a> {
    /// The page's address.
    pub address: u64,
    /// The page's bytes.
    pub bytes: &'a [u8],
}

impl Saved {
    /// Saves ranges spread over all RAM, one after the other, while `go_on` returns true. QEMU
    /// writes them to a file in a private folder, which is removed at the end.
    ///
    /// # Errors
    /// QEMU shows no RAM or cannot write the file, a read would allocate memory, or the user ended
    /// the call.
    pub fn take(qmp: &mut Qmp, go_on: &dyn Fn() -> bool) -> Result<Self, VmError> {
        // A read of memory that is not plugged would allocate it, and show nothing of the guest.
        let devices = qmp.execute("query-memory-devices", None)?;
        let kinds = devices.as_array().into_iter().flatten().filter_map(|one| one["type"].as_str());
        if let Some(kind) = kinds.into_iter().find(|kind| *kind != "dimm") {
            return Err(VmError::Sparse { kind: kind.chars().take(64).collect() });
        }
        refuse_holes(qmp)?;
        let arguments = json!({"command-line": "info mtree -f"});
        let map = qmp.execute("human-monitor-command", Some(arguments))?;
        let ram = ram_ranges(map.as_str().unwrap_or_default());
        let wanted = choose(&ram, RANGE, RANGES);
        if wanted.is_empty() {
            return Err(VmError::NoRam);
        }
        let mut saved = Self::of(qmp, wanted, go_on)?;
        let pages = Self::of(qmp, choose(&ram, PAGE, PROBES), go_on)?;
        saved.probed = Some(pages.counted());
        Ok(saved)
    }

    /// Saves the same ranges as they are now.
    ///
    /// # Errors
    /// The errors of [`Saved::take`].
    pub fn again(&self, qmp: &mut Qmp, go_on: &dyn Fn() -> bool) -> Result<Self, VmError> {
        let end = |(from, bytes): &(u64, Vec<u8>)| *from..from.saturating_add(bytes.len() as u64);
        Self::of(qmp, self.ranges.iter().map(end).collect(), go_on)
    }

    fn of(
        qmp: &mut Qmp,
        wanted: Vec<Range<u64>>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Self, VmError> {
        let folder = private_folder().map_err(|reason| VmError::Sample {
            path: std::env::temp_dir().display().to_string(),
            reason: reason.to_string(),
        })?;
        let path = folder.path().join("sample");
        let mut ranges = Vec::with_capacity(wanted.len());
        for range in wanted {
            if !go_on() {
                return Err(VmError::Interrupted);
            }
            let bytes = save(qmp, &range, &path)?;
            ranges.push((range.start, bytes));
        }
        Ok(Self { ranges, probed: None })
    }

    /// All pages.
    pub fn pages(&self) -> impl Iterator<Item = SavedPage<'_>> {
        self.ranges.iter().flat_map(|(from, bytes)| {
            let address =
                move |(nth, bytes)| SavedPage { address: from + nth as u64 * PAGE, bytes };
            bytes.chunks_exact(PAGE_LEN).enumerate().map(address)
        })
    }

    /// The pages that differ from those of `before`, a sample of the same ranges.
    pub fn changed<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = SavedPage<'a>> {
        let both = self.pages().zip(before.pages());
        both.filter(|(now, then)| now.address == then.address && now.bytes != then.bytes)
            .map(|(now, _)| now)
    }

    /// The part of the pages that are not all zeros; `None` without pages.
    #[expect(clippy::cast_precision_loss, reason = "pages of a sample")]
    pub fn data_share(&self) -> Option<f64> {
        let (data, all) = self.probed.unwrap_or_else(|| self.counted());
        (all > 0).then(|| data as f64 / all as f64)
    }

    /// Pages that are not all zeros, and all pages.
    fn counted(&self) -> (u64, u64) {
        let is_data = |page: &SavedPage<'_>| page.bytes.iter().any(|byte| *byte != 0);
        let count = |pages: usize| u64::try_from(pages).unwrap_or(u64::MAX);
        (count(self.pages().filter(is_data).count()), count(self.pages().count()))
    }
}

const PAGE_LEN: usize = 4096;

/// A folder that no other user may enter: QEMU's file in it has the mode that its umask leaves.
fn private_folder() -> std::io::Result<tempfile::TempDir> {
    let mine = std::fs::Permissions::from_mode(0o700);
    tempfile::Builder::new().prefix("platen-").permissions(mine).tempdir()
}

/// At most `most` ranges of `size` bytes, whole pages, spread evenly.
fn choose(ram: &[Range<u64>], size: u64, most: u64) -> Vec<Range<u64>> {
    let aligned = |range: &Range<u64>| {
        let start = range.start.checked_next_multiple_of(PAGE)?;
        let end = range.end / PAGE * PAGE;
        (start < end).then_some(start..end)
    };
    let ram: Vec<Range<u64>> = ram.iter().filter_map(aligned).collect();
    let total = ram.iter().fold(0_u64, |sum, range| sum.saturating_add(range.end - range.start));
    let count = most.min(total / size).max(u64::from(total >= PAGE));
    let stratum = total.checked_div(count).unwrap_or(0);
    let mut chosen = Vec::new();
    for nth in 0..count {
        // The range lies anywhere in its stratum: memory is laid out with periods of powers of two.
        let room = stratum.saturating_sub(size) / PAGE;
        let within = if room == 0 { 0 } else { mix(nth) % (room + 1) * PAGE };
        let mut offset = nth * stratum / PAGE * PAGE + within;
        for range in &ram {
            let len = range.end - range.start;
            if offset < len {
                let start = range.start + offset;
                chosen.push(start..range.end.min(start.saturating_add(size)));
                break;
            }
            offset -= len;
        }
    }
    chosen
}

/// A number with all bits mixed (the finaliser of splitmix64).
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn save(qmp: &mut Qmp, range: &Range<u64>, path: &Path) -> Result<Vec<u8>, VmError> {
    let shown = || path.display().to_string();
    let size = range.end - range.start;
    let arguments = json!({"val": range.start, "size": size, "filename": shown()});
    let saved = qmp.execute_within("pmemsave", Some(arguments), PATIENCE);
    saved.map_err(|source| match source {
        QmpError::Refused { .. } => VmError::Save { path: shown(), source },
        other => other.into(),
    })?;
    let failed = |reason: String| VmError::Sample { path: shown(), reason };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    file.take(size + 1).read_to_end(&mut bytes).map_err(|error| failed(error.to_string()))?;
    if bytes.len() as u64 != size {
        let len = bytes.len();
        return Err(failed(format!("it has {len} bytes or more where {size} were saved")));
    }
    // The guest's memory lies on a disk for no longer than necessary.
    std::fs::remove_file(path).map_err(|error| failed(error.to_string()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_are_spread_over_all_ram() {
        let ram = [0..0xa0000, 0x10_0000..0x8000_0000, 0x1_0000_0000..0x2_8000_0000];
        let chosen = choose(&ram, RANGE, RANGES);
        assert_eq!(chosen.len() as u64, RANGES);
        let above = chosen.iter().filter(|range| range.start >= 0x1_0000_0000).count();
        // 6 of 8 GiB.
        assert!((46..=50).contains(&above), "{above}");
    }

    #[test]
    fn the_folder_is_private() {
        let folder = private_folder().unwrap();
        let mode = std::fs::metadata(folder.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn changed_pages_are_those_that_differ() {
        let ranges = vec![(0, vec![0; 8192]), (1 << 20, vec![1; 4096])];
        let then = Saved { ranges, probed: None };
        let mut ranges = then.ranges.clone();
        ranges[0].1[5000] = 7;
        let now = Saved { ranges, probed: Some((1, 4)) };
        let changed: Vec<u64> = now.changed(&then).map(|page| page.address).collect();
        assert_eq!(changed, [4096]);
        assert!((then.data_share().unwrap() - 1.0 / 3.0).abs() < 1e-9);
        // The single pages count where there are some.
        assert_eq!(now.data_share(), Some(0.25));
        assert_eq!(Saved::default().data_share(), None);
    }

    proptest! {
        /// Whatever ranges a monitor reports: few pieces, whole pages, within RAM.
        #[test]
        fn pieces_lie_in_ram(bounds in prop::collection::vec(any::<u64>(), 0..12)) {
            let mut bounds = bounds;
            bounds.sort_unstable();
            let ram: Vec<_> = bounds.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
            for (size, most) in [(RANGE, RANGES), (PAGE, PROBES)] {
                let chosen = choose(&ram, size, most);
                prop_assert!(chosen.len() as u64 <= most);
                for piece in chosen {
                    prop_assert!(piece.start % PAGE == 0 && piece.end - piece.start <= size);
                    prop_assert!(ram.iter().any(|r| r.start <= piece.start && piece.end <= r.end));
                }
            }
        }
    }
}
