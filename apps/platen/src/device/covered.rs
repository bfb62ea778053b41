//! Up to where a ublk disk has been divided into swap areas. A later server's disk may be larger.

use std::path::Path;
use swap::area;

/// The end of the last area that the disk has had, in bytes. An administrator may have taken that
/// area off since: it stays off when the server is replaced.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Covered(u64);

impl Covered {
    /// The whole of a disk whose areas another program has made.
    pub(super) fn whole(disk: &Path) -> Self {
        Self(area::size(disk).unwrap_or(0))
    }

    #[cfg(test)]
    pub(super) fn up_to(end: u64) -> Self {
        Self(end)
    }

    /// Notes the areas that the kernel swaps to now.
    pub(super) fn look(&mut self, disk: &Path) {
        if let (Ok(size), Ok(beyond)) = (area::size(disk), area::beyond(disk)) {
            self.note(size, beyond);
        }
    }

    /// Whether the disk is larger than when its areas were made.
    pub(super) fn is_outgrown_by(&self, disk: &Path) -> bool {
        let sizes = area::size(disk).and_then(|size| Ok((size, area::beyond(disk)?)));
        sizes.is_ok_and(|(size, beyond)| self.lacks(size, beyond))
    }

    /// `beyond` of the disk's `size` bytes lie behind its last area.
    fn note(&mut self, size: u64, beyond: u64) {
        self.0 = self.0.max(size.saturating_sub(beyond));
    }

    fn lacks(&self, size: u64, beyond: u64) -> bool {
        beyond > 0 && size > self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_that_was_taken_off_is_not_made_again_and_a_disk_that_has_grown_gets_areas() {
        const MIB: u64 = 1 << 20;
        let mut covered = Covered::default();
        covered.note(256 * MIB, 0);
        assert!(!covered.lacks(256 * MIB, 0));
        // The last area is off, and a server is replaced.
        assert!(!covered.lacks(256 * MIB, 64 * MIB));
        covered.note(256 * MIB, 64 * MIB);
        assert!(!covered.lacks(256 * MIB, 64 * MIB));
        // The disk grows. Areas that could not be made then are tried again.
        assert!(covered.lacks(512 * MIB, 256 * MIB));
        covered.note(512 * MIB, 128 * MIB);
        assert!(covered.lacks(512 * MIB, 128 * MIB));
        covered.note(512 * MIB, 0);
        assert!(!covered.lacks(512 * MIB, 128 * MIB));
    }
}
