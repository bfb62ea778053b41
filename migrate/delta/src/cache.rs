//! Slots of one page each, whose memory is allocated on first use.

/// Pages allocated at a time.
pub(crate) const SEGMENT: usize = 256;

/// Number of slots of a cache of `bytes`, for pages of `page_size` bytes.
pub fn slots(bytes: u64, page_size: usize) -> u32 {
    u32::try_from(bytes / page_size as u64).unwrap_or(u32::MAX)
}

#[derive(Debug)]
pub(crate) struct Cache {
    /// A segment is empty until one of its slots is used.
    segments: Vec<Vec<u8>>,
    slots: usize,
    page_size: usize,
}

impl Cache {
    /// Creates as many slots of `page_size` bytes as fit into `bytes`.
    pub(crate) fn new(bytes: u64, page_size: usize) -> Self {
        let slots = slots(bytes, page_size) as usize;
        Self { segments: vec![Vec::new(); slots.div_ceil(SEGMENT)], slots, page_size }
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    pub(crate) fn page_size(&self) -> usize {
        self.page_size
    }

    /// The slot's page, which is zero at first; `None` if there is no such slot, or no memory for
    /// it.
    #[inline]
    pub(crate) fn page(&mut self, slot: usize) -> Option<&mut [u8]> {
        if slot >= self.slots {
            return None;
        }
        let segment = &mut self.segments[slot / SEGMENT];
        if segment.is_empty() {
            let pages = SEGMENT.min(self.slots - slot / SEGMENT * SEGMENT);
            segment.try_reserve_exact(pages * self.page_size).ok()?;
            segment.resize(pages * self.page_size, 0);
        }
        let at = slot % SEGMENT * self.page_size;
        Some(&mut segment[at..at + self.page_size])
    }
}
