//! A server that takes over a store with written-back pages.

use std::os::fd::AsFd;

use store::{BackingError, Disk, DiskError, FileDisk, GetError, Page, Store};

use super::{bytes, folder, given, length, opened, options, read, write_back};

#[test]
fn written_back_pages_are_read_by_the_next_server_and_their_blocks_are_reused() {
    const PAGES: u64 = 400;
    let path = folder("real").join("backing");
    let disk = FileDisk::open(&path, 1 << 20).unwrap();
    println!("direct: {}", disk.is_direct());
    let store = given(PAGES, &disk);
    let fd = disk.fd().try_clone_to_owned().unwrap();
    store.set_backing(Box::new(disk), "backing").unwrap();
    let mut worker = store.worker().unwrap();
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index, 1, length(index))).unwrap();
    }
    let before = store.stats();
    let done = write_back(&mut worker, 0..PAGES).unwrap();
    // An uncompressed page takes a block, and so does an object of 3900 bytes; two or three smaller
    // ones share one.
    assert!(done.left > 0 && done.pages > 255 && done.changed == 0, "{done:?}");
    assert_eq!(done.blocks, 255);
    let stats = store.stats();
    assert_eq!((stats.bd_count, stats.orig_data_size), (done.pages, before.orig_data_size));
    assert_eq!(
        stats.compr_data_size,
        (0..PAGES)
            .filter(|&index| worker.peek(index).unwrap().0 != Page::Backed)
            .map(|index| length(index) as u64)
            .sum()
    );
    for index in 0..PAGES {
        assert_eq!(
            read(&worker, index).unwrap(),
            Some(bytes(index, 1, length(index))),
            "page {index}"
        );
    }
    // Overwritten and discarded: a block is free once all of its pages are gone.
    worker.discard(0..100);
    for index in 100..150 {
        worker.put(index, 1, &bytes(index, 2, 500)).unwrap();
    }
    let free = store.backing_stats().unwrap().free;
    assert!(free >= 80, "{free}");
    let done = write_back(&mut worker, 0..PAGES).unwrap();
    assert!(done.pages > 80, "{done:?}");
    let expected = |index: u64| match index {
        0..100 => None,
        100..150 => Some(bytes(index, 2, 500)),
        _ => Some(bytes(index, 1, length(index))),
    };
    let store_fd = store.fd().try_clone_to_owned().unwrap();
    let (written, before) = (store.written_today(), store.stats());
    assert_eq!(written, store.backing_stats().unwrap().bd_writes);
    drop((worker, store));

    let store = Store::attach(store_fd.as_fd(), options()).unwrap();
    let worker = store.worker().unwrap();
    // Without the device, only reads of its pages fail.
    let on_it = (0..PAGES).find(|&index| worker.peek(index).unwrap().0 == Page::Backed).unwrap();
    assert_eq!(read(&worker, on_it), Err(GetError::NoBacking { index: on_it }));
    let late = store.set_backing(Box::new(FileDisk::inherit(fd.as_fd()).unwrap()), "backing");
    assert!(matches!(late, Err(BackingError::Late { .. })), "{late:?}");
    drop((worker, store));

    let store = Store::attach(store_fd.as_fd(), options()).unwrap();
    store.set_backing(Box::new(FileDisk::inherit(fd.as_fd()).unwrap()), "backing").unwrap();
    let mut worker = store.worker().unwrap();
    assert_eq!((store.stats().bd_count, store.lost_pages()), (before.bd_count, 0));
    assert_eq!(store.written_today(), written);
    for index in 0..PAGES {
        assert_eq!(read(&worker, index).unwrap(), expected(index), "page {index}");
    }
    assert_eq!(worker.check(0..PAGES).damaged, 0);
    worker.discard(0..PAGES);
    let stats = store.backing_stats().unwrap();
    assert_eq!(stats.free, stats.blocks);
    // Closing the last copy of the descriptor unlocks.
    assert!(matches!(FileDisk::open(&path, 0), Err(DiskError::InUse)));
    drop((worker, store, fd));
    opened(&path, 0);
}
