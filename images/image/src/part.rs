//! Reads checked parts of a file, and short files.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use codec::checksum;
use rustix::fs::OFlags;

use crate::layout::Part;
use crate::{Damage, ImageFile};

/// Reads a part and compares its checksum; `None` on a mismatch.
pub(crate) fn part(file: &ImageFile, part: Part, what: &str) -> Result<Option<Vec<u8>>, Damage> {
    // `Trailer::from_bytes` has bounded the length by the part's limit and by the file's length.
    let mut bytes = vec![0; usize::try_from(part.len).unwrap_or(usize::MAX)];
    read_at(file, &mut bytes, part.offset, what)?;
    Ok((checksum(&bytes) == part.checksum).then_some(bytes))
}

pub(crate) fn read_at(file: &ImageFile, out: &mut [u8], at: u64, what: &str) -> Result<(), Damage> {
    file.read_exact_at(out, at).map_err(|error| unread(error, at, out.len(), what))
}

/// The defect of a part that could not be read.
pub(crate) fn unread(error: io::Error, at: u64, len: usize, what: &str) -> Damage {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let end = at + len as u64;
            let text = format!("the file ends before byte {end}; was it cut off meanwhile?");
            Damage::io(what, io::Error::new(error.kind(), text))
        }
        _ => Damage::io(format!("{what} at byte {at}"), error),
    }
}

/// Reads a file of at most `most` bytes, and one byte more of a longer one. A pipe, which would
/// block, and a device, which may have no end, give no bytes: in a folder that users share, anyone
/// may have made them.
pub(crate) fn short(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag of open");
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let mut bytes = Vec::new();
    if file.metadata()?.is_file() {
        file.take(most as u64 + 1).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}
