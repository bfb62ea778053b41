//! `platen image list`: the saves of a store, and the bytes that each takes.

use crate::saved_vm::bytes;
use crate::say::{printable, show};
use crate::store_command::{facts, open_store};
use clap::Args;
use image::{Damage, SaveInfo, Store};
use serde_json::{json, Value};
use std::collections::HashMap;
use std::path::PathBuf;
use time::OffsetDateTime;

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// Folder of the store
    #[arg(value_name = "STORE")]
    store: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The bytes of a store's packs, and of the packs that only one save uses.
#[derive(Default)]
struct Sizes {
    packs: HashMap<u128, (u64, u32)>,
}

impl Sizes {
    fn of(store: &Store, saves: &[(String, Option<SaveInfo>)]) -> Self {
        let mut this = Self::default();
        for pack in saves.iter().filter_map(|(_, info)| info.as_ref()).flat_map(|info| &info.packs)
        {
            let entry = this.packs.entry(pack.id).or_insert_with(|| {
                let path = store.folder().join("packs").join(format!("{:032x}", pack.id));
                (path.metadata().map_or(0, |metadata| metadata.len()), 0)
            });
            entry.1 += 1;
        }
        this
    }

    fn total(&self) -> u64 {
        self.packs.values().map(|(len, _)| len).sum()
    }

    /// Bytes that the removal of the save would free.
    fn own(&self, info: &SaveInfo) -> u64 {
        let own = info.packs.iter().map(|pack| match self.packs.get(&pack.id) {
            Some((len, 1)) => *len,
            _ => 0,
        });
        own.sum::<u64>() + info.file_len
    }
}

pub(crate) fn list(args: &ListArgs) -> anyhow::Result<()> {
    let store = open_store(&args.store)?;
    let mut saves = Vec::new();
    for name in store.names()? {
        let info = store.info(&name);
        saves.push((name, info));
    }
    let plain: Vec<_> =
        saves.iter().map(|(name, info)| (name.clone(), info.as_ref().ok().cloned())).collect();
    let sizes = Sizes::of(&store, &plain);
    let entries: Vec<Value> = saves
        .iter()
        .map(|(name, info)| match info {
            Ok(info) => json!({
                "name": name, "ram-bytes": info.ram_bytes, "own-bytes": sizes.own(info),
                "packs": info.packs.len(), "machine": info.machine, "facts": facts(info),
            }),
            Err(damage) => json!({ "name": name, "error": damage.chain() }),
        })
        .collect();
    let total =
        sizes.total() + plain.iter().flat_map(|(_, info)| info).map(|i| i.file_len).sum::<u64>();
    if args.json {
        return show(&format!("{}\n", json!({ "bytes": total, "saves": entries })));
    }
    let mut text = format!("{:24} {:20} {:>12} {:>12}  VM\n", "NAME", "SAVED (UTC)", "RAM", "OWN");
    for (entry, (_, info)) in entries.iter().zip(&saves) {
        // A line feed in a name would look like another save.
        let name = printable(entry["name"].as_str().unwrap_or_default()).replace('\n', "\\n");
        if let Err(damage) = info {
            text += &format!("{name:24} {}\n", printable(&defect(damage)));
            continue;
        }
        let size = |key: &str| bytes(entry[key].as_u64().unwrap_or(0));
        let facts = &entry["facts"];
        let kind = if facts["seed"] == true { " (a seed)" } else { "" };
        text += &format!(
            "{name:24} {:20} {:>12} {:>12}  {}{kind}\n",
            utc(facts["saved"].as_i64()),
            size("ram-bytes"),
            size("own-bytes"),
            printable(facts["name"].as_str().unwrap_or("unknown")).replace('\n', "\\n"),
        );
    }
    text += &format!("{} saves in {}\n", entries.len(), bytes(total));
    show(&text)
}

/// The reason why a save cannot be listed.
fn defect(damage: &Damage) -> String {
    let what = if damage.is_forbidden() { "not readable" } else { "damaged" };
    format!("{what}: {}", damage.chain())
}

/// Formats a time.
fn utc(seconds: Option<i64>) -> String {
    match seconds.map(OffsetDateTime::from_unix_timestamp) {
        Some(Ok(at)) => format!(
            "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
            at.year(),
            u8::from(at.month()),
            at.day(),
            at.hour(),
            at.minute(),
            at.second()
        ),
        _ => "unknown".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::sync::Arc;

    #[test]
    fn a_save_that_this_user_may_not_read_is_not_listed_as_damaged() {
        let defect = |kind: ErrorKind| {
            defect(&Damage::Io { what: "the save".into(), source: Arc::new(kind.into()) })
        };
        assert!(defect(ErrorKind::PermissionDenied).starts_with("not readable: "));
        assert!(defect(ErrorKind::InvalidData).starts_with("damaged: "));
    }
}
