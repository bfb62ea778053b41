//! A save: the file of a store that names a saved VM, its device state, and the place of each page
//! in the packs.

use std::fs::File;
use std::path::Path;

use crate::index::{put_blocks, read_blocks, Block, Cursor};
use crate::layout::{image_header, Form, Trailer, HEADER_LEN, MAX_INDEX, TRAILER_LEN};
use crate::pack::{put_refs, read_refs, PackRef};
use crate::part::{part, read_at};
use crate::{Damage, ImageFile, Index, Shape, State};

/// The index of a save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SaveIndex {
    /// Identifies the saved VM. A save that is rewritten keeps its identity.
    pub(crate) identity: u128,
    /// The packs that hold the save's pages, and the base pages of those stored as differences.
    pub(crate) packs: Vec<PackRef>,
    pub(crate) blocks: Vec<Block>,
}

impl SaveIndex {
    /// Encodes the index; `None` if it exceeds the limits.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut out = self.identity.to_be_bytes().to_vec();
        put_refs(&mut out, &self.packs);
        put_blocks(&mut out, &self.blocks)?;
        (out.len() as u64 <= MAX_INDEX).then_some(out)
    }

    fn from_bytes(bytes: &[u8], shape: Shape) -> Result<Self, Damage> {
        let mut cursor = Cursor::new(bytes);
        let identity = u128::from_be_bytes(cursor.array("no identity")?);
        let (packs, slots) = read_refs(&mut cursor, shape)?;
        let blocks = read_blocks(&mut cursor, shape, slots)?;
        Ok(Self { identity, packs, blocks })
    }
}

/// The verified parts of an image or of a save, without its packs.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) form: Form,
    pub(crate) shape: Shape,
    pub(crate) trailer: Trailer,
    pub(crate) state: State,
    /// Identifies the saved VM: the hash over an image's file, or the identity of a save.
    pub(crate) identity: u128,
    /// Units and blocks. A save's units lie in its packs.
    pub(crate) index: Index,
    pub(crate) packs: Vec<PackRef>,
}

impl Parts {
    /// Reads the parts of the file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Self, Damage> {
        let file = File::open(path).map_err(|error| Damage::io("the save", error))?;
        Self::read(&file.into())
    }

    /// Reads the parts of an open file; rule I6.
    pub(crate) fn read(file: &ImageFile) -> Result<Self, Damage> {
        let len = file.len().map_err(|error| Damage::io("the image's length", error))?;
        let mut head = [0; HEADER_LEN];
        let begin = usize::try_from(len).map_or(HEADER_LEN, |len| len.min(HEADER_LEN));
        read_at(file, &mut head[..begin], 0, "the header")?;
        // A short file that is no image is reported as no image, not as truncated.
        if begin < HEADER_LEN && !head.starts_with(b"PLATENVM") {
            return Err(Damage::NoImage);
        }
        if len < HEADER_LEN as u64 {
            return Err(Damage::Short { len });
        }
        let (form, shape) = image_header(&head)?;
        if len < (HEADER_LEN + TRAILER_LEN) as u64 {
            return Err(Damage::Short { len });
        }
        let mut tail = [0; TRAILER_LEN];
        read_at(file, &mut tail, len - TRAILER_LEN as u64, "the trailer")?;
        let trailer = Trailer::from_bytes(&tail, len, form)?;
        let state = part(file, trailer.first, "the device state")?
            .ok_or(Damage::State { offset: trailer.first.offset, end: trailer.index.offset - 1 })?;
        let end = len - TRAILER_LEN as u64 - 1;
        let index = part(file, trailer.index, "the index")?
            .ok_or(Damage::Index { offset: trailer.index.offset, end })?;
        let state = State::from_bytes(&state)?;
        let (index, packs, identity) = if form == Form::Save {
            if trailer.first.offset != HEADER_LEN as u64 {
                return Err(Damage::Places);
            }
            let SaveIndex { identity, packs, blocks } = SaveIndex::from_bytes(&index, shape)?;
            (Index { blocks, ..Index::default() }, packs, identity)
        } else {
            let index = Index::from_bytes(&index, shape, trailer.first.offset)?;
            (index, Vec::new(), trailer.hash)
        };
        Ok(Self { form, shape, trailer, state, identity, index, packs })
    }
}
