//! Header and trailer, the parts of fixed length.

use codec::checksum;

use crate::Damage;

/// Length of the header.
pub const HEADER_LEN: usize = 64;
/// Length of the trailer.
pub const TRAILER_LEN: usize = 96;
/// The format version of an image in one file.
pub const VERSION: u32 = 1;
/// The format version of the files of a store.
pub(crate) const STORE_VERSION: u32 = 2;
/// Minimum number of plain bytes in a full unit.
pub const MIN_UNIT: usize = 64 << 10;
/// Maximum number of plain bytes in a unit.
pub const MAX_UNIT: usize = 512 << 10;

/// Kind of a file with header and trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A whole saved VM.
    Image,
    /// A saved VM whose pages lie in packs.
    Save,
    /// Pages of the saves of a store.
    Pack,
}

impl Form {
    fn magic(self) -> &'static [u8; 8] {
        match self {
            Self::Image | Self::Save => b"PLATENVM",
            Self::Pack => b"PLATENPK",
        }
    }

    fn end_magic(self) -> &'static [u8; 8] {
        match self {
            Self::Image | Self::Save => b"PLATENVE",
            Self::Pack => b"PLATENPE",
        }
    }

    fn version(self) -> u32 {
        match self {
            Self::Image => VERSION,
            Self::Save | Self::Pack => STORE_VERSION,
        }
    }

    /// Limit of the first part, bytes: the state, or the hashes of a pack's pages.
    fn max_first(self) -> u64 {
        match self {
            Self::Image | Self::Save => MAX_STATE,
            Self::Pack => MAX_INDEX,
        }
    }
}

/// Maximum length of the state, bytes.
pub const MAX_STATE: u64 = 512 << 20;
/// Maximum length of the index.
pub(crate) const MAX_INDEX: u64 = 1 << 30;
/// Maximum size of RAM, bytes.
pub(crate) const MAX_RAM: u64 = 16 << 40;
/// Maximum number of packs in a table. A writer shares at most 200, and those of its own hold
/// [`MAX_SLOTS`] at most.
pub(crate) const MAX_PACKS: usize = 4096;
/// Maximum number of slots in the packs of a table: those of four times the largest RAM. A save of
/// a VM that writes meanwhile has superseded pages, and not every unit is full.
pub(crate) const MAX_SLOTS: u64 = 4 * MAX_RAM / 4096;
/// Maximum number of RAM blocks.
pub(crate) const MAX_BLOCKS: usize = 4096;

/// The page size and unit size of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    page_size: u32,
    unit_pages: u32,
}

impl Shape {
    /// A shape with pages of `page_size` bytes and units of `unit_bytes` plain bytes.
    ///
    /// # Errors
    ///
    /// [`Damage::Shape`] for sizes outside the format's limits.
    pub fn new(page_size: usize, unit_bytes: usize) -> Result<Self, Damage> {
        let refused = Damage::Shape { page_size: page_size as u64, unit_bytes: unit_bytes as u64 };
        let page = u32::try_from(page_size)
            .ok()
            .filter(|size| size.is_power_of_two() && (4096..=65536).contains(size));
        let (Some(page_size), true) = (page, (MIN_UNIT..=MAX_UNIT).contains(&unit_bytes)) else {
            return Err(refused);
        };
        let unit = u32::try_from(unit_bytes).map_err(|_| refused.clone())?;
        if unit % page_size != 0 {
            return Err(refused);
        }
        Ok(Self { page_size, unit_pages: unit / page_size })
    }

    /// Guest page size, bytes.
    pub fn page_size(&self) -> usize {
        self.page_size as usize
    }

    /// Pages in a full unit.
    pub fn unit_pages(&self) -> u64 {
        u64::from(self.unit_pages)
    }

    /// Plain bytes in a full unit.
    pub fn unit_bytes(&self) -> usize {
        self.page_size as usize * self.unit_pages as usize
    }

    /// Number of units that hold `slots` slots.
    pub fn units(&self, slots: u64) -> u64 {
        slots.div_ceil(self.unit_pages())
    }
}

/// The header of a file of this form and shape.
pub(crate) fn header(form: Form, shape: Shape) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[..8].copy_from_slice(form.magic());
    bytes[8..12].copy_from_slice(&form.version().to_be_bytes());
    bytes[12..16].copy_from_slice(&shape.page_size.to_be_bytes());
    bytes[16..20].copy_from_slice(&shape.unit_pages.to_be_bytes());
    let sum = checksum(&bytes[..HEADER_LEN - 8]);
    bytes[HEADER_LEN - 8..].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// Reads the header of an image or a save.
pub(crate) fn image_header(bytes: &[u8; HEADER_LEN]) -> Result<(Form, Shape), Damage> {
    let form = match be32(bytes, 8) {
        _ if &bytes[..8] != Form::Image.magic() => return Err(Damage::NoImage),
        VERSION => Form::Image,
        STORE_VERSION => Form::Save,
        version => return Err(Damage::Version { version }),
    };
    Ok((form, shape_of(bytes)?))
}

/// Reads the header of a pack.
pub(crate) fn pack_header(bytes: &[u8; HEADER_LEN]) -> Result<Shape, Damage> {
    match be32(bytes, 8) {
        _ if &bytes[..8] != Form::Pack.magic() => Err(Damage::Header),
        STORE_VERSION => shape_of(bytes),
        version => Err(Damage::Version { version }),
    }
}

fn shape_of(bytes: &[u8; HEADER_LEN]) -> Result<Shape, Damage> {
    if checksum(&bytes[..HEADER_LEN - 8]) != be64(bytes, HEADER_LEN - 8) {
        return Err(Damage::Header);
    }
    if bytes[20..HEADER_LEN - 8].iter().any(|&byte| byte != 0) {
        return Err(Damage::Header);
    }
    let (page_size, pages) = (be32(bytes, 12), be32(bytes, 16));
    let unit_bytes = u64::from(page_size) * u64::from(pages);
    let unit = usize::try_from(unit_bytes).unwrap_or(usize::MAX);
    Shape::new(page_size as usize, unit)
}

/// Places of the parts after the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trailer {
    /// The state; in a pack the hashes of its pages.
    pub(crate) first: Part,
    pub(crate) index: Part,
    /// Length of the file.
    pub(crate) file_len: u64,
    /// 128-bit XXH3 of all bytes before the trailer.
    pub(crate) hash: u128,
}

/// Place and checksum of the state or the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) checksum: u64,
}

impl Part {
    /// Offset after its last byte; `None` if that overflows.
    pub(crate) fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }
}

impl Trailer {
    pub(crate) fn to_bytes(self, form: Form) -> [u8; TRAILER_LEN] {
        let mut bytes = [0; TRAILER_LEN];
        bytes[..8].copy_from_slice(form.end_magic());
        bytes[8..12].copy_from_slice(&form.version().to_be_bytes());
        let words = [
            self.first.offset,
            self.first.len,
            self.first.checksum,
            self.index.offset,
            self.index.len,
            self.index.checksum,
            self.file_len,
        ];
        for (at, word) in words.iter().enumerate() {
            bytes[16 + 8 * at..24 + 8 * at].copy_from_slice(&word.to_be_bytes());
        }
        bytes[72..88].copy_from_slice(&self.hash.to_be_bytes());
        let sum = checksum(&bytes[..88]);
        bytes[88..].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    /// Reads the trailer of a file of `file_len` bytes. The returned parts lie in the file, in
    /// order and without gaps, and within the limits.
    pub(crate) fn from_bytes(
        bytes: &[u8; TRAILER_LEN],
        file_len: u64,
        form: Form,
    ) -> Result<Self, Damage> {
        if &bytes[..8] != form.end_magic() {
            return Err(Damage::Unfinished { len: file_len });
        }
        if be32(bytes, 8) != form.version() {
            return Err(Damage::Version { version: be32(bytes, 8) });
        }
        if checksum(&bytes[..88]) != be64(bytes, 88) || be32(bytes, 12) != 0 {
            return Err(Damage::Trailer);
        }
        let part = |at| Part {
            offset: be64(bytes, at),
            len: be64(bytes, at + 8),
            checksum: be64(bytes, at + 16),
        };
        let hash = u128::from(be64(bytes, 72)) << 64 | u128::from(be64(bytes, 80));
        let this = Self { first: part(16), index: part(40), file_len: be64(bytes, 64), hash };
        if this.file_len != file_len {
            return Err(Damage::FileLength { stated: this.file_len, got: file_len });
        }
        let before_trailer = file_len - TRAILER_LEN as u64;
        let sound = this.first.offset >= HEADER_LEN as u64
            && this.first.len <= form.max_first()
            && this.index.len <= MAX_INDEX
            && this.first.end() == Some(this.index.offset)
            && this.index.end() == Some(before_trailer);
        if sound {
            Ok(this)
        } else {
            Err(Damage::Places)
        }
    }
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_and_trailer_are_the_documented_bytes() {
        let shape = Shape::new(4096, 256 << 10).unwrap();
        let bytes = header(Form::Image, shape);
        assert_eq!(&bytes[..24], b"PLATENVM\0\0\0\x01\0\0\x10\0\0\0\0\x40\0\0\0\0");
        assert_eq!(image_header(&bytes), Ok((Form::Image, shape)));
        let part = |offset, len| Part { offset, len, checksum: 7 };
        let trailer =
            Trailer { first: part(64, 10), index: part(74, 20), file_len: 190, hash: 1 << 64 | 2 };
        let bytes = trailer.to_bytes(Form::Image);
        assert_eq!(&bytes[..24], b"PLATENVE\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x40");
        assert_eq!(Trailer::from_bytes(&bytes, 190, Form::Image), Ok(trailer));
        assert_eq!(
            Trailer::from_bytes(&bytes, 191, Form::Image),
            Err(Damage::FileLength { stated: 190, got: 191 })
        );
    }

    #[test]
    fn any_flipped_bit_of_header_or_trailer_is_refused() {
        let whole = header(Form::Image, Shape::new(4096, 64 << 10).unwrap());
        for at in 0..HEADER_LEN * 8 {
            let mut bytes = whole;
            bytes[at / 8] ^= 1 << (at % 8);
            assert!(image_header(&bytes).is_err(), "bit {at} of the header");
        }
        let part = |offset, len| Part { offset, len, checksum: 7 };
        let trailer = Trailer { first: part(64, 10), index: part(74, 20), file_len: 190, hash: 5 };
        for at in 0..TRAILER_LEN * 8 {
            let mut bytes = trailer.to_bytes(Form::Image);
            bytes[at / 8] ^= 1 << (at % 8);
            assert!(
                Trailer::from_bytes(&bytes, 190, Form::Image).is_err(),
                "bit {at} of the trailer"
            );
        }
    }

    #[test]
    fn shapes_have_bounds() {
        for (page, unit) in [(4096, 32 << 10), (4096, 1 << 20), (2048, 64 << 10), (5000, 65536)] {
            assert!(Shape::new(page, unit).is_err(), "{page} {unit}");
        }
        let shape = Shape::new(65536, 128 << 10).unwrap();
        assert_eq!((shape.unit_pages(), shape.units(0), shape.units(3)), (2, 0, 2));
    }
}
