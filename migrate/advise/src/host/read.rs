//! Bounded reads of /sys and /proc. Anything that cannot be read counts as absent.

use std::fs;
use std::io::Read;
use std::path::Path;

/// The most bytes read of a file of /sys or /proc.
const MAX_FILE: u64 = 64 << 10;
/// The most bytes read of a kernel's list of modules; Debian's has 700 KiB.
const MAX_LIST: u64 = 8 << 20;
/// The most entries read of a folder.
const MAX_ENTRIES: usize = 65_536;

/// The trimmed text of a file.
pub(super) fn text(path: &Path) -> Option<String> {
    limited(path, MAX_FILE).map(|text| text.trim().to_owned())
}

/// The text of a list of modules.
pub(super) fn list(path: &Path) -> Option<String> {
    limited(path, MAX_LIST)
}

fn limited(path: &Path, most: u64) -> Option<String> {
    // A FIFO would block, and only regular files have contents.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    fs::File::open(path).ok()?.take(most).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// A number, decimal or hexadecimal with 0x.
pub(super) fn number(path: &Path) -> Option<u64> {
    let text = text(path)?;
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Names in a folder, sorted.
pub(super) fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let name = |entry: std::io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let mut names: Vec<String> = entries.take(MAX_ENTRIES).filter_map(name).collect();
    names.sort();
    names
}

/// The last component of a symbolic link's target.
pub(super) fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_string_lossy().into_owned())
}
