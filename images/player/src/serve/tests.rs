use std::os::unix::net::UnixStream;
use std::thread;

use image::{Options, RamBlock, State, Store, Writer};

use super::*;

/// A guest may fill its RAM with one page, which a store keeps once.
#[test]
fn a_unit_with_pages_of_all_of_ram_is_searched_once() {
    const PAGES: u64 = 20_000;
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(folder.path()).unwrap();
    let mut writer = Writer::create_in(&store, "i", None, Options::default()).unwrap();
    let block = RamBlock { name: "ram".into(), len: PAGES * 4096, host_page: 0 };
    writer.blocks(4096, &[block]).unwrap();
    let bytes: Vec<u8> = (0..512_u64).flat_map(|at| (at * at).to_le_bytes()).collect();
    (0..PAGES).for_each(|page| writer.page(0, page, &bytes).unwrap());
    writer.finish(&State::default()).unwrap().link().unwrap();
    let image = Arc::new(Image::open(&folder.path().join("i")).unwrap());
    assert_eq!(image.index().units.len(), 1);

    let (here, mut there) = UnixStream::pair().unwrap();
    let reader = thread::spawn(move || std::io::copy(&mut there, &mut std::io::sink()));
    let mut socket = Socket::new(here).unwrap();
    let cache = UnitCache::new(&image, 1, 0).unwrap();
    let mut server = Server::new(&cache);
    let unit = cache.unit(0, &mut Units::new()).unwrap();
    let mut sent = 0;
    while server.push(&unit, u64::MAX, &mut socket).unwrap() > 0 {
        sent += 1;
    }
    assert_eq!((server.counts.pages, sent), (PAGES, PAGES.div_ceil(BATCH as u64)));
    assert!((0..PAGES).all(|page| !server.pending.is_set(0, page)));
    assert!(server.looked <= 2 * PAGES, "{} looks at {PAGES} pages", server.looked);
    drop(socket);
    let read = reader.join().unwrap().unwrap();
    assert!(read > PAGES * 4096);
}
