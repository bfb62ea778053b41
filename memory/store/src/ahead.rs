//! The mapping that a stand-by server has of a store's file while another server has the store.
//!
//! A server that takes a store over maps all of it, and the kernel allocates page tables: 2 MiB for
//! each GiB that is stored. A swap server may take over when no memory is free. So the stand-by
//! server maps the file in advance, and has the kernel make page tables every 10 s for the regions
//! that are new. It reads a word in each page of the slot table, and a word in the head of each
//! region in use. Both have memory already; a page table covers one region.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use crate::error::StoreError;
use crate::layout::{Layout, PAGE, REGION};
use crate::map::{self, Map};
use crate::options::{limit_pages, Options};
use crate::superblock::{self, Foreign};

/// The mapping of a store that another server has, for [`Store::attach_ahead`].
///
/// [`Store::attach_ahead`]: crate::Store::attach_ahead
pub struct Ahead {
    pub(crate) map: Map,
    /// By region: whether its page table exists. The page table stays when the region's memory is
    /// freed.
    tables: Box<[bool]>,
}

impl Ahead {
    /// Maps the store in `fd`, which another server may have.
    ///
    /// # Errors
    ///
    /// [`StoreError::Foreign`] for a file that is not a store of this version with its sizes;
    /// errors of the kernel. The file is not changed.
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, StoreError> {
        let (file, layout) = examine(fd)?;
        let shared = fd.try_clone_to_owned().map_err(StoreError::io("copy"))?;
        let map = Map::new(file, shared, layout).map_err(StoreError::io("map"))?;
        Ok(Self { map, tables: vec![false; layout.regions as usize].into_boxed_slice() })
    }

    /// Pages of the store.
    pub fn pages(&self) -> u64 {
        self.map.layout().pages
    }

    /// The most pages that the store can grow to.
    pub fn capacity(&self) -> u64 {
        self.map.layout().capacity
    }

    /// Whether the store can be taken over with these options.
    ///
    /// # Errors
    ///
    /// [`StoreError::Limit`] for a limit that is too small for the table.
    pub fn check(&self, options: &Options) -> Result<(), StoreError> {
        limit_pages(self.map.layout(), options).map(drop)
    }

    /// Makes page tables for all memory that the store has now, and returns the number of regions
    /// that got one. Allocates nothing itself.
    pub fn touch(&mut self) -> usize {
        let layout = *self.map.layout();
        for slot in self.map.table().iter().step_by(PAGE / 8) {
            std::hint::black_box(slot.load());
        }
        let mut made = 0;
        let mut region = 0;
        while let Some(ahead) = self.tables[region..].iter().position(|there| !there) {
            region += ahead;
            let number = u32::try_from(region).expect("regions have such numbers");
            let Some(at) = self.map.next_data(layout.region(number)) else { break };
            region = (at - layout.regions_at) / REGION;
            if region >= self.tables.len() {
                // The store has grown since it was mapped. Its server has got other stand-by
                // servers since.
                break;
            }
            let number = u32::try_from(region).expect("regions have such numbers");
            // A head without memory: the region is not in use yet, or not any more. A read would
            // give it memory that the store does not count.
            if at == layout.region(number) && !self.tables[region] {
                std::hint::black_box(self.map.slab(number << crate::layout::SLAB_BITS).role());
                self.tables[region] = true;
                made += 1;
            }
            region += 1;
        }
        made
    }
}

/// Pages of the store in `fd`, and the most that it can grow to.
///
/// # Errors
///
/// The errors of [`Ahead::map`].
pub fn sizes(fd: BorrowedFd<'_>) -> Result<(u64, u64), StoreError> {
    examine(fd).map(|(_, layout)| (layout.pages, layout.capacity))
}

/// Opens a store's file once more, and reads its superblock.
fn examine(fd: BorrowedFd<'_>) -> Result<(File, Layout), StoreError> {
    let file = map::open(fd).map_err(StoreError::io("open"))?;
    let (len, sealed) = map::size(fd).map_err(StoreError::io("examine"))?;
    let mut page = [0; PAGE];
    let read = file.read_at(&mut page, 0).map_err(StoreError::io("read"))?;
    let layout = superblock::read(&page[..read], len)?;
    if sealed {
        Ok((file, layout))
    } else {
        Err(Foreign::Unsealed.into())
    }
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tables = self.tables.iter().filter(|there| **there).count();
        f.debug_struct("Ahead").field("tables", &tables).finish_non_exhaustive()
    }
}
