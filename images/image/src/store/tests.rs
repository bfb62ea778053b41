//! A process that dies at any step of a store's operations leaves every finished save whole.

mod forged;
mod hosts;
mod links;
mod vanished;
mod withheld;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use codec::{Codec, Settings};

use super::Store;

use crate::disk::steps::{self, Entry};
use crate::disk::Step;
use crate::file::PARTIAL;
use crate::rewrite::Pages;
use crate::{verify, Content, Image, Options, RamBlock, State, WriteError, Writer};

const PAGE: usize = 4096;

fn options() -> Options {
    let settings = Settings::new(Codec::Zstd, None).unwrap();
    Options { settings, unit_bytes: 64 << 10, threads: 1, ..Options::default() }
}

/// A page that does not compress.
fn page(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442);
        (state >> 16).to_le_bytes()
    };
    (0..PAGE / 8).flat_map(|_| next()).collect()
}

type Ram = Vec<Vec<u8>>;

#[derive(Clone, Debug)]
enum Op {
    Save(&'static str, Option<&'static str>, Ram),
    Remove(&'static str),
    Collect,
}

fn run(store: &Store, op: &Op) -> Result<(), WriteError> {
    match op {
        Op::Save(name, parent, ram) => {
            let mut writer = Writer::create_in(store, name, *parent, options())?;
            // Each save has several packs.
            writer.limit(24);
            let len = (ram.len() * PAGE) as u64;
            writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len, host_page: 0 }])?;
            for (number, bytes) in ram.iter().enumerate() {
                writer.page(0, number as u64, bytes)?;
            }
            writer.finish(&State { facts: b"{}".to_vec(), ..State::default() })?.link()?;
        }
        Op::Remove(name) => store.remove(name)?,
        Op::Collect => {
            store.collect(options())?;
        }
    }
    Ok(())
}

/// Two VMs, one of which changes little and then much, so that the collection at the end has packs
/// to remove and saves to rewrite.
fn ops() -> Vec<Op> {
    let first: Ram = (0..40).map(page).collect();
    let mut second = first.clone();
    second[3][100] ^= 1;
    second[5] = page(500);
    let third: Ram = (0..40).map(|at| if at < 5 { page(at) } else { page(at + 1000) }).collect();
    let mut third = third;
    third[3].clone_from(&second[3]);
    vec![
        Op::Save("other", None, (2000..2020).map(page).collect()),
        Op::Save("a", None, first),
        Op::Remove("other"),
        Op::Collect,
        Op::Save("b", Some("a"), second),
        Op::Save("c", Some("b"), third),
        Op::Remove("a"),
        Op::Collect,
        Op::Remove("b"),
        Op::Collect,
    ]
}

/// Asserts that every page of the save is as given, and that no byte is damaged.
fn is_whole(store: &Store, name: &str, ram: &Ram) {
    let path = store.path(name).unwrap();
    let image = Image::open(&path).unwrap();
    let mut pages = Pages::new(&image);
    for (number, expected) in (0..).zip(ram) {
        let Some(Content::Slot(slot)) = image.index().blocks[0].content(number) else {
            panic!("page {number} of {name} has no slot");
        };
        assert!(pages.read(slot).unwrap() == expected, "page {number} of {name}");
    }
    assert_eq!(verify(&path).findings, Vec::new(), "{name}");
}

/// The saves that must be there after the operations `done`, and those that may be, since `dying`
/// was under way.
fn oracle(done: &[Op], dying: Option<&Op>) -> (BTreeMap<&'static str, Ram>, HashSet<&'static str>) {
    let (mut must, mut may) = (BTreeMap::new(), HashSet::new());
    for op in done {
        match op {
            Op::Save(name, _, ram) => {
                must.insert(*name, ram.clone());
            }
            Op::Remove(name) => {
                must.remove(name);
            }
            Op::Collect => {}
        }
    }
    match dying {
        Some(Op::Save(name, ..)) => {
            may.insert(*name);
        }
        Some(Op::Remove(name)) => {
            must.remove(name);
            may.insert(*name);
        }
        _ => {}
    }
    (must, may)
}

fn rams(ops: &[Op]) -> HashMap<&'static str, Ram> {
    ops.iter()
        .filter_map(|op| match op {
            Op::Save(name, _, ram) => Some((*name, ram.clone())),
            _ => None,
        })
        .collect()
}

fn packs(store: &Store) -> usize {
    store.folder().join("packs").read_dir().unwrap().count()
}

#[test]
fn a_process_that_dies_at_any_step_leaves_every_finished_save_whole() {
    let ops = ops();
    let rams = rams(&ops);
    let (mut steps_in_all, mut rewritten) = (0, false);
    for dies in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(&folder.path().join("store")).unwrap();
        steps::begin(dies);
        let mut done = 0;
        while done < ops.len() && run(&store, &ops[done]).is_ok() {
            done += 1;
        }
        let is_dead = steps::is_dead();
        let log = steps::end();
        rewritten |= log.iter().any(|(step, ..)| *step == Step::Rename);
        in_the_order_that_a_disk_needs(&store, &log);
        let (must, may) = oracle(&ops[..done], ops.get(done));
        let there: HashSet<String> = store.names().unwrap().into_iter().collect();
        for (name, ram) in &must {
            assert!(there.contains(*name), "{name} is lost, {dies} steps");
            is_whole(&store, name, ram);
        }
        for name in &there {
            assert!(
                must.contains_key(&name[..]) || may.contains(&name[..]),
                "{name}, {dies} steps"
            );
            is_whole(&store, name, &rams[&name[..]]);
        }
        // Another process goes on, and what the dead one left is removed.
        store.collect(options()).unwrap();
        for name in &there {
            is_whole(&store, name, &rams[&name[..]]);
            store.remove(name).unwrap();
        }
        store.collect(options()).unwrap();
        assert_eq!(packs(&store), 0, "{dies} steps");
        assert_eq!(store.folder().read_dir().unwrap().count(), 2, "{dies} steps: other files stay");
        if !is_dead {
            steps_in_all = log.len();
            assert_eq!(done, ops.len());
            break;
        }
    }
    assert!(steps_in_all > 40 && rewritten, "{steps_in_all} steps, rewritten: {rewritten}");
}

/// Asserts that a host that loses power after any of the steps has every finished save: a file is
/// durable before it has a name, a pack has its name before a save refers to it, and a pack is
/// removed after the saves that named it.
fn in_the_order_that_a_disk_needs(store: &Store, log: &[Entry]) {
    let is_temporary = |path: &Path| path.to_string_lossy().contains(PARTIAL);
    let in_packs = |path: &Path| path.parent() == Some(&store.folder().join("packs"));
    let mut unsynced: HashSet<u64> = HashSet::new();
    // Names that may not be on disk yet, by folder.
    let mut names: HashSet<PathBuf> = HashSet::new();
    for (step, inode, path) in log {
        match (step, path) {
            (Step::Write, _) => {
                unsynced.insert(*inode);
            }
            (Step::Sync, _) => {
                unsynced.remove(inode);
            }
            (Step::Link | Step::Rename, Some(path)) => {
                assert!(!unsynced.contains(inode), "{} is named unsynced", path.display());
                if is_temporary(path) {
                    continue;
                }
                let packs = names.iter().any(|name| in_packs(name));
                assert!(in_packs(path) || !packs, "{} names new packs", path.display());
                names.insert(path.clone());
            }
            (Step::Unlink, Some(path)) => {
                let saves = names.iter().any(|name| !in_packs(name));
                assert!(!in_packs(path) || !saves, "{} goes before saves", path.display());
                if !is_temporary(path) {
                    names.insert(path.clone());
                }
            }
            (Step::SyncFolder, Some(folder)) => names.retain(|name| name.parent() != Some(folder)),
            (step, None) => panic!("{step:?} without a path"),
        }
    }
}

/// A save of more pages than the hashes of one pack may have has several packs, and memory for the
/// hashes of one.
#[test]
fn a_save_of_any_size_is_written_in_packs_of_a_bounded_size() {
    const MOST: usize = 40;
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create(&folder.path().join("store")).unwrap();
    let mut ram: Ram = (0..300).map(page).collect();
    // Equal pages, near and far.
    ram[290] = ram[289].clone();
    ram[291] = ram[0].clone();
    for (name, parent) in [("one", None), ("two", Some("one"))] {
        if parent.is_some() {
            // The second save has new pages, and differences from all packs of the first.
            for (at, bytes) in ram.iter_mut().enumerate().step_by(3) {
                match at % 2 {
                    0 => *bytes = page(at as u64 + 70_000),
                    _ => bytes[8] ^= 1,
                }
            }
        }
        let mut writer = Writer::create_in(&store, name, parent, options()).unwrap();
        writer.limit(MOST);
        let len = (ram.len() * PAGE) as u64;
        writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len, host_page: 0 }]).unwrap();
        for (number, bytes) in ram.iter().enumerate() {
            writer.page(0, number as u64, bytes).unwrap();
        }
        let written = writer.summary().file_bytes;
        let summary = writer.finish(&State::default()).unwrap().link().unwrap();
        assert!(summary.file_bytes > written, "{name}: {summary:?}");
        is_whole(&store, name, &ram);
        let packs = store.info(name).unwrap().packs;
        assert!(packs.len() > 2 && packs.iter().all(|pack| pack.units <= 5), "{packs:?}");
    }
    store.remove("one").unwrap();
    store.collect(options()).unwrap();
    is_whole(&store, "two", &ram);
}

/// Runs `work` as another user, on a thread of its own.
fn as_user<T: Send>(user: u32, work: impl FnOnce() -> T + Send) -> T {
    let switch = || {
        let user = rustix::fs::Uid::from_raw(user);
        // The user of this thread and of those that it starts.
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(switch).join().unwrap())
}

/// A save of another owner stays, and not one byte of it is copied to find that out.
#[test]
fn the_owner_of_a_save_is_looked_at_before_its_pages_are_copied() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can give a save to another user");
        return;
    }
    let (ours, other) = (4711, 4712);
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(folder.path(), Some(ours), None).unwrap();
    let first: Ram = (0..40).map(page).collect();
    let second: Ram = (0..40).map(|at| page(if at < 5 { at } else { at + 1000 })).collect();
    let store = as_user(ours, || {
        let store = Store::create(&folder.path().join("store")).unwrap();
        run(&store, &Op::Save("a", None, first)).unwrap();
        run(&store, &Op::Save("b", Some("a"), second.clone())).unwrap();
        store.remove("a").unwrap();
        store
    });
    let save = store.path("b").unwrap();
    std::os::unix::fs::chown(&save, Some(other), None).unwrap();
    // Another user's save that may be locked, and one that may only be read.
    for (mode, reason) in [(0o666, "cannot keep its owner"), (0o644, "cannot be opened")] {
        std::fs::set_permissions(&save, std::fs::Permissions::from_mode(mode)).unwrap();
        let before = std::fs::read(&save).unwrap();
        let (done, log) = as_user(ours, || {
            steps::begin(usize::MAX);
            let done = store.collect(options()).unwrap();
            (done, steps::end())
        });
        assert!(done.left.len() == 1 && done.left[0].0 == "b", "{done:?}");
        assert!(done.left[0].1.contains(reason), "{done:?}");
        assert!(log.iter().all(|(step, ..)| *step != Step::Write), "{mode:o}: {log:?}");
        assert!(std::fs::read(&save).unwrap() == before);
        is_whole(&store, "b", &second);
    }
    // A process that may give files to that owner rewrites it.
    let done = store.collect(options()).unwrap();
    assert_eq!(done.rewritten, ["b"], "{done:?}");
    is_whole(&store, "b", &second);
}

/// A store may have another owner than the process that collects it.
#[test]
fn links_and_folders_in_a_store_lead_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let store = |name: &str| Store::create(&folder.path().join(name)).unwrap();
    let (one, other) = (store("one"), store("other"));
    let ram: Ram = (0..40).map(page).collect();
    run(&one, &Op::Save("save", None, ram.clone())).unwrap();
    run(&other, &Op::Save("save", None, ram.clone())).unwrap();
    let packs = |store: &Store| store.folder().join("packs");
    let save = |store: &Store| store.folder().join("save");
    // A save whose pack is a link to the same pack elsewhere.
    let pack = std::fs::read_dir(packs(&one)).unwrap().next().unwrap().unwrap().path();
    assert!(Image::open(&save(&one)).is_ok());
    std::fs::rename(&pack, folder.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), &pack).unwrap();
    assert!(matches!(Image::open(&save(&one)), Err(crate::Damage::Pack { .. })));
    // A folder with the name of what is left behind.
    std::fs::create_dir(one.folder().join(format!(".save{PARTIAL}x"))).unwrap();
    one.collect(options()).unwrap();
    // Packs of another store are not unused ones of this.
    std::fs::remove_dir_all(packs(&one)).unwrap();
    std::fs::remove_file(save(&one)).unwrap();
    std::os::unix::fs::symlink(packs(&other), packs(&one)).unwrap();
    let refused = one.collect(options()).unwrap_err().to_string();
    assert!(refused.contains("packs"), "{refused}");
    is_whole(&other, "save", &ram);
}

#[test]
fn a_new_store_is_durable_before_it_can_be_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    steps::begin(usize::MAX);
    Store::create(&path).unwrap();
    let log = steps::end();
    let at = |step: Step, of: &Path| {
        log.iter().position(|(kind, _, path)| *kind == step && path.as_deref() == Some(of))
    };
    let named = at(Step::Link, &path.join(super::STORE_FILE)).unwrap();
    let parent = at(Step::SyncFolder, folder.path()).expect("the name of the folder itself");
    assert!(parent < named, "{log:?}");
}

/// The caller goes on as if there were no image, and the VM runs on: a file at the name would be an
/// image of a VM that has run since.
#[test]
fn a_file_whose_name_cannot_be_made_durable_has_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let image = || {
        let mut writer = Writer::create(&path, options()).unwrap();
        writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len: 8192, host_page: 0 }]).unwrap();
        writer.page(0, 0, &page(1)).unwrap();
        writer.finish(&State::default()).unwrap()
    };
    let finished = image();
    // The link succeeds, and the disk fails at the folder.
    steps::begin_with_failure(1);
    let error = finished.link().unwrap_err();
    let log = steps::end();
    assert!(matches!(log[..], [(Step::Link, ..), (Step::Unlink, ..)]), "{log:?}");
    assert!(error.to_string().contains("name"), "{error}");
    assert!(!path.exists(), "{error}, and there is an image");
    image().link().unwrap();
    assert_eq!(verify(&path).findings, Vec::new());
}
