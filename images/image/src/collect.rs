//! Removes packs that no save names, and rewrites saves of which much lies in packs that are mostly
//! unused.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{read_dir, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{flock, FlockOperation};

use crate::disk;
use crate::file::PARTIAL;
use crate::hot::image_name;
use crate::pack::PACKS;
use crate::sharing::pack_id;
use crate::store::{is_at, Store};
use crate::{Content, Damage, Image, Options, RamBlock, Units, WriteError, Writer};

/// Packs are rewritten once at least one in this many of the store's bytes is unused. A pack is
/// rewritten if at least one in this many of its own bytes is.
const UNUSED: u64 = 4;

/// What [`Store::collect`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Packs that were removed.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Saves that were rewritten.
    pub rewritten: Vec<String>,
    /// Saves that were not rewritten, because they are being restored.
    pub in_use: Vec<String>,
    /// Saves that were not rewritten, each with the reason: damage, or an owner that this process
    /// cannot give to a file.
    pub left: Vec<(String, String)>,
    /// Another process saves into the store, so that unused packs stay until the next collection.
    pub busy: bool,
}

impl Store {
    /// Removes packs that no save names. If many bytes of the others are unused, rewrites the saves
    /// that lie in such packs, and removes these packs too.
    ///
    /// Each save is whole at any moment. A process that dies in here leaves unused packs, which the
    /// next collection removes.
    ///
    /// # Errors
    ///
    /// A save that cannot be read, whose packs are therefore not known: nothing is removed. Errors
    /// of the file system.
    pub fn collect(&self, options: Options) -> Result<Collected, WriteError> {
        let mut done = Collected::default();
        if !self.remove_unused(&mut done)? {
            return Ok(done);
        }
        let mut sparse = self.sparse(&mut done)?;
        for name in self.names()? {
            let packs = self.read(&name)?;
            if !packs.iter().any(|id| sparse.contains(id)) {
                continue;
            }
            match self.rewrite(&name, &sparse, options)? {
                Rewrite::Done => done.rewritten.push(name),
                Rewrite::InUse => done.in_use.push(name),
                Rewrite::Left(why) => {
                    // The save goes on naming its packs: nothing is gained by rewriting others.
                    packs.iter().for_each(|id| {
                        sparse.remove(id);
                    });
                    done.left.push((name, why));
                }
            }
        }
        self.remove_unused(&mut done)?;
        Ok(done)
    }

    /// Removes packs that no save names, hot sets of saves that do not exist, and the temporary files
    /// of processes that have died; false if the store is in use.
    fn remove_unused(&self, done: &mut Collected) -> Result<bool, WriteError> {
        let Some(_lock) = self.try_lock(FlockOperation::NonBlockingLockExclusive)? else {
            done.busy = true;
            return Ok(false);
        };
        // A save that is renamed meanwhile may be missed under both names.
        let named = loop {
            let names = self.names()?;
            let mut named = HashSet::new();
            for name in &names {
                named.extend(self.read(name)?);
            }
            if self.names()? == names {
                break named;
            }
        };
        let packs = self.folder.join(PACKS);
        let error =
            |path: &Path, source| WriteError::Io { what: "remove", path: path.into(), source };
        // A save that was removed must not come back after its packs are gone.
        disk::sync_folder(&self.folder).map_err(|source| error(&self.folder, source))?;
        for folder in [&self.folder, &packs] {
            let read = |source| self.error(Damage::io("the folder", source));
            for entry in read_dir(folder).map_err(read)? {
                let entry = entry.map_err(read)?;
                let (name, path) = (entry.file_name(), entry.path());
                let pack = pack_id(&name).filter(|_| folder == &packs);
                let is_left = match image_name(&name.to_string_lossy()) {
                    Some(save) if folder == &self.folder => self.is_gone(save),
                    _ => is_partial(&name),
                };
                if is_left {
                    disk::unlink(&path).map_err(|source| error(&path, source))?;
                } else if pack.is_some_and(|id| !named.contains(&id)) {
                    let len = entry.metadata().map_or(0, |metadata| metadata.len());
                    disk::unlink(&path).map_err(|source| error(&path, source))?;
                    done.packs += 1;
                    done.bytes += len;
                }
            }
        }
        disk::sync_folder(&packs).map_err(|source| error(&packs, source))?;
        Ok(true)
    }

    /// The packs that a save names.
    fn read(&self, name: &str) -> Result<Vec<u128>, WriteError> {
        match self.info(name) {
            Ok(info) => Ok(info.packs.iter().map(|pack| pack.id).collect()),
            Err(_) if self.is_gone(name) => Ok(Vec::new()),
            Err(source) => Err(WriteError::Save { name: name.to_owned(), source }),
        }
    }

    /// Whether another process has removed the save. Any other reason that no such file is found may
    /// be the disk's, or a name that is not UTF-8: the save may exist.
    fn is_gone(&self, name: &str) -> bool {
        let found = self.folder.join(name).symlink_metadata();
        !name.contains(char::REPLACEMENT_CHARACTER)
            && matches!(found, Err(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// The packs that are to be rewritten.
    fn sparse(&self, done: &mut Collected) -> Result<HashSet<u128>, WriteError> {
        let mut packs: HashMap<u128, Used> = HashMap::new();
        let mut needed = HashSet::new();
        for name in self.names()? {
            match Image::open(&self.folder.join(&name)) {
                Ok(image) if image.is_save() => mark(&image, &mut packs),
                Ok(_) => {}
                // The save stays as it is, for whoever can still repair the disk, and so do all of
                // its packs.
                Err(damage) => {
                    needed.extend(self.read(&name)?);
                    if !self.is_gone(&name) {
                        done.left.push((name, damage.chain()));
                    }
                }
            }
        }
        packs.retain(|id, _| !needed.contains(id));
        let bytes: u64 = packs.values().map(|used| used.bytes).sum();
        let unused: u64 = packs.values().map(Used::unused).sum();
        if unused * UNUSED < bytes || unused == 0 {
            return Ok(HashSet::new());
        }
        let is_sparse = |used: &Used| used.unused() * UNUSED >= used.bytes;
        Ok(packs.iter().filter(|(_, used)| is_sparse(used)).map(|(id, _)| *id).collect())
    }

    /// Writes the save again, without the packs `sparse`.
    fn rewrite(
        &self,
        name: &str,
        sparse: &HashSet<u128>,
        options: Options,
    ) -> Result<Rewrite, WriteError> {
        let path = self.folder.join(name);
        let io = |source| WriteError::Io { what: "rewrite", path: path.clone(), source };
        let damaged = |source| WriteError::Save { name: name.to_owned(), source };
        let file = File::options().read(true).write(true).open(&path).map_err(io)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() || !is_at(&file, &path) {
            return Ok(Rewrite::InUse);
        }
        let image = match Image::open(&path) {
            Ok(image) => image,
            Err(damage) => return Ok(Rewrite::Left(damage.chain())),
        };
        // The copy takes long, and needs no lock: the save names its packs.
        flock(&file, FlockOperation::Unlock).map_err(|errno| io(errno.into()))?;
        let options = Options { unit_bytes: image.shape().unit_bytes(), ..options };
        let mut without = sparse.clone();
        self.add_foreign(&file, &image, &mut without).map_err(io)?;
        let mut writer = Writer::into_store(self, &path, None, without, options)?;
        writer.keep_identity(&image);
        match copy(&image, &mut writer, &damaged) {
            Err(WriteError::Save { source, .. }) => return Ok(Rewrite::Left(source.chain())),
            copied => copied?,
        }
        let finished = writer.finish(image.state())?;
        match finished.take_access(&file) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(Rewrite::Left(format!("cannot keep its owner and mode: {error}")));
            }
            set => set.map_err(io)?,
        }
        // A restore may have begun, or another process has removed or replaced the save.
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() || !is_at(&file, &path) {
            return Ok(Rewrite::InUse);
        }
        finished.replace()?;
        Ok(Rewrite::Done)
    }

    /// Adds to `without` the packs that users of the save may not be able to read: those with
    /// another owner, group or mode, unless the save names them already.
    fn add_foreign(
        &self,
        save: &File,
        image: &Image,
        without: &mut HashSet<u128>,
    ) -> io::Result<()> {
        let access = |of: &Metadata| (of.uid(), of.gid(), of.mode());
        let of_save = access(&save.metadata()?);
        let named: HashSet<u128> = image.pack_refs().iter().map(|pack| pack.id).collect();
        for entry in read_dir(self.folder.join(PACKS))? {
            let entry = entry?;
            let Some(id) = pack_id(&entry.file_name()) else { continue };
            // A pack that another process has removed meanwhile is not shared either.
            if !named.contains(&id) && entry.metadata().map(|of| access(&of)).ok() != Some(of_save)
            {
                without.insert(id);
            }
        }
        Ok(())
    }
}

/// What became of a save that was to be rewritten.
enum Rewrite {
    Done,
    /// It is being restored, or another process has replaced or removed it.
    InUse,
    /// It stays as it is, for this reason.
    Left(String),
}

/// Passes every page of `image` to `writer`.
fn copy(
    image: &Image,
    writer: &mut Writer,
    damaged: &dyn Fn(Damage) -> WriteError,
) -> Result<(), WriteError> {
    let size = image.shape().page_size();
    let blocks: Vec<_> = image.index().blocks.iter().collect();
    let ram = blocks.iter().map(|block| RamBlock {
        name: block.name.clone(),
        len: block.pages * size as u64,
        host_page: block.host_page,
    });
    writer.blocks(size, &ram.collect::<Vec<_>>())?;
    let mut pages = Pages::new(image);
    for (number, block) in blocks.iter().enumerate() {
        for extent in &block.extents {
            for page in extent.first..extent.first + extent.pages {
                match extent.content.plus(page - extent.first) {
                    Content::Zero => writer.zero(number, page),
                    Content::Filled(word) => {
                        writer.page(number, page, &word.repeat(size / word.len()))?;
                    }
                    Content::Slot(slot) => {
                        writer.page(number, page, pages.read(slot).map_err(damaged)?)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Reads pages one by one. Neighbours mostly lie in one unit.
pub(crate) struct Pages<'a> {
    image: &'a Image,
    units: Units,
    last: Option<u64>,
    plain: Vec<u8>,
}

impl<'a> Pages<'a> {
    pub(crate) fn new(image: &'a Image) -> Self {
        let plain = vec![0; image.shape().unit_bytes()];
        Self { image, units: Units::new(), last: None, plain }
    }

    pub(crate) fn read(&mut self, slot: u64) -> Result<&[u8], Damage> {
        let (per, size) = (self.image.shape().unit_pages(), self.image.shape().page_size());
        let unit = slot / per;
        if self.image.bases(unit).is_none() {
            return self.units.base(self.image, slot);
        }
        if self.last != Some(unit) {
            self.last = None;
            self.units.read(self.image, unit, &mut self.plain)?;
            self.last = Some(unit);
        }
        let nth = usize::try_from(slot % per).expect("below a unit's pages");
        Ok(&self.plain[nth * size..(nth + 1) * size])
    }
}

/// The slots of a pack that saves use.
#[derive(Default)]
struct Used {
    /// Stored bytes of its units.
    bytes: u64,
    /// Stored length, pages and used pages of each unit. A unit has at most 128 pages.
    units: Vec<(u32, u32, u128)>,
}

impl Used {
    /// Bytes that no save uses. A unit counts by its pages.
    fn unused(&self) -> u64 {
        let of = |(len, pages, used): &(u32, u32, u128)| {
            let unused = u64::from(*pages).saturating_sub(used.count_ones().into());
            u64::from(*len) * unused / u64::from(*pages).max(1)
        };
        self.units.iter().map(of).sum()
    }
}

/// Marks the slots that `image` uses.
fn mark(image: &Image, packs: &mut HashMap<u128, Used>) {
    let per = image.shape().unit_pages();
    for pack in &image.packs().packs {
        let used = packs.entry(pack.id).or_default();
        if used.units.is_empty() {
            let first = usize::try_from(pack.first).expect("units in memory");
            let count = usize::try_from(pack.units).expect("units in memory");
            let units = &image.index().units[first..first + count];
            used.units = units.iter().map(|u| (u.len, u.pages, 0)).collect();
            used.bytes = units.iter().map(|unit| u64::from(unit.len)).sum();
        }
    }
    let mut mark = |slot: u64| {
        let unit = slot / per;
        let file = image.index().units[usize::try_from(unit).expect("in memory")].file;
        let pack = &image.packs().packs[file as usize];
        let used = packs.get_mut(&pack.id).expect("added above");
        let local = usize::try_from(unit - pack.first).expect("in memory");
        used.units[local].2 |= 1 << (slot % per);
    };
    for extent in image.index().blocks.iter().flat_map(|block| &block.extents) {
        let Content::Slot(slot) = extent.content else { continue };
        for slot in slot..slot + extent.pages {
            mark(slot);
            if let Some(Some(bases)) = image.bases(slot / per) {
                let nth = usize::try_from(slot % per).expect("below a unit's pages");
                mark(bases[nth].slot);
            }
        }
    }
}

fn is_partial(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with('.') && name.contains(PARTIAL)
}
