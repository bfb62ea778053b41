//! Writes the pages of a VM that has migrated to another host into a store of saved VMs.
//!
//! ```text
//!  migration: intake ─► Spool ─► temporary file       afterwards: file ─► image::Writer ─► store
//! ```
//!
//! The result is a save without device state, a *seed*: no VM can be restored from it. The oldest
//! seeds are removed when the store has more bytes than its limit.

use super::spool::{Spool, Spooled};
use crate::interrupt;
use crate::say::{printable, say};
use crate::size::Size;
use anyhow::{ensure, Context};
use clap::Args;
use image::{
    Collected, Image, Options, RamBlock, SaveInfo, State, Store, Summary, WriteError, Writer,
};
use relay::PageSink;
use serde_json::{json, Value};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The usual limit of a store with seeds, bytes.
const SEED_LIMIT: u64 = 16 << 30;
/// Pages that are read from the temporary file at once.
const BATCH: usize = 128;
/// The longest part of a seed's name that comes from a VM's name.
const LABEL: usize = 100;

/// The seed that a source writes.
#[derive(Args, Debug)]
pub(crate) struct WriteSeedOptions {
    /// Store of saved VMs on this host. After the migration platen writes the VM's pages there, so
    /// that the VM can come back with fewer bytes (--seed of `platen receive`). During the
    /// migration the store's disk takes a temporary file as large as the VM's memory
    #[arg(long, value_name = "STORE")]
    write_seed: Option<PathBuf>,
    /// Bytes of the store's packs beyond which the oldest of such seeds are removed. Saved VMs are
    /// never removed
    #[arg(long, value_name = "SIZE", default_value_t = Size(SEED_LIMIT), requires = "write_seed")]
    seed_limit: Size,
}

impl WriteSeedOptions {
    /// Begins a seed, if the user wants one, of a VM with pages of `page_size` bytes.
    pub(crate) fn begin(&self, page_size: u32) -> anyhow::Result<Option<Departure>> {
        let begin = |store: &PathBuf| Departure::begin(store, self.seed_limit.0, page_size);
        self.write_seed.as_ref().map(begin).transpose()
    }
}

/// The pages of a VM that migrates away.
#[derive(Debug)]
pub(crate) struct Departure {
    store: Store,
    limit: u64,
    page_size: usize,
    spool: Arc<Spool>,
}

impl Departure {
    /// Checks the store, and begins to copy pages.
    pub(crate) fn begin(folder: &Path, limit: u64, page_size: u32) -> anyhow::Result<Self> {
        let store = Store::open(folder)?.with_context(|| {
            format!(
                "{} is no store: a store is a folder that platen image init has made",
                folder.display()
            )
        })?;
        let page_size = page_size as usize;
        let spool = Spool::start(folder, page_size)?;
        Ok(Self { store, limit, page_size, spool })
    }

    /// Gets the pages during the migration.
    pub(crate) fn sink(&self) -> Arc<dyn PageSink> {
        self.spool.clone()
    }

    /// Writes the seed of the VM `label`, in place of its former one, with the lowest priority. An
    /// interrupt ends this process. Says the result, and why there is none: the migration has
    /// succeeded in any case.
    pub(crate) fn write(self, label: Option<&str>) {
        interrupt::end_at_once();
        // Only this thread and those that it starts.
        let _ = rustix::process::setpriority_process(None, 19);
        let folder = self.store.folder().display().to_string();
        match self.try_write(label) {
            Ok((name, pages, summary)) => say(&format!(
                "wrote {pages} pages to the seed {folder}/{name}, {} of them already there",
                summary.shared
            )),
            Err(error) => say(&format!(
                "the VM has migrated, but its pages are not in the store {folder}: {error:#}"
            )),
        }
    }

    fn try_write(self, label: Option<&str>) -> anyhow::Result<(String, u64, Summary)> {
        let Spooled { file, pages, left_out } = self.spool.finish()?;
        ensure!(pages > 0, "the migration had no pages ({left_out} were left out)");
        if left_out > 0 {
            say(&format!("the disk was too slow for {left_out} of {} pages", pages + left_out));
        }
        let name = name(label);
        self.refuse_other(&name)?;
        let mut writer = Writer::create_later(&self.store, &name, Options::default())?;
        let len = pages * self.page_size as u64;
        writer.blocks(self.page_size, &[RamBlock { name: "seed".into(), len, host_page: 0 }])?;
        let mut batch = vec![0; BATCH * self.page_size];
        let mut number = 0;
        while number < pages {
            let count = usize::try_from(pages - number).map_or(BATCH, |left| left.min(BATCH));
            let bytes = &mut batch[..count * self.page_size];
            file.read_exact_at(bytes, number * self.page_size as u64)
                .context("cannot read the temporary file")?;
            for page in bytes.chunks_exact(self.page_size) {
                writer.page(0, number, page)?;
                number += 1;
            }
        }
        // The disk needs its room.
        drop(file);
        let saved = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let facts = json!({
            "platen": env!("CARGO_PKG_VERSION"), "seed": true, "name": label, "saved": saved,
        });
        let state = State { facts: facts.to_string().into_bytes(), ..State::default() };
        let finished = writer.finish(&state)?;
        // Until now, whatever ends this process leaves the former seed.
        if self.refuse_other(&name)? {
            self.store.remove(&name)?;
        }
        let summary = finished.link()?;
        if let Err(error) = self.prune(&name, || self.store.collect(Options::default())) {
            say(&format!("cannot keep the seeds below --seed-limit: {error:#}"));
        }
        Ok((name, pages, summary))
    }

    /// Whether there is a seed of this name; an error if there is something else.
    fn refuse_other(&self, name: &str) -> anyhow::Result<bool> {
        let path = self.store.path(name)?;
        if matches!(path.symlink_metadata(), Err(error) if error.kind() == ErrorKind::NotFound) {
            return Ok(false);
        }
        let info = self.store.info(name).with_context(|| format!("remove {name}"))?;
        ensure!(is_seed(&info), "{name} is no seed: rename it");
        Ok(true)
    }

    /// While the packs have more bytes than the limit, removes those that no save names, by
    /// `collect`, and then the oldest seeds but `new`.
    fn prune(
        &self,
        new: &str,
        mut collect: impl FnMut() -> Result<Collected, WriteError>,
    ) -> anyhow::Result<()> {
        while self.store.pack_bytes()? > self.limit {
            // The former seeds of this VM have left packs. While another process saves, nothing
            // can be freed, and it would be in vain to remove a seed.
            let collected = collect();
            let is_busy = match &collected {
                Ok(collected) => collected.busy,
                // There is no room to rewrite a save. Without the oldest seed there is more.
                Err(WriteError::Io { source, .. }) if is_full(source) => false,
                Err(_) => return collected.map(drop).map_err(Into::into),
            };
            if is_busy || self.store.pack_bytes()? <= self.limit {
                break;
            }
            let mut oldest = None;
            for name in self.store.names()?.into_iter().filter(|name| name != new) {
                let Ok(info) = self.store.info(&name) else { continue };
                if is_seed(&info) {
                    let saved = facts(&info.facts)["saved"].as_u64().unwrap_or(0);
                    oldest = oldest.into_iter().chain([(saved, name)]).min();
                }
            }
            let Some((_, name)) = oldest else {
                collected?;
                break;
            };
            say(&format!(
                "removed the seed {}: the store is full (--seed-limit)",
                printable(&name)
            ));
            self.store.remove(&name)?;
        }
        Ok(())
    }
}

fn is_full(error: &io::Error) -> bool {
    [ErrorKind::StorageFull, ErrorKind::QuotaExceeded].contains(&error.kind())
}

fn facts(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_default()
}

/// Whether a save of a store is a seed. A save with a VM is none, whatever its facts say.
fn is_seed(info: &SaveInfo) -> bool {
    facts(&info.facts)["seed"] == true && info.machine.is_none()
}

/// Refuses an image from which no VM can be restored.
pub(crate) fn refuse_seed(image: &Image) -> anyhow::Result<()> {
    ensure!(
        !image.state().configuration.is_empty(),
        "it is a seed, which has pages of a VM that has migrated to another host, and no VM: name it \
         in --seed of platen receive"
    );
    Ok(())
}

/// The name of the seed of a VM.
fn name(label: Option<&str>) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    format!("seed-{}", label.unwrap_or("vm").chars().map(plain).take(LABEL).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use stream::synth::{main_stream, Style};
    use stream::{Kind, Tokeniser};

    const PAGE: usize = 4096;

    /// Migrates a VM away whose memory is made of `seed`.
    fn departs(store: &Path, label: &str, seed: u64, limit: u64) {
        let departure = Departure::begin(store, limit, 4096).unwrap();
        let page = |number: u64| {
            let mut state = (seed << 32 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442);
                (state >> 16).to_le_bytes()
            };
            (0..PAGE / 8).flat_map(|_| next()).collect::<Vec<u8>>()
        };
        let stream = main_stream(Style::Qemu72, PAGE, (0..100).map(page));
        let (mut tokeniser, mut tokens) = (Tokeniser::new(Kind::Main, PAGE), Vec::new());
        tokeniser.feed(&stream, &mut tokens);
        departure.sink().chunk(&stream, &tokens, PAGE, 0);
        departure.write(Some(label));
    }

    #[test]
    fn a_seed_takes_the_place_of_the_former_one_and_no_vm_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        departs(folder.path(), "web server/1", 1, SEED_LIMIT);
        assert_eq!(store.names().unwrap(), ["seed-web_server_1"]);
        let bytes = store.pack_bytes().unwrap();
        assert!(bytes > 350_000, "{bytes}");
        departs(folder.path(), "web server/1", 1, SEED_LIMIT);
        assert_eq!(store.names().unwrap(), ["seed-web_server_1"]);
        assert!(store.pack_bytes().unwrap() < bytes + 10_000, "the same pages twice");
        let image = Image::open(&store.path("seed-web_server_1").unwrap()).unwrap();
        let refused = refuse_seed(&image).unwrap_err().to_string();
        assert!(refused.contains("it is a seed"), "{refused}");
    }

    #[test]
    fn the_oldest_seeds_are_removed_and_saved_vms_never() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        let mut writer = Writer::create_in(&store, "vm", None, Options::default()).unwrap();
        let len = 10 * PAGE as u64;
        writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len, host_page: 0 }]).unwrap();
        let state = State { configuration: vec![1], facts: b"{}".to_vec(), ..State::default() };
        writer.finish(&state).unwrap().link().unwrap();
        // A seed takes about 410 KB; the seconds of the names' order are those of the clock.
        departs(folder.path(), "a", 1, SEED_LIMIT);
        departs(folder.path(), "b", 2, SEED_LIMIT);
        departs(folder.path(), "c", 3, 1 << 20);
        assert_eq!(store.names().unwrap(), ["seed-b", "seed-c", "vm"]);
        departs(folder.path(), "d", 4, 1);
        assert_eq!(store.names().unwrap(), ["seed-d", "vm"], "the new seed stays");
    }

    #[test]
    fn packs_of_former_seeds_are_removed_before_a_seed_is() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        // A seed takes about 410 KB.
        departs(folder.path(), "a", 1, 1 << 20);
        (2..8).for_each(|seed| departs(folder.path(), "b", seed, 1 << 20));
        assert_eq!(store.names().unwrap(), ["seed-a", "seed-b"]);
        assert!(store.pack_bytes().unwrap() <= 1 << 20);
    }

    #[test]
    fn a_vm_that_is_alone_in_its_store_does_not_fill_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        (1..8).for_each(|seed| departs(folder.path(), "a", seed, 1 << 20));
        assert_eq!(store.names().unwrap(), ["seed-a"]);
        assert!(store.pack_bytes().unwrap() <= 1 << 20);
    }

    #[test]
    fn no_seed_is_removed_in_vain_while_another_process_saves() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        departs(folder.path(), "a", 1, SEED_LIMIT);
        departs(folder.path(), "b", 2, SEED_LIMIT);
        // It has the store's lock.
        let saving = Writer::create_in(&store, "vm", None, Options::default()).unwrap();
        departs(folder.path(), "c", 3, 1);
        assert_eq!(store.names().unwrap(), ["seed-a", "seed-b", "seed-c"]);
        drop(saving);
        departs(folder.path(), "d", 4, 1);
        assert_eq!(store.names().unwrap(), ["seed-d"]);
    }

    #[test]
    fn without_room_to_rewrite_saves_the_oldest_seed_is_removed_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        departs(folder.path(), "a", 1, SEED_LIMIT);
        departs(folder.path(), "b", 2, SEED_LIMIT);
        let departure = Departure::begin(folder.path(), 1, 4096).unwrap();
        let full = || {
            let (path, source) = (folder.path().to_owned(), ErrorKind::StorageFull.into());
            Err(WriteError::Io { what: "write", path, source })
        };
        departure.prune("seed-b", full).unwrap_err();
        assert_eq!(store.names().unwrap(), ["seed-b"]);
    }

    #[test]
    fn another_save_with_the_name_of_a_seed_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = Store::create(folder.path()).unwrap().path("seed-a").unwrap();
        std::fs::write(&path, b"damaged").unwrap();
        departs(folder.path(), "a", 1, SEED_LIMIT);
        assert_eq!(std::fs::read(&path).unwrap(), b"damaged");
    }

    #[test]
    fn a_folder_that_is_no_store_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let said = Departure::begin(folder.path(), 1, 4096).unwrap_err().to_string();
        assert!(said.contains("is no store: a store is a folder that platen image init"), "{said}");
    }
}
