//! A store that is mapped while another server has it, and taken over without page tables to make.
//! The one test of its process: page tables are counted for all of it.
#![cfg(not(loom))]

use std::os::fd::AsFd;

use store::{Ahead, Options, Store, StoreError};

fn options() -> Options {
    Options { reserve: 0, ..Options::default() }
}

/// KiB of page tables that this process has.
fn page_tables() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_store_mapped_ahead_is_taken_over_without_page_tables_to_make() {
    let pages = 40_000;
    let first = Store::create(pages, options()).unwrap();
    let fd = first.fd().try_clone_to_owned().unwrap();
    let mut worker = first.worker().unwrap();
    let mut ahead = Ahead::map(fd.as_fd()).unwrap();
    assert_eq!(ahead.touch(), 0, "nothing is stored");
    for index in 0..pages {
        worker.put(index, 1, &[index.to_le_bytes()[0]; 3000]).unwrap();
    }
    let regions = ahead.touch() as u64;
    assert!(regions >= 50, "{regions} regions");
    assert_eq!(ahead.touch(), 0, "they have their page tables");
    // Mapping ahead costs the store no memory.
    assert_eq!(first.stats().mem_used_total, first.resident().unwrap());
    // The server is there still.
    let second = Ahead::map(fd.as_fd()).unwrap();
    assert!(matches!(Store::attach_ahead(second, options()), Err(StoreError::InUse)));
    assert_eq!(first.generation(), 1);
    // Its memory is given back, and where it was nothing comes of being looked at again.
    worker.discard(0..pages);
    first.trim();
    assert_eq!(ahead.touch(), 0);
    assert_eq!(first.stats().mem_used_total, first.resident().unwrap());
    for index in 0..pages {
        worker.put(index, 1, &[index.to_le_bytes()[0]; 3000]).unwrap();
    }
    ahead.touch();
    drop((worker, first));
    let before = page_tables();
    let store = Store::attach_ahead(ahead, options()).unwrap();
    let worker = store.worker().unwrap();
    let mut out = [0; 4096];
    for index in 0..pages {
        worker.get(index, &mut out).unwrap();
        assert_eq!(out[..3000], [index.to_le_bytes()[0]; 3000]);
    }
    // 4 KiB for each region otherwise.
    let made = page_tables().saturating_sub(before);
    assert!(made < regions, "{made} KiB of page tables for {regions} regions");
    assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
}
