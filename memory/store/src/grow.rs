//! More pages for a store that a server takes over.
//!
//! A larger table follows the present one in the file. It gets memory first, which a killed server
//! leaves behind and the next one frees. Then one store to the superblock makes the new pages part
//! of the store.

use crate::ahead::Ahead;
use crate::entry::Word;
use crate::error::StoreError;
use crate::inject;
use crate::layout::{Layout, PAGE};
use crate::map::{self, Map};
use crate::options::{limit_pages, Options};
use crate::superblock;

/// Why a store cannot grow.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrowError {
    /// The store has no room for that many pages.
    #[error("store of {pages} pages has room for {capacity}, not for {wanted}")]
    Room {
        /// The store's pages.
        pages: u64,
        /// The most pages that the store has room for.
        capacity: u64,
        /// The pages asked for.
        wanted: u64,
    },
    /// A store does not shrink.
    #[error("store of {pages} pages cannot shrink to {wanted}")]
    Smaller {
        /// The store's pages.
        pages: u64,
        /// The pages asked for.
        wanted: u64,
    },
    /// The memory limit is too small for the table, or the kernel has no memory for it.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Ahead {
    /// Allocates memory for the table of a store of `options.grow_to` pages, while another server
    /// has the store. Does nothing for the store's present number of pages.
    ///
    /// # Errors
    ///
    /// [`GrowError`]. The next server frees memory that the store does not use then.
    pub fn grow(&self, options: &Options) -> Result<(), GrowError> {
        let layout = self.map.layout();
        let (pages, wanted) = (layout.pages, options.grow_to);
        if wanted < pages {
            return Err(GrowError::Smaller { pages, wanted });
        }
        let larger = layout.resized(wanted);
        let capacity = layout.capacity;
        let larger = larger.ok_or(GrowError::Room { pages, capacity, wanted })?;
        limit_pages(&larger, options)?;
        Ok(populate(&self.map, &larger)?)
    }
}

/// Takes over the number of pages of the last server, and frees the memory that it has allocated
/// for a larger table.
pub(crate) fn look_again(map: &mut Map) -> Result<(), StoreError> {
    let (len, _) = map::size(map.fd()).map_err(StoreError::io("examine"))?;
    let layout = superblock::read(&map.superblock_bytes(), len)?;
    map.resize(layout);
    Ok(())
}

/// Grows the store to `options.grow_to` pages. A store that cannot grow stays as it is. Frees the
/// memory behind the table.
///
/// # Errors
///
/// The kernel cannot free memory.
pub(crate) fn grow(map: &mut Map, options: &Options) -> Result<(), StoreError> {
    let layout = *map.layout();
    let larger = layout.resized(options.grow_to).filter(|larger| larger.pages > layout.pages);
    let larger = larger.filter(|larger| limit_pages(larger, options).is_ok());
    if let Some(larger) = larger.filter(|larger| populate(map, larger).is_ok()) {
        inject::step();
        map.resize(larger);
        // The rest of the former table's last page: nothing has been written there.
        let old = usize::try_from(layout.pages).expect("the table is mapped");
        for slot in map.table()[old..].iter().take(PAGE / 8) {
            slot.store(Word::ABSENT);
        }
        superblock::set_pages(map.superblock(), larger.pages);
        inject::step();
    }
    let layout = map.layout();
    let behind = layout.records_at - layout.spare_table_pages() * PAGE;
    map.punch(behind, layout.spare_table_pages()).map_err(StoreError::io("free memory of"))
}

/// Allocates memory for the additional part of the larger table.
fn populate(map: &Map, larger: &Layout) -> Result<(), StoreError> {
    let from = map.layout().fixed_pages();
    let more = u32::try_from(larger.fixed_pages() - from).expect("tables are below 2^32 pages");
    let at = usize::try_from(from).expect("the table is mapped") * PAGE;
    map.populate(at, more).map_err(StoreError::io("find memory for"))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;
    use crate::crash_tests::{killed, turn};
    use crate::page::Page;
    use crate::store::Store;

    const PAGES: u64 = 700;
    const MORE: u64 = 5000;

    fn options(grow_to: u64) -> Options {
        Options { grow_to, reserve: 0, ..Options::default() }
    }

    fn filled(store: &std::sync::Arc<Store>) -> OwnedFd {
        let mut worker = store.worker().unwrap();
        for index in 0..PAGES {
            worker.put(index, 3, &index.to_le_bytes()).unwrap();
        }
        store.fd().try_clone_to_owned().unwrap()
    }

    /// Every page of the store of [`filled`] is there, and memory is counted to the page.
    fn check(store: &std::sync::Arc<Store>) {
        let worker = store.worker().unwrap();
        let mut out = [0; 4096];
        for index in 0..store.pages() {
            let found = worker.get(index, &mut out).unwrap();
            if index < PAGES {
                assert_eq!(found, Page::Object { tag: 3, len: 8 });
                assert_eq!(out[..8], index.to_le_bytes());
            } else {
                assert_eq!(found, Page::Absent);
            }
        }
        assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
    }

    #[test]
    fn a_server_killed_while_the_store_grows_leaves_the_old_size_or_the_new_one() {
        let _turn = turn();
        let mut sizes = Vec::new();
        for at in 1.. {
            let store = Store::create(PAGES, options(0)).unwrap();
            let fd = filled(&store);
            drop(store);
            let signal = killed(|| {
                inject::arm(at);
                drop(Store::attach(fd.as_fd(), options(MORE)).unwrap());
                inject::arm(i64::MAX);
            });
            // The next server does not grow it further.
            let store = Store::attach(fd.as_fd(), options(0)).unwrap();
            sizes.push(store.pages());
            check(&store);
            drop(store);
            // One that does gets there.
            check(&Store::attach(fd.as_fd(), options(MORE)).unwrap());
            if signal.is_none() {
                break;
            }
        }
        assert_eq!((sizes[0], sizes.last()), (PAGES, Some(&MORE)), "{sizes:?}");
        assert!(sizes.is_sorted(), "{sizes:?}");
    }

    #[test]
    fn memory_for_a_growth_that_did_not_happen_is_freed() {
        let _turn = turn();
        let store = Store::create(PAGES, options(0)).unwrap();
        let fd = filled(&store);
        let before = store.resident().unwrap();
        Ahead::map(fd.as_fd()).unwrap().grow(&options(MORE)).unwrap();
        assert_eq!(store.resident().unwrap(), before + 8 * 4096);
        drop(store);
        let store = Store::attach(fd.as_fd(), options(0)).unwrap();
        assert_eq!(store.resident().unwrap(), before);
        check(&store);
    }

    #[test]
    fn a_store_of_version_5_is_served_and_does_not_grow() {
        let _turn = turn();
        let layout = Layout::with_room(PAGES, PAGES).unwrap();
        let fd = map::create(&layout).unwrap();
        let shared = fd.try_clone().unwrap();
        let map = Map::new(map::open(fd.as_fd()).unwrap(), shared, layout).unwrap();
        superblock::write_version_5(map.superblock(), &layout);
        drop(map);
        let store = Store::attach(fd.as_fd(), options(0)).unwrap();
        assert_eq!((store.pages(), store.capacity()), (PAGES, PAGES));
        filled(&store);
        let ahead = Ahead::map(fd.as_fd()).unwrap();
        let refused = ahead.grow(&options(MORE)).unwrap_err().to_string();
        assert_eq!(refused, "store of 700 pages has room for 700, not for 5000");
        drop((store, ahead));
        check(&Store::attach(fd.as_fd(), options(MORE)).unwrap());
    }
}
