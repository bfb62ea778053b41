//! Reads checked parts of a file.

use std::io;

use codec::checksum;

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
    file.read_exact_at(out, at).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let end = at + out.len() as u64;
            let text = format!("the file ends before byte {end}; was it cut off meanwhile?");
            Damage::io(what, io::Error::new(error.kind(), text))
        }
        _ => Damage::io(format!("{what} at byte {at}"), error),
    })
}
