//! The guest pages of each unit.

use image::{Content, Image};

/// Consecutive pages with consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Slot of the first page.
    pub(crate) slot: u64,
    /// Number of the block.
    pub(crate) block: usize,
    /// Number of the first page in the block.
    pub(crate) page: u64,
    /// Number of pages.
    pub(crate) pages: u64,
}

/// All runs, by unit.
#[derive(Debug)]
pub(crate) struct Runs {
    /// Split at unit boundaries, sorted by slot.
    runs: Vec<Run>,
    unit_pages: u64,
}

impl Runs {
    pub(crate) fn new(image: &Image) -> Self {
        let unit_pages = image.shape().unit_pages();
        let mut runs = Vec::new();
        for (block, described) in image.index().blocks.iter().enumerate() {
            for extent in &described.extents {
                let Content::Slot(mut slot) = extent.content else { continue };
                let (mut page, mut left) = (extent.first, extent.pages);
                while left > 0 {
                    let pages = left.min(unit_pages - slot % unit_pages);
                    runs.push(Run { slot, block, page, pages });
                    (slot, page, left) = (slot + pages, page + pages, left - pages);
                }
            }
        }
        runs.sort_unstable_by_key(|run| run.slot);
        Self { runs, unit_pages }
    }

    /// The runs of `unit`, sorted by slot.
    pub(crate) fn of(&self, unit: u64) -> &[Run] {
        let at = |unit: u64| {
            let slot = unit.saturating_mul(self.unit_pages);
            self.runs.partition_point(|run| run.slot < slot)
        };
        &self.runs[at(unit)..at(unit + 1)]
    }
}
