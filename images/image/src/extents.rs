//! Extents: runs of pages in one RAM block that one index entry describes.

/// The content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zero, or never received.
    Zero,
    /// An 8-byte word, repeated.
    Filled([u8; 8]),
    /// The bytes in this slot. For an extent: the slot of its first page.
    Slot(u64),
}

impl Content {
    /// Content of the page that lies `pages` after a page of this content in the same extent.
    pub(crate) fn plus(self, pages: u64) -> Self {
        match self {
            Self::Slot(slot) => Self::Slot(slot + pages),
            other => other,
        }
    }
}

/// A run of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of the first page in its block.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
    /// Content of the first page. If that is a slot, the following pages have the following slots.
    pub content: Content,
}

/// Appends pages, in ascending order, to `extents`. Extends the last extent if the pages continue
/// it.
pub(crate) fn join(extents: &mut Vec<Extent>, first: u64, pages: u64, content: Content) {
    if let Some(last) = extents.last_mut() {
        if last.first + last.pages == first && last.content.plus(last.pages) == content {
            last.pages += pages;
            return;
        }
    }
    extents.push(Extent { first, pages, content });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_with_slots_in_a_row_or_the_same_word_are_one_extent() {
        let mut extents = Vec::new();
        let slot = Content::Slot;
        for (page, content) in [
            (0, Content::Zero),
            (1, Content::Zero),
            (2, slot(7)),
            (3, slot(8)),
            (4, slot(10)),
            (5, Content::Filled([1; 8])),
            (6, Content::Filled([2; 8])),
        ] {
            join(&mut extents, page, 1, content);
        }
        let runs: Vec<_> = extents.iter().map(|e| (e.first, e.pages, e.content)).collect();
        assert_eq!(
            runs,
            [
                (0, 2, Content::Zero),
                (2, 2, slot(7)),
                (4, 1, slot(10)),
                (5, 1, Content::Filled([1; 8])),
                (6, 1, Content::Filled([2; 8])),
            ]
        );
    }
}
