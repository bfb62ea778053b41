//! Opens an image and reads its units.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use codec::{checksum, Decoder, UnitHeader};

use crate::layout::{shape_of, Part, Trailer, HEADER_LEN, TRAILER_LEN};
use crate::{Damage, Index, Shape, State};

/// An open image whose header, trailer, state and index are verified; rule I6.
#[derive(Debug)]
pub struct Image {
    file: File,
    shape: Shape,
    trailer: Trailer,
    state: State,
    index: Index,
}

impl Image {
    /// Opens the image at `path`.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the defect of the file.
    pub fn open(path: &Path) -> Result<Self, Damage> {
        Self::over(File::open(path).map_err(|error| Damage::io("the image", error))?)
    }

    /// Reads an open file.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the defect of the file.
    pub fn over(file: File) -> Result<Self, Damage> {
        let len = file.metadata().map_err(|error| Damage::io("the image's length", error))?.len();
        let mut head = [0; HEADER_LEN];
        let begin = usize::try_from(len).map_or(HEADER_LEN, |len| len.min(HEADER_LEN));
        read_at(&file, &mut head[..begin], 0, "the header")?;
        // A short file that is no image is reported as no image, not as cut off.
        if begin < HEADER_LEN && !head.starts_with(b"PLATENVM") {
            return Err(Damage::NoImage);
        }
        if len < HEADER_LEN as u64 {
            return Err(Damage::Short { len });
        }
        let shape = shape_of(&head)?;
        if len < (HEADER_LEN + TRAILER_LEN) as u64 {
            return Err(Damage::Short { len });
        }
        let mut tail = [0; TRAILER_LEN];
        read_at(&file, &mut tail, len - TRAILER_LEN as u64, "the trailer")?;
        let trailer = Trailer::from_bytes(&tail, len)?;
        let state = part(&file, trailer.state, "the device state")?
            .ok_or(Damage::State { offset: trailer.state.offset, end: trailer.index.offset - 1 })?;
        let end = len - TRAILER_LEN as u64 - 1;
        let index = part(&file, trailer.index, "the index")?
            .ok_or(Damage::Index { offset: trailer.index.offset, end })?;
        let state = State::from_bytes(&state)?;
        let index = Index::from_bytes(&index, shape, trailer.state.offset)?;
        Ok(Self { file, shape, trailer, state, index })
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

    /// The hash over the file, as its trailer states it. Two images with one hash are copies.
    pub fn hash(&self) -> u128 {
        self.trailer.hash
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn trailer(&self) -> &Trailer {
        &self.trailer
    }
}

/// Reads a part and compares its checksum; `None` on a mismatch.
fn part(file: &File, part: Part, what: &str) -> Result<Option<Vec<u8>>, Damage> {
    // `Trailer::from_bytes` has bounded the length by the part's limit and by the file's length.
    let mut bytes = vec![0; usize::try_from(part.len).unwrap_or(usize::MAX)];
    read_at(file, &mut bytes, part.offset, what)?;
    Ok((checksum(&bytes) == part.checksum).then_some(bytes))
}

pub(crate) fn read_at(file: &File, out: &mut [u8], at: u64, what: &str) -> Result<(), Damage> {
    file.read_exact_at(out, at).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let end = at + out.len() as u64;
            let text = format!("the file ends before byte {end}; was it cut off meanwhile?");
            Damage::io(what, io::Error::new(error.kind(), text))
        }
        _ => Damage::io(format!("{what} at byte {at}"), error),
    })
}

/// Reads and decodes units. Each thread has its own.
pub struct Units {
    decoder: Decoder,
    stored: Vec<u8>,
}

impl Units {
    /// A reader without buffers; they are allocated when needed.
    ///
    /// # Panics
    ///
    /// If memory for the codecs' contexts cannot be allocated.
    pub fn new() -> Self {
        Self { decoder: Decoder::new(), stored: Vec::new() }
    }

    /// Reads the stored bytes of unit `unit` and compares their checksum; returns their offset in
    /// the file.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the unit.
    ///
    /// # Panics
    ///
    /// If there is no such unit.
    pub fn check(&mut self, image: &Image, unit: u64) -> Result<u64, Damage> {
        let entry = image.index.units[usize::try_from(unit).expect("a number below the count")];
        self.stored.resize(entry.len as usize, 0);
        let (offset, what) = (entry.offset, format_args!("unit {unit}"));
        if image.file.read_exact_at(&mut self.stored, offset).is_err() {
            // Read again for the error's text. Building that text here keeps it off the path that
            // succeeds.
            read_at(&image.file, &mut self.stored, offset, &what.to_string())?;
        }
        if checksum(&self.stored) != entry.checksum {
            let end = offset + u64::from(entry.len) - 1;
            return Err(Damage::Unit { unit, offset, end });
        }
        Ok(offset)
    }

    /// Decodes unit `unit` to the front of `out` and returns the number of plain bytes. Rule I7.
    ///
    /// # Errors
    ///
    /// [`Damage`] names the unit and its defect. The bytes in `out` are then unspecified.
    ///
    /// # Panics
    ///
    /// If there is no such unit, or `out` is shorter than a unit.
    pub fn read(&mut self, image: &Image, unit: u64, out: &mut [u8]) -> Result<usize, Damage> {
        let offset = self.check(image, unit)?;
        let bad = |error| Damage::UnitDecode { unit, offset, error };
        let header = UnitHeader::from_bytes(&self.stored).map_err(|error| bad(error.into()))?;
        let expected = image.index.unit_pages(image.shape, unit) * image.shape.page_size() as u64;
        if u64::from(header.plain_len) != expected {
            let stated = u64::from(header.plain_len);
            return Err(Damage::UnitLength { unit, offset, stated, expected });
        }
        let out = &mut out[..header.plain_len as usize];
        self.decoder.decode(&header, &self.stored[UnitHeader::LEN..], out).map_err(bad)?;
        Ok(out.len())
    }
}

impl Default for Units {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Units {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Units")
    }
}
