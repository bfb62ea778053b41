//! Hostile backing devices: one whose header and blocks were changed is refused, or serves every
//! page as it was or reports an error.
//!
//! Input: the device's length in blocks (one byte), then changes of ten bytes: an offset (two
//! bytes) in its first blocks and the eight bytes to write there.
#![no_main]

mod shelf;

use libfuzzer_sys::fuzz_target;
use shelf::Memory;
use store::{format_backing, BackBuffer, Batch, Block, Options, Page, Seen, Store, MAX_OBJECT};

const PAGES: u64 = 40;

fn bytes(index: u64) -> Vec<u8> {
    let len =
        usize::try_from(if index % 3 == 0 { 4096 } else { 1 + index * 131 % 2000 }).expect("small");
    (0..len).map(|at| (at as u64 * 7 + index).to_le_bytes()[0]).collect()
}

fuzz_target!(|input: &[u8]| {
    let Some((&length, changes)) = input.split_first() else { return };
    let options = Options { reserve: 0, ..Options::default() };
    let store = Store::create(PAGES, options.clone()).expect("there is memory");
    let disk = Memory::of(48);
    format_backing(&disk, "disk", &store).expect("it is empty");
    store.set_backing(Box::new(disk.clone()), "disk").expect("it was just made");
    let mut worker = store.worker().expect("the first");
    let mut batch = Batch::new(48);
    for index in 0..PAGES {
        worker.put(index, 1, &bytes(index)).expect("there is no limit");
        batch.add(&Seen { index, tag: 1, bytes: &bytes(index) });
    }
    assert_eq!(worker.write_back(&mut batch).expect("it works").pages, PAGES);
    let fd = store.fd().try_clone_to_owned().expect("one more descriptor");
    drop((worker, store));

    for change in changes.chunks_exact(10) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]]));
        let mut blocks = disk.0.lock().expect("no panic");
        blocks[at / 4096 % 16].0[at % 4089..][..8].copy_from_slice(&change[2..]);
    }
    disk.0.lock().expect("no panic").resize(usize::from(length), Block::ZERO);
    let store = Store::attach(std::os::fd::AsFd::as_fd(&fd), options).expect("its server is gone");
    if let Err(error) = store.set_backing(Box::new(disk.clone()), "disk") {
        assert!(error.to_string().contains("disk"));
    }
    let mut worker = store.worker().expect("the first");
    let mut out = [0; MAX_OBJECT];
    for index in 0..PAGES {
        assert_eq!(worker.get(index, &mut out), Ok(Page::Backed));
        if let Ok(found) = worker.read_back(index, &mut BackBuffer::new(), &mut out) {
            let Some(Page::Object { len, .. }) = found else { panic!("{found:?}") };
            assert!(out[..len] == bytes(index), "page {index} is another");
        }
        worker.put(index, 2, &bytes(index)[..1]).expect("there is no limit");
    }
    if let Some(stats) = store.backing_stats() {
        assert_eq!(stats.free, stats.blocks);
    }
});
