//! Programs that could not give the kernel's NBD client connections again.

use super::path;
use std::fs::{self, File};
use std::io;
use std::path::Path;

/// Refuses a program whose server has not announced (`names_disk`) that it gives the kernel's NBD
/// client connections by the disk's name, if `is_named` finds that the attached `disk` has one. The
/// kernel would take no connection of that server, and fail the disk's reads after
/// [`PATIENCE`](swap::nbd::PATIENCE).
///
/// # Errors
/// The program is refused, or it is unknown whether the disk has a name. The present server
/// continues.
pub(super) fn check(
    disk: Option<&Path>,
    names_disk: bool,
    program: &File,
    is_named: impl FnOnce(&Path) -> io::Result<bool>,
) -> io::Result<()> {
    let Some(disk) = disk.filter(|_| !names_disk) else { return Ok(()) };
    if !is_named(disk)? {
        return Ok(());
    }
    let program = fs::read_link(path(program));
    let program = program.map_or("the program".into(), |path| path.display().to_string());
    Err(io::Error::other(format!(
        "{program} is too old for {}: its server does not announce that it gives the kernel the \
         disk's name, without which the kernel takes no connection of it; upgrade to a later \
         version, or end the device (SIGTERM, which runs swapoff and detaches the disk) and serve \
         it with that program",
        disk.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the disk's contents were lost 600 s after an upgrade to an earlier version.
    #[test]
    fn a_named_disk_is_not_handed_to_a_program_that_does_not_announce_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("platen-of-before");
        let program = File::create(&place).unwrap();
        let disk = Path::new("/dev/nbd3");
        let asked = |names_disk, named: io::Result<bool>| {
            check(Some(disk), names_disk, &program, |asked| {
                assert_eq!(asked, disk);
                named
            })
        };
        let refused = asked(false, Ok(true)).unwrap_err().to_string();
        let said = format!("{} is too old for /dev/nbd3: ", place.display());
        assert!(refused.starts_with(&said) && refused.contains("SIGTERM"), "{refused}");
        let unknown = asked(false, Err(io::Error::other("no answer"))).unwrap_err();
        assert_eq!(unknown.to_string(), "no answer");
        // A disk that an earlier version has attached, or on an earlier kernel, has no name.
        asked(false, Ok(false)).unwrap();
        asked(true, Ok(true)).unwrap();
        // A ublk disk, or a device for NBD clients alone.
        check(None, false, &program, |_| panic!("no disk to ask for")).unwrap();
    }
}
