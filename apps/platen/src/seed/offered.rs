//! Pages of a store of saved VMs that a migration to this host need not carry (W29b of the wire
//! protocol).

use codec::{Codec, Settings};
use delta::{PageHash, PageReader, Seed, SeedKey, SeedPages, MAX_SEED};
use image::{SeedPacks, SeedReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store, or one of its saves.
#[derive(Debug)]
pub(crate) struct StoreSeed(PathBuf);

impl StoreSeed {
    /// The store at `path`, which is opened for each migration.
    pub(crate) fn at(path: &Path) -> Arc<dyn Seed> {
        Arc::new(Self(path.to_owned()))
    }
}

impl Seed for StoreSeed {
    fn open(&self, page_size: usize) -> Result<Arc<dyn SeedPages>, String> {
        let packs = SeedPacks::open(&self.0, page_size, MAX_SEED);
        let packs = packs.map_err(|error| format!("{:#}", anyhow::Error::new(error)))?;
        if packs.pages() == 0 {
            let path = self.0.display();
            return Err(format!(
                "{path} has no packs with pages of {page_size} bytes (nor has an image in one file: \
                 import it into a store)"
            ));
        }
        Ok(Arc::new(OpenSeed(Arc::new(packs))))
    }
}

#[derive(Debug)]
struct OpenSeed(Arc<SeedPacks>);

impl SeedPages for OpenSeed {
    fn key(&self) -> &SeedKey {
        self.0.key()
    }

    fn pages(&self) -> u32 {
        self.0.pages()
    }

    fn offer(&self, most: u32, give: &mut dyn FnMut(u32, &[PageHash]) -> bool) {
        let mut left = most;
        self.0.offer(&mut |first, hashes| {
            let now = hashes.len().min(left as usize);
            left -= u32::try_from(now).unwrap_or(left);
            give(first, &hashes[..now]) && left > 0
        });
    }

    fn reader(&self) -> Box<dyn PageReader> {
        Box::new(Reader(SeedReader::new(self.0.clone())))
    }
}

struct Reader(SeedReader);

impl PageReader for Reader {
    fn read(&mut self, number: u32) -> Result<&[u8], String> {
        self.0.read(number).map_err(|damage| damage.chain())
    }
}

/// The most pages of the receiver's seed that a source remembers: none with codec none, which sends
/// zeros, too. `settings`: the codec, unless it is auto.
pub(crate) fn source_seed(settings: Option<Settings>) -> u32 {
    match settings {
        Some(settings) if settings.codec() == Codec::Raw => 0,
        _ => MAX_SEED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{Options, RamBlock, State, Store, Writer};

    #[test]
    fn a_store_without_pages_and_an_image_in_one_file_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        let path = folder.path().join("vm");
        let said = |path: &Path| StoreSeed::at(path).open(4096).unwrap_err();
        assert!(said(folder.path()).contains("has no packs with pages of 4096 bytes"));
        let mut writer = Writer::create(&path, Options::default()).unwrap();
        let ram = RamBlock { name: "ram".into(), len: 4096, host_page: 0 };
        writer.blocks(4096, &[ram]).unwrap();
        writer.page(0, 0, &[&[1; 8], &[0; 4088][..]].concat()).unwrap();
        writer.finish(&State::default()).unwrap().link().unwrap();
        assert_eq!(store.names().unwrap(), ["vm"]);
        let said = said(&path);
        assert!(said.contains("vm has no packs") && said.contains("import it"), "{said}");
    }

    /// As a VM whose memory is larger than the most pages of a seed: a pack has up to 32 GiB.
    #[test]
    fn a_pack_with_more_pages_than_the_source_remembers_is_offered_in_part() {
        const PAGE: usize = 4096;
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path()).unwrap();
        let mut writer = Writer::create_in(&store, "vm", None, Options::default()).unwrap();
        let len = 64 * PAGE as u64;
        writer.blocks(PAGE, &[RamBlock { name: "ram".into(), len, host_page: 0 }]).unwrap();
        for number in 0..64_u8 {
            let page: Vec<u8> = (0..PAGE).map(|at| number ^ at.to_le_bytes()[0]).collect();
            writer.page(0, number.into(), &page).unwrap();
        }
        let state = State { facts: b"{}".to_vec(), ..State::default() };
        writer.finish(&state).unwrap().link().unwrap();
        let seed = OpenSeed(Arc::new(SeedPacks::open(folder.path(), PAGE, 40).unwrap()));
        let mut offered = 0;
        seed.offer(40, &mut |_, hashes| {
            offered += hashes.len();
            true
        });
        assert_eq!(offered, 40);
    }
}
