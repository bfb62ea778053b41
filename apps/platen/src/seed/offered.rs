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
