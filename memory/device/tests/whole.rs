//! Pages that are stored as they are: read with one copy, and never taken for another codec's.
#![cfg(not(loom))]

use codec::Codec;
use device::{Damage, PageReader, PAGE};
use store::{Options, Page, Store};

#[test]
fn a_raw_page_is_copied_to_the_reader_s_buffer_only() {
    let store = Store::create(8, Options { reserve: 0, ..Options::default() }).unwrap();
    let mut worker = store.worker().unwrap();
    let mut whole = [7; PAGE];
    whole[..8].copy_from_slice(b"as it is");
    worker.put(1, Codec::Raw.to_wire(), &whole).unwrap();
    worker.put(2, Codec::Zstd.to_wire(), b"an object").unwrap();
    let mut reader = PageReader::new(&store);
    let mut out = [0; PAGE];
    // Undecodable, so that only the object is there.
    assert!(matches!(reader.read(&worker, 2, true, &mut out), Err(Damage::Decode { .. })));
    assert_eq!(&reader.object()[..9], b"an object");
    let page = Page::Object { tag: Codec::Raw.to_wire(), len: PAGE };
    assert_eq!(reader.read(&worker, 1, true, &mut out).unwrap(), page);
    assert!(out == whole);
    assert_eq!(&reader.object()[..9], b"an object", "copied there too");
    // Without touch, as the policy reads: the object is there.
    out.fill(0);
    assert_eq!(reader.read(&worker, 1, false, &mut out).unwrap(), page);
    assert!(out == whole && reader.object()[..] == whole);
}

#[test]
fn an_object_of_a_page_s_length_of_another_codec_is_decoded() {
    let store = Store::create(8, Options { reserve: 0, ..Options::default() }).unwrap();
    let mut worker = store.worker().unwrap();
    let mut reader = PageReader::new(&store);
    let mut out = [0; PAGE];
    for codec in [Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
        worker.put(3, codec.to_wire(), &[0xab; PAGE]).unwrap();
        let read = reader.read(&worker, 3, true, &mut out);
        assert!(matches!(read, Err(Damage::Decode { .. })), "{codec:?}: {read:?}");
    }
}
