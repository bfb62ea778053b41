//! Rewrites a save without packs of which saves use little.

use std::collections::HashSet;
use std::fs::{read_dir, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{flock, FlockOperation};

use crate::file::{is_at, parent_of, NewFile};
use crate::pack::PACKS;
use crate::sharing::pack_id;
use crate::store::Store;
use crate::{Content, Damage, Image, Options, RamBlock, Units, WriteError, Writer};

impl Store {
    /// Rewrites the save without the packs `sparse`. Pages that differ little from those of
    /// `parent`, a save that was rewritten before, become differences from them: those of both may
    /// have been differences from pages of a save that is gone.
    pub(crate) fn rewrite(
        &self,
        name: &str,
        sparse: &HashSet<u128>,
        parent: Option<&str>,
        options: Options,
    ) -> Result<Rewrite, WriteError> {
        let path = self.folder.join(name);
        let io = |source| WriteError::Io { what: "rewrite", path: path.clone(), source };
        let damaged = |source| WriteError::Save { name: name.to_owned(), source };
        let file = match File::options().read(true).write(true).open(&path) {
            // The save is another user's, and has to stay as it is.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Ok(Rewrite::Left(format!("cannot be opened to lock it: {error}")));
            }
            // Another process has removed the save.
            Err(_) if self.is_gone(name) => return Ok(Rewrite::InUse),
            opened => opened.map_err(io)?,
        };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() || !is_at(&file, &path) {
            return Ok(Rewrite::InUse);
        }
        if let Some(other) = self.other_name(&file, &path).map_err(io)? {
            return Ok(other);
        }
        let image = match Image::open(&path) {
            Ok(image) => image,
            Err(_) if self.is_gone(name) => return Ok(Rewrite::InUse),
            Err(damage) => return Ok(Rewrite::Left(damage.chain())),
        };
        // The copy takes long, and needs no lock: the save names its packs.
        flock(&file, FlockOperation::Unlock).map_err(|errno| io(errno.into()))?;
        // The copy costs time and disk space, which would be wasted if it could not have the owner
        // of the save.
        let probe = NewFile::create_in(&self.folder, name).map_err(io)?;
        if let Some(left) = cannot_keep(probe.take_access(&file)).map_err(io)? {
            return Ok(left);
        }
        drop(probe);
        let options = Options { unit_bytes: image.shape().unit_bytes(), ..options };
        let mut without = sparse.clone();
        self.add_foreign(&file, &image, &mut without).map_err(io)?;
        let mut writer = Writer::into_store(self, &path, parent, without, options)?;
        writer.keep_identity(&image);
        match copy(&image, &mut writer, &damaged) {
            Err(WriteError::Save { source, .. }) => return Ok(Rewrite::Left(source.chain())),
            copied => copied?,
        }
        let mut finished = writer.finish(image.state())?;
        // The owner of the save may have changed meanwhile.
        if let Some(left) = cannot_keep(finished.take_access(&file)).map_err(io)? {
            return Ok(left);
        }
        // Before the lock: a slow disk must not keep a restore from the save meanwhile. The next
        // removal of unused packs removes these if the save stays.
        finished.link_packs()?;
        // A restore may have begun, or another process has removed or replaced the save.
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() || !is_at(&file, &path) {
            return Ok(Rewrite::InUse);
        }
        // The copy takes long: the file may have got another name meanwhile.
        if let Some(other) = self.other_name(&file, &path).map_err(io)? {
            return Ok(other);
        }
        finished.replace()?;
        Ok(Rewrite::Done)
    }

    /// The outcome for a save with several names; `None` for one with the name `path` alone. The
    /// rewritten save would take one name, and the old one would keep the others: one VM with two
    /// locks, which could run twice.
    fn other_name(&self, file: &File, path: &Path) -> io::Result<Option<Rewrite>> {
        let names = file.metadata()?.nlink();
        if names > 1 {
            let why = format!("its file has {names} names (hard links): remove the others");
            return Ok(Some(Rewrite::Left(why)));
        }
        if !path.symlink_metadata().is_ok_and(|named| named.is_symlink()) {
            return Ok(None);
        }
        if parent_of(&path.canonicalize()?) == self.folder.canonicalize()? {
            return Ok(Some(Rewrite::Link));
        }
        let why = "it is a symbolic link to a file outside the store: move the file to its place";
        Ok(Some(Rewrite::Left(why.to_owned())))
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

/// Outcome for a save that was to be rewritten.
pub(crate) enum Rewrite {
    Done,
    /// The save is being restored, or another process has replaced or removed it.
    InUse,
    /// The name is a symbolic link to another save of the store, and leads to the rewritten one.
    Link,
    /// The save stays as it is, for this reason.
    Left(String),
}

/// The reason why the save has to stay, if this process cannot give its owner and mode to another
/// file.
fn cannot_keep(taken: io::Result<()>) -> io::Result<Option<Rewrite>> {
    match taken {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Ok(Some(Rewrite::Left(format!("cannot keep its owner and mode: {error}"))))
        }
        taken => taken.map(|()| None),
    }
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

/// Reads pages one by one. Neighbouring pages mostly lie in one unit.
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
