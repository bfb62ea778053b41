//! Opens an image, or a save and its packs.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::disk;
use crate::file::parent_of;
use crate::layout::{Form, Part, Trailer};
use crate::pack::{open_pack, Base, PackRef};
use crate::packs::{open_all, OpenPack, Packs};
use crate::reads::{Listed, ReadPart};
use crate::save::Parts;
use crate::{Damage, ImageFile, Index, Shape, State};

/// An open image, or an open save with its packs. Header, trailer, state and index are verified;
/// rule I6.
#[derive(Debug)]
pub struct Image {
    file: ImageFile,
    form: Form,
    shape: Shape,
    trailer: Trailer,
    state: State,
    identity: u128,
    index: Index,
    packs: Packs,
    /// Number of this image among those that the process has opened.
    nth: u64,
    /// Path of an image of this host.
    path: Option<Arc<Path>>,
}

/// Counts the images that the process opens.
static OPENED: AtomicU64 = AtomicU64::new(0);

impl Image {
    /// Opens the image at `path`, or the save at `path` and its packs, which lie beside it.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the defect of the file.
    pub fn open(path: &Path) -> Result<Self, Damage> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let named: Arc<Path> = path.into();
        let _listed = Listed::new(&named, ReadPart::Opening);
        loop {
            let file = File::open(path).map_err(|error| Damage::io("the image", error))?;
            let opened = file.try_clone().map_err(|error| Damage::io("the image", error))?;
            match Self::with_packs(file, &mut |id| open_pack(folder, id)) {
                // The collection of the store has put another file in its place, and has removed
                // packs that only the former file named.
                Err(Damage::Pack { .. }) if is_replaced(&opened, path) => {}
                image => return image.map(|image| Self { path: Some(named), ..image }),
            }
        }
    }

    /// Reads an open file of an image that is not a save.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the defect of the file.
    pub fn over(file: File) -> Result<Self, Damage> {
        Self::with_packs(file, &mut |_| Err(io::ErrorKind::NotFound.into()))
    }

    /// Reads an open file. `open` opens the pack of the given name.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the defect of the file or of a pack.
    pub fn with_packs(
        file: impl Into<ImageFile>,
        open: &mut dyn FnMut(u128) -> io::Result<ImageFile>,
    ) -> Result<Self, Damage> {
        let file = file.into();
        let Parts { form, shape, trailer, state, identity, mut index, packs } = Parts::read(&file)?;
        let mut packs = open_all(&packs, shape, open)?;
        if form == Form::Save {
            for extent in index.blocks.iter().flat_map(|block| &block.extents) {
                packs.check(extent, shape)?;
            }
            index.units = std::mem::take(&mut packs.units);
            index.slots = index.units.len() as u64 * shape.unit_pages();
        }
        Ok(Self {
            file,
            form,
            shape,
            trailer,
            state,
            identity,
            index,
            packs,
            nth: nth(),
            path: None,
        })
    }

    /// Wraps packs without a save. `file` is any file of their store.
    pub(crate) fn of_packs(file: ImageFile, shape: Shape, mut packs: Packs) -> Self {
        let none = Part { offset: 0, len: 0, checksum: 0 };
        let trailer = Trailer { first: none, index: none, file_len: 0, hash: 0 };
        let index = Index { slots: 0, units: std::mem::take(&mut packs.units), blocks: Vec::new() };
        let form = Form::Save;
        let state = State::default();
        Self {
            file,
            form,
            shape,
            trailer,
            state,
            identity: 0,
            index,
            packs,
            nth: nth(),
            path: None,
        }
    }

    /// Page size and unit size.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Device state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Units and blocks.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Length of the file, bytes.
    pub fn file_len(&self) -> u64 {
        self.trailer.file_len
    }

    /// Guest RAM, bytes.
    pub fn ram_bytes(&self) -> u64 {
        let pages: u64 = self.index.blocks.iter().map(|block| block.pages).sum();
        pages * self.shape.page_size() as u64
    }

    /// Identifies the saved VM: the hash over the file, as the trailer of an image states it, or
    /// the identity of a save. Two images with one identity hold the same VM.
    pub fn identity(&self) -> u128 {
        self.identity
    }

    /// The packs that hold the pages of a save; none for an image in one file.
    pub fn pack_refs(&self) -> Vec<PackRef> {
        self.packs.refs()
    }

    /// Whether the pages lie in the packs of a store.
    pub fn is_save(&self) -> bool {
        self.form == Form::Save
    }

    /// Number of this image among those that the process has opened.
    pub(crate) fn nth(&self) -> u64 {
        self.nth
    }

    pub(crate) fn packs(&self) -> &Packs {
        &self.packs
    }

    pub(crate) fn file(&self) -> &ImageFile {
        &self.file
    }

    /// The file that holds `unit`, and the number of the unit in it.
    pub(crate) fn place(&self, unit: u64, file: u32) -> (&ImageFile, u64, Option<&OpenPack>) {
        match self.packs.packs.get(file as usize) {
            Some(pack) => (&pack.file, unit - pack.first, Some(pack)),
            None => (&self.file, unit, None),
        }
    }

    /// Lists a read of this image until it is dropped. Another host's images have no path here:
    /// whoever reads them limits the wait.
    pub(crate) fn listed(&self, part: ReadPart) -> Option<Listed> {
        self.path.as_ref().map(|path| Listed::new(path, part))
    }

    /// The base pages of a unit that holds differences.
    pub(crate) fn bases(&self, unit: u64) -> Option<&Option<Box<[Base]>>> {
        // An image in one file has no base pages, so there is no look-up.
        if self.packs.differences.is_empty() {
            return None;
        }
        self.packs.differences.get(&unit)
    }

    pub(crate) fn trailer(&self) -> &Trailer {
        &self.trailer
    }
}

/// Whether `path` names another file than `file`.
fn is_replaced(file: &File, path: &Path) -> bool {
    disk::refresh(parent_of(path));
    let (Ok(open), Ok(named)) = (file.metadata(), disk::named(path)) else { return false };
    (open.dev(), open.ino()) != named
}

fn nth() -> u64 {
    // Relaxed: only the number counts.
    OPENED.fetch_add(1, Ordering::Relaxed)
}
