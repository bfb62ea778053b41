//! Parses the file header and the configuration section.

use std::io::Read;

use crate::source::{refused, unknown, Source};
use crate::RecordError;

/// Maximum length of a machine type; QEMU's have about 20 bytes.
const MAX_MACHINE: u32 = 256;
/// Maximum number of capabilities; QEMU has under 40.
const MAX_CAPABILITIES: u32 = 256;
/// Maximum number of subsections; QEMU has three.
const MAX_SUBSECTIONS: usize = 16;

/// Header and configuration.
pub(crate) struct Configuration {
    /// Page size of the guest in bytes.
    pub(crate) page_size: usize,
    /// The bytes with which a stream to another QEMU begins. They omit the capabilities subsection,
    /// which describes only this save.
    pub(crate) kept: Vec<u8>,
    /// Whether the pages of RAM lie at fixed places of the file.
    pub(crate) mapped_ram: bool,
}

/// Reads header and configuration.
pub(crate) fn read<R: Read, E>(source: &mut Source<R>) -> Result<Configuration, RecordError<E>> {
    let head: [u8; 8] = source.array()?;
    if head != *b"QEVM\0\0\0\x03" {
        return Err(unknown(0, "it does not begin as a migration stream of version 3 does"));
    }
    let mut kept = head.to_vec();
    let (mut page_size, mut mapped_ram) = (4096, false);
    if source.peek(1)? != [0x07] {
        return Err(refused(
            "its QEMU sends no configuration section (migration.send-configuration=off): leave that option out",
        ));
    }
    source.during = "in its configuration";
    kept.push(source.u8()?);
    let len = source.u32()?;
    if len > MAX_MACHINE {
        return Err(unknown(source.at(), format!("a machine type of {len} bytes")));
    }
    kept.extend(len.to_be_bytes());
    kept.extend(source.take(len as usize)?);
    for _ in 0..MAX_SUBSECTIONS {
        if source.peek(1)? != [0x05] {
            return Ok(Configuration { page_size, kept, mapped_ram });
        }
        let mut subsection = vec![source.u8()?];
        let at = source.at();
        let name = source.name()?;
        let version = source.u32()?;
        subsection.push(u8::try_from(name.len()).expect("read from one byte"));
        subsection.extend(name.as_bytes());
        subsection.extend(version.to_be_bytes());
        match (name.as_str(), version) {
            ("configuration/target-page-bits", 1) => {
                let bits = source.u32()?;
                let size = 1_usize.checked_shl(bits).filter(|size| (4096..=65536).contains(size));
                page_size =
                    size.ok_or_else(|| refused(format!("the guest has pages of 2^{bits} bytes")))?;
                subsection.extend(bits.to_be_bytes());
            }
            ("configuration/capabilities", 1) => {
                mapped_ram |= capabilities(source)?;
                continue;
            }
            ("configuration/uuid", 1) => subsection.extend(source.take(16)?),
            _ => {
                let what = format!("the configuration has '{}'", name.escape_default());
                return Err(unknown(at, what));
            }
        }
        kept.extend(subsection);
    }
    Err(unknown(source.at(), "too many subsections of the configuration"))
}

/// Reads the capabilities; returns whether mapped-ram is one of them.
fn capabilities<R: Read, E>(source: &mut Source<R>) -> Result<bool, RecordError<E>> {
    let count = source.u32()?;
    if count > MAX_CAPABILITIES {
        return Err(unknown(source.at(), format!("{count} capabilities")));
    }
    let mut mapped_ram = false;
    for _ in 0..count {
        match source.name()?.as_str() {
            "x-ignore-shared" => {
                return Err(refused("x-ignore-shared leaves shared RAM out: turn it off"));
            }
            "mapped-ram" if !source.can_jump() => return Err(RecordError::NoFile),
            "mapped-ram" => mapped_ram = true,
            _ => {}
        }
    }
    Ok(mapped_ram)
}
