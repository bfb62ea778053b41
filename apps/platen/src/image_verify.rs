//! `platen image verify`: verifies an image, or each save of a store.

use crate::saved_vm::{bytes, FOLDER};
use crate::say::{say, show};
use anyhow::{bail, ensure};
use image::{verify_but, Damage, Report, Store};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

/// Verifies an image, or each save of a store.
pub(crate) fn verify_all(path: &Path) -> anyhow::Result<ExitCode> {
    let mut sound = HashSet::new();
    let Some(store) = Store::open(path)? else { return run_verify(path, &mut sound) };
    let names = store.names()?;
    if names.is_empty() {
        show(&format!("{}: this store has no image: nothing was read\n", path.display()))?;
    }
    verify_saves(&store, names, &mut sound)
}

/// The verdict about saves about whose bytes nothing is known.
const UNREAD: &str = "cannot be read, and are not verified";

/// Verifies these saves of a store, except for the packs `sound`.
fn verify_saves(
    store: &Store,
    names: Vec<String>,
    sound: &mut HashSet<u128>,
) -> anyhow::Result<ExitCode> {
    let (mut damaged, mut unread) = (Vec::new(), Vec::new());
    for name in names {
        let path = store.path(&name)?;
        let report = verify_but(&path, sound);
        let has_findings = !report.findings.is_empty();
        if has_findings && store.is_gone(&name) {
            say(&format!("{} was removed meanwhile", path.display()));
        } else if has_findings && (is_unread(&report) || !store.is_there()) {
            // Without its store a save lacks its packs, and is not damaged by that.
            say_findings(&path, &report);
            unread.push(name);
        } else if let Err(error) = tell(&path, &report) {
            say(&format!("{error:#}"));
            damaged.push(name);
        }
    }
    let (damaged, unread) = (damaged.join(", "), unread.join(", "));
    let folder = store.folder().display();
    match (damaged.is_empty(), unread.is_empty()) {
        (true, true) => Ok(ExitCode::SUCCESS),
        (false, true) => bail!("store {folder} has damaged saves: {damaged}"),
        (true, false) => bail!("store {folder} has saves that {UNREAD}: {unread}"),
        (false, false) => {
            bail!("store {folder} has damaged saves: {damaged}; others {UNREAD}: {unread}")
        }
    }
}

/// Verifies an image, except for the packs `sound`.
fn run_verify(path: &Path, sound: &mut HashSet<u128>) -> anyhow::Result<ExitCode> {
    ensure!(!path.is_dir(), "image {}: {FOLDER}", path.display());
    tell(path, &verify_but(path, sound))
}

/// Prints the result of a verification; an error if it has findings.
fn tell(path: &Path, report: &Report) -> anyhow::Result<ExitCode> {
    if is_unread(report) {
        bail!("image {}: {}", path.display(), report.findings[0]);
    }
    say_findings(path, report);
    let (name, places) =
        (path.display(), report.findings.iter().filter(|found| found.is_used).count());
    if !report.is_sound() {
        let places = counted(places, "place");
        bail!("image {name} is damaged in {places}: use another copy of it")
    }
    let mut text = format!("{name}: sound; {} in {} units", bytes(report.bytes), report.units);
    if !report.findings.is_empty() {
        let parts = counted(report.findings.len(), "damaged part");
        text += &format!("; its packs have {parts} that it does not use");
    }
    show(&format!("{text}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// A number of things, for messages.
fn counted(number: usize, thing: &str) -> String {
    match number {
        1 => format!("1 {thing}"),
        _ => format!("{number} {thing}s"),
    }
}

fn say_findings(path: &Path, report: &Report) {
    for finding in &report.findings {
        say(&format!("image {}: {finding}", path.display()));
    }
}

/// Whether all that was found is files that could not be opened: nothing is known of their bytes.
fn is_unread(report: &Report) -> bool {
    !report.findings.is_empty() && report.findings.iter().all(|found| is_unopened(&found.damage))
}

/// Whether a file could not be opened. A pack that is not there is damage to its save.
fn is_unopened(damage: &Damage) -> bool {
    let is_absent =
        matches!(damage, Damage::Io { source, .. } if source.kind() == ErrorKind::NotFound);
    is_absent || damage.is_forbidden()
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{Options, RamBlock, State, Writer};
    use std::os::unix::fs::PermissionsExt;

    /// As by `rm`, after the names of the saves were read.
    #[test]
    fn a_save_that_is_removed_while_its_store_is_verified_is_not_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(&folder.path().join("store")).unwrap();
        let writer = Writer::create_in(&store, "there", None, Options::default()).unwrap();
        writer.finish(&State::default()).unwrap().link().unwrap();
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let verify = |names| verify_saves(&store, names, &mut HashSet::new());
        verify(names(&["gone", "there"])).unwrap();
        std::fs::write(store.path("broken").unwrap(), b"no save").unwrap();
        let error = verify(names(&["broken", "gone", "there"])).unwrap_err();
        assert!(error.to_string().ends_with("has damaged saves: broken"), "{error}");
    }

    /// As a mount that ends in the middle: nothing has removed the saves.
    #[test]
    fn saves_whose_store_is_gone_while_it_is_verified_are_neither_removed_nor_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let (path, elsewhere) = (folder.path().join("store"), folder.path().join("elsewhere"));
        let store = Store::create(&path).unwrap();
        let writer = Writer::create_in(&store, "there", None, Options::default()).unwrap();
        writer.finish(&State::default()).unwrap().link().unwrap();
        let names = store.names().unwrap();
        std::fs::rename(&path, &elsewhere).unwrap();
        let error = verify_saves(&store, names, &mut HashSet::new()).unwrap_err().to_string();
        assert!(error.contains("cannot be read, and are not verified: there"), "{error}");
        assert!(!error.contains("damaged"), "{error}");
    }

    /// A save, and a pack of a save, that belong to another user.
    #[test]
    fn saves_that_this_user_may_not_read_are_not_verified_and_not_damaged() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can be another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(folder.path(), 0o755);
        let store = Store::create(&folder.path().join("store")).unwrap();
        for path in ["", "platen-store", "packs"] {
            mode(&store.folder().join(path), 0o755);
        }
        for (at, name) in ["ours", "pack", "theirs"].into_iter().enumerate() {
            let mut writer = Writer::create_in(&store, name, None, Options::default()).unwrap();
            let block = RamBlock { name: "ram".into(), len: 4096, host_page: 0 };
            writer.blocks(4096, &[block]).unwrap();
            let bytes: Vec<u8> = (0_u8..251).cycle().skip(7 * at).take(4096).collect();
            writer.page(0, 0, &bytes).unwrap();
            writer.finish(&State::default()).unwrap().link().unwrap();
            let packs = store.info(name).unwrap().packs;
            let pack = store.folder().join("packs").join(format!("{:032x}", packs[0].id));
            mode(&store.path(name).unwrap(), if name == "theirs" { 0o600 } else { 0o644 });
            mode(&pack, if name == "ours" { 0o644 } else { 0o600 });
        }
        let verify = || verify_all(store.folder()).map(drop).unwrap_err().to_string();
        let error = as_user(4711, verify);
        assert!(error.ends_with("cannot be read, and are not verified: pack, theirs"), "{error}");
        assert!(!error.contains("damaged"), "{error}");
        let path = store.path("pack").unwrap();
        let alone = as_user(4711, || verify_all(&path).map(drop).unwrap_err().to_string());
        assert!(!alone.contains("damaged"), "{alone}");
        let broken = store.path("broken").unwrap();
        std::fs::write(&broken, b"no save").unwrap();
        mode(&broken, 0o644);
        let error = as_user(4711, verify);
        assert!(error.contains("has damaged saves: broken; "), "{error}");
        assert!(error.ends_with("are not verified: pack, theirs"), "{error}");
    }

    /// Runs `work` as another user, on a thread of its own.
    fn as_user<T: Send>(user: u32, work: impl FnOnce() -> T + Send) -> T {
        let switch = || {
            let user = rustix::fs::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            work()
        };
        std::thread::scope(|scope| scope.spawn(switch).join().unwrap())
    }
}
