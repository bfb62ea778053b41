//! `platen image init`, `rm` and `gc`: stores, in which saves share their pages.

use crate::image_lock::ImageLock;
use crate::qat_command::say_problems;
use crate::saved_vm::{bytes, open, SavedVm};
use crate::say::{printable, say};
use anyhow::{bail, ensure, Context};
use clap::Args;
use image::{remove_image, Collected, Options, SaveInfo, Store, Summary, Writer};
use serde_json::{json, Value};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
pub(crate) struct InitArgs {
    /// Folder, which is created if it does not exist
    #[arg(value_name = "STORE")]
    store: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct RemoveArgs {
    /// Saves to remove, as STORE/NAME, or images in one file
    #[arg(value_name = "SAVE", required = true)]
    saves: Vec<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct CollectArgs {
    /// Folder of the store
    #[arg(value_name = "STORE")]
    store: PathBuf,
}

pub(crate) fn init(args: &InitArgs) -> anyhow::Result<()> {
    let path = args.store.display();
    // An error of a store that exists already is one of `create`, too.
    ensure!(
        !matches!(Store::open(&args.store), Ok(Some(_))),
        "{path} is a store already: save into it with platen save --qmp unix:PATH {path}/NAME"
    );
    let _ = Store::create(&args.store).with_context(|| format!("store {path}"))?;
    say(&format!("{path} is a store: save into it with platen save --qmp unix:PATH {path}/NAME"));
    Ok(())
}

/// Opens the store in `folder`.
pub(crate) fn open_store(folder: &Path) -> anyhow::Result<Store> {
    Store::open(folder)?.with_context(|| {
        format!(
            "{} is no store: a store is a folder that platen image init has made",
            folder.display()
        )
    })
}

/// Begins the image at `path`. If its folder is a store, the image becomes a save that shares pages
/// with the others there, and is compared with the newest one of this VM. Of a VM whose UUID nobody
/// knows there is no earlier one.
pub(crate) fn begin_image(path: &Path, options: Options, vm: &SavedVm) -> anyhow::Result<Writer> {
    refuse_place(path)?;
    let device = options.device.clone();
    let writer = writer_at(path, options, vm)?;
    say_problems(device);
    Ok(writer)
}

fn writer_at(path: &Path, options: Options, vm: &SavedVm) -> anyhow::Result<Writer> {
    let Some((store, name)) = Store::of(path)? else { return Ok(Writer::create(path, options)?) };
    let parent = newest(&store, vm)?;
    Ok(Writer::create_in(&store, &name, parent.as_deref(), options)?)
}

/// The newest save of a VM in a store.
fn newest(store: &Store, vm: &SavedVm) -> anyhow::Result<Option<String>> {
    let mut newest = None;
    for name in store.names()? {
        // A save that cannot be read cannot be a parent. `verify` names its defect.
        let Ok(info) = store.info(&name) else { continue };
        let facts = facts(&info);
        // A seed has pages of a VM without their addresses.
        let is_vm = facts["seed"] != true && !info.packs.is_empty();
        if is_vm && vm.is_in(&facts) {
            // The time of the file is that of the last collection. Older versions of platen wrote
            // no other into imports.
            let made = facts["saved"].as_u64().or(facts["imported"].as_u64());
            newest = newest.max(Some((made, info.modified, name)));
        }
    }
    Ok(newest.map(|(_, _, name)| name))
}

/// Refuses a path in a store, in which every file counts as a save.
pub(crate) fn refuse_in_store(path: &Path) -> anyhow::Result<()> {
    let store = match Store::with_packs_at(path)? {
        Some(store) => Some(store),
        None => Store::of(path)?.map(|(store, _)| store),
    };
    if let Some(store) = store {
        let (path, store) = (path.display(), store.folder().display());
        bail!(
            "{path} lies in store {store}, where it would count as a save: name a file elsewhere"
        );
    }
    Ok(())
}

/// Refuses a path at which no image can be made.
fn refuse_place(path: &Path) -> anyhow::Result<()> {
    ensure!(
        path != Path::new("-"),
        "an image is a file, and not written to standard output: name a file (platen image export IMAGE - writes a stream)"
    );
    if let Some(store) = Store::with_packs_at(path)? {
        let (path, store) = (path.display(), store.folder().display());
        bail!(
            "{path} belongs to the packs of store {store}, in which saves share their pages: name the image {store}/NAME"
        );
    }
    ensure!(
        !path.is_dir(),
        "{0} is a folder: name a file in it, for example {0}/vm.image",
        path.display().to_string().trim_end_matches('/')
    );
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let found = folder.map_or(Ok(()), |folder| folder.metadata().map(drop));
    if found.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        bail!("cannot create {0}: its folder does not exist, so make it first", path.display());
    }
    Ok(())
}

/// Prints the facts about a save that a user of a store should know.
pub(crate) fn say_shared(summary: &Summary) {
    if summary.shared > 0 {
        say(&format!(
            "{} pages are equal to stored ones; {} others are stored as differences",
            summary.shared, summary.differences
        ));
    }
    if summary.damaged > 0 {
        say(&format!(
            "{} parts of the store are damaged, and this save uses none of them: look at the others with platen \
             image verify STORE",
            summary.damaged
        ));
    }
}

/// The facts of a save. They may be empty, or of another version of platen.
pub(crate) fn facts(info: &SaveInfo) -> Value {
    serde_json::from_slice(&info.facts).unwrap_or_else(|_| json!({}))
}

pub(crate) fn remove(args: &RemoveArgs) -> anyhow::Result<()> {
    let mut stores: HashMap<PathBuf, Store> = HashMap::new();
    let mut failed = Vec::new();
    for path in &args.saves {
        match remove_one(path) {
            Ok(store) => {
                say(&format!("{} is removed", path.display()));
                stores.extend(store.map(|store| (store.folder().to_owned(), store)));
            }
            Err(error) => failed.push(error),
        }
    }
    // Space that the others have freed is collected whether or not all could be removed.
    failed.extend(stores.values().filter_map(|store| collect_store(store).err()));
    let Some(last) = failed.pop() else { return Ok(()) };
    for error in failed {
        say(&format!("{error:#}"));
    }
    Err(last)
}

/// Removes one image or save; returns the store that it was in.
fn remove_one(path: &Path) -> anyhow::Result<Option<Store>> {
    let Some((store, name)) = Store::of(path)? else {
        // Only an image is removed.
        let _ = open(path)?;
        let _lock = ImageLock::take_to_remove(path)?;
        remove_image(path)?;
        return Ok(None);
    };
    // A player that replaces one that died opens the save again.
    let _lock = ImageLock::take_to_remove(&store.path(&name)?)?;
    store.remove(&name)?;
    Ok(Some(store))
}

pub(crate) fn collect(args: &CollectArgs) -> anyhow::Result<()> {
    collect_store(&open_store(&args.store)?)
}

fn collect_store(store: &Store) -> anyhow::Result<()> {
    let folder = store.folder().display();
    let done = store.collect(Options::default()).with_context(|| format!("store {folder}"))?;
    let Collected { packs, bytes: freed, rewritten, in_use, left, busy } = done;
    if !rewritten.is_empty() {
        say(&format!("rewritten, since most of their packs was unused: {}", rewritten.join(", ")));
    }
    if !in_use.is_empty() {
        say(&format!("not rewritten, since they are in use: {}", in_use.join(", ")));
    }
    for (name, why) in left {
        say(&format!("not rewritten: {}, {}", printable(&name), printable(&why)));
    }
    if busy {
        say(&format!(
            "another process uses store {folder}: unused packs stay until the next platen image rm or gc"
        ));
    }
    say(&format!("{packs} packs removed from {folder}, {}", bytes(freed)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{RamBlock, State};

    /// Regression: an import was never the newest save beside a `platen save`, which states when it
    /// was made.
    #[test]
    fn the_newest_save_of_a_vm_may_be_an_import() {
        const UUID: &str = "592ef32c-27a5-4f79-ba49-16196c787853";
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        let vm = SavedVm { uuid: Some(UUID.into()), name: None };
        assert_eq!(newest(&store, &vm).unwrap(), None);
        let saves = [
            ("saved", json!({ "uuid": UUID, "saved": 2000 }), "saved"),
            ("imported", json!({ "uuid": UUID, "imported": 3000 }), "imported"),
            ("of-another", json!({ "uuid": "another", "saved": 9000 }), "imported"),
            // Their files are newer. A collection writes files again.
            ("imported-before", json!({ "uuid": UUID, "imported": 1000 }), "imported"),
            ("imported-by-an-older-platen", json!({ "uuid": UUID }), "imported"),
            ("saved-again", json!({ "uuid": UUID, "saved": 4000 }), "saved-again"),
        ];
        for (name, facts, expected) in saves {
            let mut writer = Writer::create_in(&store, name, None, Options::default()).unwrap();
            let blocks = [RamBlock { name: "pc.ram".into(), len: 4096, host_page: 0 }];
            writer.blocks(4096, &blocks).unwrap();
            let page: Vec<u8> = (0..512_u64).flat_map(|at| (at * at).to_le_bytes()).collect();
            writer.page(0, 0, &page).unwrap();
            let state = State { facts: facts.to_string().into_bytes(), ..State::default() };
            writer.finish(&state).unwrap().link().unwrap();
            assert_eq!(newest(&store, &vm).unwrap().as_deref(), Some(expected), "{name}");
        }
    }
}
