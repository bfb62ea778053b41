//! Files of a store that another user has forged.

use crate::file::NewFile;
use crate::layout::{header, Form};
use crate::pack::PackRef;
use crate::save::{Parts, SaveIndex};
use crate::unit_file::Sealing;
use crate::{Block, Extent, Shape};

use super::*;

/// Makes the save `forged` of 32 pages that names these packs; returns its path.
fn forge(store: &Store, packs: Vec<PackRef>) -> PathBuf {
    let extents = vec![Extent { first: 0, pages: 32, content: Content::Slot(0) }];
    let blocks = vec![Block { name: "ram".into(), pages: 32, host_page: 0, extents }];
    let index = SaveIndex { identity: 1, packs, blocks }.to_bytes().unwrap();
    let path = store.path("forged").unwrap();
    let mut save = Sealing::new(NewFile::create(&path).unwrap(), &path);
    save.append(&header(Form::Save, Shape::new(PAGE, 64 << 10).unwrap())).unwrap();
    let state = State::default().to_bytes().unwrap();
    save.seal(Form::Save, &state, &index).unwrap().0.link(&path).unwrap();
    path
}

/// A server of images may be hostile, and each pack costs memory.
#[test]
fn a_save_that_names_more_packs_than_a_writer_makes_is_refused_before_one_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let packs = |count: u128, units| (0..count).map(|id| PackRef { id, units }).collect();
    for (packs, refused) in [
        (packs(5000, 2), "more than 4096 packs"),
        (packs(2, 1 << 30), "too many units"),
        (packs(4096, 2), "pack 00000000000000000000000000000000"),
    ] {
        let path = forge(&store, packs);
        let mut opened = 0;
        let image = Image::with_packs(std::fs::File::open(&path).unwrap(), &mut |_| {
            opened += 1;
            Err(std::io::ErrorKind::NotFound.into())
        });
        let error = image.unwrap_err().to_string();
        assert!(error.contains(refused), "{error}");
        assert_eq!(opened, i32::from(refused.starts_with("pack")), "{error}");
        std::fs::remove_file(&path).unwrap();
    }
}

/// A save that is complete must be readable, whatever its parent says: of a VM that was saved with
/// `--then quit` nothing else is left.
#[test]
fn a_parent_that_names_pages_that_no_pack_has_is_no_base() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    // The second unit has four pages, and room for sixteen.
    run(&store, &Op::Save("a", None, (0..20).map(page).collect())).unwrap();
    let file = std::fs::File::open(store.path("a").unwrap()).unwrap();
    let Parts { packs, .. } = Parts::read(&file.into()).unwrap();
    let _ = forge(&store, packs);
    // They differ little from the room behind the four pages.
    let ram: Ram = (0..32_u8).map(|at| [vec![at + 1; 9], vec![0; PAGE - 9]].concat()).collect();
    run(&store, &Op::Save("b", Some("forged"), ram.clone())).unwrap();
    is_whole(&store, "b", &ram);
}
