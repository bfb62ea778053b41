//! Writes the pages of a VM that has migrated to another host into a store of saved VMs.
//!
//! ```text
//!  migration: intake ─► Spool ─► temporary file       afterwards: file ─► image::Writer ─► store
//! ```
//!
//! The result is a save without device state, a *seed*: no VM can be restored from it. The oldest
//! seeds are removed when the store has more bytes than its limit. A seed takes the place of the
//! former one of its VM. The former one of a VM whose name is unknown is not found: such a seed has
//! the name of its migration, and there are at most [`UNNAMED`] of them.

use super::spool::{Spool, Spooled};
use crate::interrupt;
use crate::say::{printable, say};
use crate::size::Size;
use crate::store_command::open_store;
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
/// The most seeds of VMs without a name: as many as a host of the guide's example has doors. Each
/// such VM leaves a seed at each migration. Their pages may be the same, and then the limit of
/// bytes removes none.
const UNNAMED: usize = 64;

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
        let store = open_store(folder)?;
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
    /// succeeded in any case. Without a label the seed has the name of `migration`, an identifier.
    pub(crate) fn write(self, label: Option<&str>, migration: &str) {
        interrupt::end_at_once();
        // Only this thread and those that it starts.
        let _ = rustix::process::setpriority_process(None, 19);
        let folder = self.store.folder().display().to_string();
        match self.try_write(label, migration) {
            Ok((name, pages, summary)) => say(&format!(
                "wrote {pages} pages to the seed {folder}/{name}, {} of them already there",
                summary.shared
            )),
            Err(error) => say(&format!(
                "the VM has migrated, but its pages are not in the store {folder}: {error:#}"
            )),
        }
    }

    fn try_write(
        self,
        label: Option<&str>,
        migration: &str,
    ) -> anyhow::Result<(String, u64, Summary)> {
        let Spooled { file, pages, left_out } = self.spool.finish()?;
        ensure!(pages > 0, "the migration had no pages ({left_out} were left out)");
        if left_out > 0 {
            say(&format!("the disk was too slow for {left_out} of {} pages", pages + left_out));
        }
        let name = name(label, migration);
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
        let pruned = match label {
            Some(_) => Ok(()),
            None => self.prune_unnamed(&name),
        };
        let collect = || self.store.collect(Options::default());
        if let Err(error) = pruned.and_then(|()| self.prune(&name, collect)) {
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

    /// Removes the oldest seeds of VMs without a name, but [`UNNAMED`] of them and `new`.
    fn prune_unnamed(&self, new: &str) -> anyhow::Result<()> {
        let unnamed: Vec<_> = self.seeds()?.into_iter().filter(|seed| seed.is_unnamed).collect();
        let count = unnamed.len().saturating_sub(UNNAMED);
        let former = unnamed.into_iter().filter(|seed| seed.name != new);
        for Seed { name, .. } in former.take(count) {
            say(&format!(
                "removed the seed {}: the store has more than {UNNAMED} of VMs without a name",
                printable(&name)
            ));
            self.store.remove(&name)?;
        }
        Ok(())
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
            let oldest = self.seeds()?.into_iter().find(|seed| seed.name != new);
            let Some(Seed { name, .. }) = oldest else {
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

    /// The seeds of the store, the oldest first.
    fn seeds(&self) -> anyhow::Result<Vec<Seed>> {
        let mut seeds = Vec::new();
        for name in self.store.names()? {
            let Ok(info) = self.store.info(&name) else { continue };
            if is_seed(&info) {
                let facts = facts(&info.facts);
                let saved = facts["saved"].as_u64().unwrap_or(0);
                seeds.push(Seed { saved, name, is_unnamed: facts["name"].is_null() });
            }
        }
        seeds.sort();
        Ok(seeds)
    }
}

/// A seed of a store. The older one is the lesser.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seed {
    /// Seconds since 1970.
    saved: u64,
    name: String,
    /// The VM's name is unknown.
    is_unnamed: bool,
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

/// The name of the seed of a VM, or of a migration whose VM has no known name: another VM must not
/// take the place of that one.
fn name(label: Option<&str>, migration: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let label = label.map_or_else(|| format!("unnamed-{migration}"), str::to_owned);
    format!("seed-{}", label.chars().map(plain).take(LABEL).collect::<String>())
}

#[cfg(test)]
mod tests;
