//! Hot sets: the pages that guests requested in earlier restores of an image.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use codec::checksum;
use rustix::fs::OFlags;
use varint::{unzigzag, zigzag};

use crate::file::{is_at, parent_of, NewFile};
use crate::index::{put, Cursor};
use crate::part::read_at;
use crate::reads::ReadPart;
use crate::{Damage, Image, ImageFile, WriteError};

const MAGIC: &[u8; 8] = b"PLATENHT";
const VERSION: u32 = 1;
/// Length of the part before the entries.
const HEAD: usize = 32;
/// Length of the checksum at the end.
const TAIL: usize = 8;
/// Maximum length of the file. Each entry has three varints of at most 10 bytes.
const MAX_LEN: usize = 512 << 10;
const _: () = assert!(HEAD + 3 + 30 * HotSet::MAX + TAIL <= MAX_LEN);

/// A page that a guest requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotPage {
    /// Time of the request after the device state was sent, milliseconds.
    pub at: u32,
    /// Number of the RAM block in the index.
    pub block: usize,
    /// Number of the page in the block.
    pub page: u64,
}

/// The pages that guests requested in earlier restores of one image, in the order of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HotSet {
    pages: Vec<HotPage>,
}

impl HotSet {
    /// Maximum number of pages.
    pub const MAX: usize = 16384;

    /// Path of the hot set of the image at `image`.
    pub fn path(image: &Path) -> PathBuf {
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        parent_of(image).join(file_name(&name))
    }

    /// Reads the hot set of `image`, which lies at `path`. Without a file the set is empty.
    ///
    /// # Errors
    ///
    /// The file is damaged, or of another image; errors of the file system.
    pub fn read(path: &Path, image: &Image) -> Result<Self, Damage> {
        let _listed = image.listed(ReadPart::HotSet);
        let io = |error| Damage::io("the hot set", error);
        // The open does not block: another file of this name may be a pipe.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag of open");
        let file = match File::options().read(true).custom_flags(flags).open(Self::path(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            file => file.map_err(io)?,
        };
        if !file.metadata().map_err(io)?.is_file() {
            return Err(bad("it is no regular file"));
        }
        let mut bytes = Vec::new();
        file.take(MAX_LEN as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
        Self::from_bytes(&bytes, image)
    }

    /// Reads the hot set of `image` from a file of another host.
    ///
    /// # Errors
    ///
    /// The file is damaged, or of another image; errors of the other host.
    pub fn read_remote(file: &ImageFile, image: &Image) -> Result<Self, Damage> {
        let len = file.len().map_err(|error| Damage::io("the hot set", error))?;
        // One byte more than is allowed is refused below.
        let mut bytes =
            vec![0; usize::try_from(len).map_or(MAX_LEN + 1, |len| len.min(MAX_LEN + 1))];
        read_at(file, &mut bytes, 0, "the hot set")?;
        Self::from_bytes(&bytes, image)
    }

    /// Writes the hot set of `image`, which lies at `path`, in the place of the earlier one.
    ///
    /// # Errors
    ///
    /// Another image lies at `path`; errors of the file system.
    pub fn write(&self, path: &Path, image: &Image) -> Result<(), WriteError> {
        let to = Self::path(path);
        let error = |source| WriteError::Io { what: "write", path: to.clone(), source };
        let ImageFile::Local(file) = image.file() else {
            let text = "its image is on another host";
            return Err(error(io::Error::new(io::ErrorKind::Unsupported, text)));
        };
        if !is_at(file, path) {
            let text = "its image was removed or replaced";
            return Err(error(io::Error::new(io::ErrorKind::NotFound, text)));
        }
        let name = to.file_name().unwrap_or_default().to_string_lossy();
        let new = NewFile::create_in(parent_of(path), &name).map_err(error)?;
        new.write(&self.to_bytes(image.identity())).map_err(error)?;
        match new.take_access(file) {
            // The set stays this user's. Other users restore without it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => new.sync(),
            set => set,
        }
        .map_err(error)?;
        new.replace(&to).map_err(error)
    }

    /// The pages, in the order of time.
    pub fn pages(&self) -> &[HotPage] {
        &self.pages
    }

    /// Adds the requests of a restore. Of all pages, the earliest [`HotSet::MAX`] stay. Returns
    /// whether the set has changed.
    pub fn add(&mut self, requests: &[HotPage]) -> bool {
        let before = self.pages.clone();
        self.pages.extend_from_slice(requests);
        // The sort is stable: of equal times, the earlier set's come first.
        self.pages.sort_by_key(|page| page.at);
        let mut seen = HashSet::new();
        self.pages.retain(|page| seen.insert((page.block, page.page)));
        self.pages.truncate(Self::MAX);
        self.pages != before
    }

    fn to_bytes(&self, identity: u128) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_be_bytes());
        out.extend([0; 4]);
        out.extend(identity.to_be_bytes());
        put(&mut out, self.pages.len() as u64);
        let (mut at, mut expected) = (0, 0_u64);
        for page in &self.pages {
            put(&mut out, u64::from(page.at - at));
            put(&mut out, page.block as u64);
            put(&mut out, zigzag(page.page.wrapping_sub(expected).cast_signed()));
            (at, expected) = (page.at, page.page + 1);
        }
        out.extend(checksum(&out).to_be_bytes());
        out
    }

    fn from_bytes(bytes: &[u8], image: &Image) -> Result<Self, Damage> {
        if bytes.len() > MAX_LEN {
            return Err(bad("it has more than 524288 bytes"));
        }
        let Some((bytes, sum)) = bytes.split_last_chunk::<TAIL>().filter(|(b, _)| b.len() > HEAD)
        else {
            return Err(bad("it is cut off"));
        };
        if &bytes[..8] != MAGIC {
            return Err(bad("it does not begin with PLATENHT"));
        }
        if checksum(bytes) != u64::from_be_bytes(*sum) {
            return Err(bad("its checksum is wrong"));
        }
        if bytes[8..16] != (u64::from(VERSION) << 32).to_be_bytes() {
            return Err(bad("it is not of version 1"));
        }
        if bytes[16..HEAD] != image.identity().to_be_bytes() {
            return Err(bad("it is of another image"));
        }
        let mut cursor = Cursor::new(&bytes[HEAD..]);
        Self::entries(&mut cursor, image).ok_or_else(|| bad("an entry is not what a hot set has"))
    }

    /// Reads the entries up to the end of the bytes; `None` if one is not of the documented form.
    fn entries(cursor: &mut Cursor<'_>, image: &Image) -> Option<Self> {
        let count = usize::try_from(cursor.number("").ok()?).ok()?;
        if count > Self::MAX {
            return None;
        }
        let blocks = &image.index().blocks;
        let (mut at, mut expected, mut seen) = (0_u32, 0_u64, HashSet::new());
        let mut pages = Vec::with_capacity(count);
        for _ in 0..count {
            at = at.checked_add(u32::try_from(cursor.number("").ok()?).ok()?)?;
            let block = usize::try_from(cursor.number("").ok()?).ok()?;
            let page = expected.wrapping_add_signed(unzigzag(cursor.number("").ok()?));
            if page >= blocks.get(block)?.pages || !seen.insert((block, page)) {
                return None;
            }
            expected = page + 1;
            pages.push(HotPage { at, block, page });
        }
        cursor.end().ok()?;
        Some(Self { pages })
    }
}

/// Name of the hot set of the image with the name `image`.
pub(crate) fn file_name(image: &str) -> String {
    format!(".{image}{SUFFIX}")
}

/// The name of the image to which the hot set `name` belongs; `None` if `name` is no hot set's.
pub(crate) fn image_name(name: &str) -> Option<&str> {
    name.strip_prefix('.')?.strip_suffix(SUFFIX)
}

const SUFFIX: &str = ".hot";

fn bad(what: &'static str) -> Damage {
    Damage::HotSet { what }
}
