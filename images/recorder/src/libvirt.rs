//! The head of the file that `virsh save` writes. The VM's migration stream follows it: as it is,
//! compressed, or as a mapped-ram file, whose offsets are those of the whole file.
//!
//! ```text
//!  magic, 16 bytes │ 5 numbers of 32 bits │ 56 unused bytes │ domain, padded │ migration stream
//! ```
//!
//! The numbers are version (2), length of the domain's description, whether the VM ran, format of
//! the stream, and an offset in the description. They have the byte order of the host that wrote
//! them.

use std::io::{self, Read};

/// Bytes before the domain's description.
const HEAD: usize = 92;
/// Length of the magic.
const MAGIC: usize = 16;
/// The longest description that is read; libvirt's own limit is below.
const MAX_DESCRIPTION: u32 = 64 << 20;

/// The form of the migration stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveFormat {
    /// A plain stream.
    Raw,
    /// gzip members.
    Gzip,
    /// zstd frames.
    Zstd,
    /// QEMU's mapped-ram file.
    Sparse,
}

/// The head of libvirt's save file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaveHead {
    /// The domain's description: XML.
    pub description: Vec<u8>,
    /// Whether the VM ran when it was saved.
    pub was_running: bool,
    /// The form of the stream that follows.
    pub format: SaveFormat,
}

/// The kind of file, by its first bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The head of libvirt's save file. The reader is at the migration stream.
    Libvirt(SaveHead),
    /// Anything else: the bytes that were read.
    Other(Vec<u8>),
}

/// Why libvirt's save file cannot be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveHeadError {
    /// The file cannot be read, or ends too early.
    #[error("cannot read the head of libvirt's save file")]
    Io(#[from] io::Error),
    /// `virsh save` was interrupted.
    #[error("libvirt has not finished this save: save the VM again")]
    Partial,
    /// platen does not know this version.
    #[error("libvirt's save file has version {0}, and platen reads version 2")]
    Version(u32),
    /// The description is longer than the limit.
    #[error("libvirt's save file has a description of {0} bytes, limit {MAX_DESCRIPTION}")]
    Description(u32),
    /// platen does not read this compression.
    #[error(
        "libvirt has compressed this save with {0}: restore the VM and save it as raw, \
         sparse, gzip or zstd (save_image_format in qemu.conf)"
    )]
    Format(String),
}

/// Reads the head of libvirt's save file, if `reader` begins with one.
///
/// # Errors
///
/// [`SaveHeadError`]. If `reader` begins with anything else, only the errors of reading.
pub fn beginning(reader: &mut impl Read) -> Result<Beginning, SaveHeadError> {
    let mut head = Vec::with_capacity(HEAD);
    reader.by_ref().take(MAGIC as u64).read_to_end(&mut head)?;
    match &head[..] {
        b"LibvirtQemudSave" => {}
        b"LibvirtQemudPart" => return Err(SaveHeadError::Partial),
        _ => return Ok(Beginning::Other(head)),
    }
    head.resize(HEAD, 0);
    reader.read_exact(&mut head[MAGIC..])?;
    let raw = |nth: usize| -> [u8; 4] {
        let at = MAGIC + 4 * nth;
        head[at..at + 4].try_into().expect("4 bytes")
    };
    let is_big = u32::from_be_bytes(raw(0)) == 2;
    let number =
        |nth| if is_big { u32::from_be_bytes(raw(nth)) } else { u32::from_le_bytes(raw(nth)) };
    let (version, description, was_running, format) = (number(0), number(1), number(2), number(3));
    if version != 2 {
        return Err(SaveHeadError::Version(version));
    }
    if description > MAX_DESCRIPTION {
        return Err(SaveHeadError::Description(description));
    }
    let format = match format {
        0 => SaveFormat::Raw,
        1 => SaveFormat::Gzip,
        5 => SaveFormat::Zstd,
        6 => SaveFormat::Sparse,
        other => return Err(SaveHeadError::Format(name_of(other))),
    };
    let mut text = Vec::new();
    if reader.by_ref().take(description.into()).read_to_end(&mut text)? < description as usize {
        return Err(SaveHeadError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    // Padding follows, or a cookie of libvirt's own.
    text.truncate(text.iter().position(|&byte| byte == 0).unwrap_or(text.len()));
    let was_running = was_running != 0;
    Ok(Beginning::Libvirt(SaveHead { description: text, was_running, format }))
}

/// The head of a save file whose stream is not compressed, for the domain that `description` (XML)
/// describes.
///
/// # Errors
///
/// The description is longer than 64 MiB.
pub fn head(description: &[u8], was_running: bool) -> Result<Vec<u8>, SaveHeadError> {
    // libvirt reads the description up to a zero byte. Whole blocks suit reads past the page cache.
    let end = (HEAD + description.len() + 1).next_multiple_of(4096);
    let len = u32::try_from(end - HEAD).unwrap_or(u32::MAX);
    if len > MAX_DESCRIPTION {
        return Err(SaveHeadError::Description(len));
    }
    let mut head = b"LibvirtQemudSave".to_vec();
    for number in [2, len, was_running.into(), 0, 0] {
        head.extend(number.to_ne_bytes());
    }
    head.resize(HEAD, 0);
    head.extend_from_slice(description);
    head.resize(end, 0);
    Ok(head)
}

/// libvirt's name of a format that platen does not read.
fn name_of(format: u32) -> String {
    match format {
        2 => "bzip2".into(),
        3 => "xz".into(),
        4 => "lzop".into(),
        other => format!("format {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A head with these numbers, a description, and one byte of a stream.
    fn file(numbers: [u32; 4], to_bytes: fn(u32) -> [u8; 4]) -> Vec<u8> {
        let mut file = b"LibvirtQemudSave".to_vec();
        numbers.into_iter().chain([7]).for_each(|number| file.extend(to_bytes(number)));
        file.resize(HEAD, 0);
        file.extend(vec![b'x'; numbers[1].min(9) as usize]);
        file.push(b'Q');
        file
    }

    fn read(file: &[u8]) -> (Result<Beginning, SaveHeadError>, Vec<u8>) {
        let mut rest = file;
        (beginning(&mut rest), rest.to_vec())
    }

    #[test]
    fn the_stream_begins_behind_the_description() {
        for (format, is) in [
            (0, SaveFormat::Raw),
            (1, SaveFormat::Gzip),
            (5, SaveFormat::Zstd),
            (6, SaveFormat::Sparse),
        ] {
            for to_bytes in [u32::to_le_bytes, u32::to_be_bytes] {
                for ran in [0, 1] {
                    let (found, rest) = read(&file([2, 9, ran, format], to_bytes));
                    let description = vec![b'x'; 9];
                    let head = SaveHead { description, was_running: ran == 1, format: is };
                    assert_eq!(found.unwrap(), Beginning::Libvirt(head));
                    assert_eq!(rest, b"Q");
                }
            }
        }
    }

    #[test]
    fn a_head_that_is_written_is_read() {
        for was_running in [false, true] {
            let mut file = head(b"<domain/>", was_running).unwrap();
            assert_eq!((file.len(), &file[92..102]), (4096, &b"<domain/>\0"[..]));
            file.push(b'Q');
            let (found, rest) = read(&file);
            let description = b"<domain/>".to_vec();
            let is = SaveHead { description, was_running, format: SaveFormat::Raw };
            assert_eq!((found.unwrap(), &rest[..]), (Beginning::Libvirt(is), &b"Q"[..]));
        }
        let error = head(&vec![b'x'; 64 << 20], true).unwrap_err();
        assert!(error.to_string().contains("limit"), "{error}");
    }

    #[test]
    fn other_files_lose_nothing() {
        for other in [&b"QEVM and more than sixteen bytes"[..], b"QEVM", b""] {
            let (found, rest) = read(other);
            let Ok(Beginning::Other(head)) = found else { panic!("{found:?}") };
            assert_eq!([head, rest].concat(), other);
        }
    }

    #[test]
    fn what_cannot_be_imported_is_named() {
        let said = |file: &[u8]| read(file).0.unwrap_err().to_string();
        let known = |numbers| file(numbers, u32::to_le_bytes);
        assert!(said(b"LibvirtQemudPart and more").contains("not finished"));
        assert!(said(&known([3, 9, 0, 0])).contains("version 3"));
        assert!(said(&known([2, 9, 0, 3])).contains("with xz"));
        assert!(said(&known([2, 9, 0, 77])).contains("format 77"));
        assert!(said(&known([2, u32::MAX, 0, 0])).contains("4294967295 bytes"));
        // The description is cut off.
        assert!(said(&known([2, 50, 0, 0])).contains("cannot read"));
        assert!(said(b"LibvirtQemudSave\x02").contains("cannot read"));
    }
}
