//! Parses the head and the footer of each section.

use std::io::Read;

use crate::source::{refused, unknown, Source};
use crate::tail::FOOTER;
use crate::RecordError;

/// Reads id, name, instance and version of a section.
pub(crate) fn head<R: Read, E>(
    source: &mut Source<R>,
) -> Result<(u32, String, u32, u32), RecordError<E>> {
    Ok((source.u32()?, source.name()?, source.u32()?, source.u32()?))
}

/// Reads the footer of `section`.
pub(crate) fn footer<R: Read, E>(
    source: &mut Source<R>,
    section: u32,
) -> Result<(), RecordError<E>> {
    let at = source.at();
    if source.peek(1)? != [FOOTER] {
        return Err(refused(
            "its QEMU sends no footers of sections (migration.send-section-footer=off): leave that option out",
        ));
    }
    source.take(1)?;
    let id = source.u32()?;
    if id == section {
        Ok(())
    } else {
        Err(unknown(at, format!("the footer of section {id} behind section {section}")))
    }
}
