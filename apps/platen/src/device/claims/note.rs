//! The note in the lock of a device's name: the owners of the ublk disks that the device's
//! processes make. If all of them are killed, the disk stays, and the next device of this name
//! removes it.

use crate::say::say;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;
use ublk::{ControlError, Owner};

const WORD: &str = "ublk-owner ";

/// The most owners that a note has: more than one if a disk could not be removed.
const MOST: usize = 16;

/// How long the driver may take to tell about a disk. A note that stays in vain does no harm.
const ANSWER: Duration = Duration::from_secs(5);

/// The length of the longest note.
const LENGTH: usize = MOST * 24;

/// Removes the disks of the noted owners, whose processes are gone since their lock is, and notes
/// `owner`, if there will be a disk.
///
/// # Errors
///
/// The note cannot be written.
pub(super) fn succeed(lock: &OwnedFd, owner: Option<Owner>) -> io::Result<()> {
    succeed_with(lock, owner, |former| ublk::abandon(None, former, Duration::from_secs(30)))
}

fn succeed_with(
    lock: &OwnedFd,
    owner: Option<Owner>,
    mut abandon: impl FnMut(Owner) -> Result<Vec<u32>, ControlError>,
) -> io::Result<()> {
    let file = File::from(lock.as_fd().try_clone_to_owned()?);
    let mut owners = read(&file);
    owners.retain(|&number| match abandon(noted(number)) {
        Ok(gone) => {
            for disk in gone.into_iter().map(ublk::disk) {
                let disk = disk.display();
                say(&format!("{disk}, which a former device of this name had left, is gone"));
            }
            false
        }
        Err(error) => {
            say(&format!(
                "a disk of a former device may be left: {:#}",
                anyhow::Error::from(error)
            ));
            true
        }
    });
    owners.truncate(MOST - 1);
    owners.extend(owner.map(|owner| owner.number));
    write(&file, &owners)
}

/// Whether the next device of this name needs the note in a lock's file: a noted owner has a disk,
/// or the driver does not tell. `remains` is [`remains`], which removes no disk: the device that
/// this process has failed to adopt may have its disk in use.
pub(super) fn is_needed(
    lock: impl AsFd,
    path: &Path,
    remains: impl FnOnce(&[Owner]) -> Result<bool, ControlError>,
) -> bool {
    let owners: Vec<_> = read(lock).into_iter().map(noted).collect();
    let what = match remains(&owners) {
        Ok(false) => return false,
        Ok(true) => "is left".to_owned(),
        Err(error) => format!("may be left ({:#})", anyhow::Error::from(error)),
    };
    say(&format!(
        "a ublk disk of this device {what}: {} stays, so that `platen device serve` with the same \
         name and folder removes the disk",
        path.display()
    ));
    true
}

/// Whether one of these owners still has a disk.
pub(super) fn remains(owners: &[Owner]) -> Result<bool, ControlError> {
    ublk::remains(owners, ANSWER)
}

fn noted(number: u32) -> Owner {
    Owner { number, unmarked: false }
}

fn write(file: &File, owners: &[u32]) -> io::Result<()> {
    let text: String = owners.iter().map(|number| format!("{WORD}{number}\n")).collect();
    file.set_len(0)?;
    file.write_all_at(text.as_bytes(), 0)
}

/// The numbers of the noted owners. A note that cannot be read has none.
fn read(lock: impl AsFd) -> Vec<u32> {
    let mut bytes = [0; LENGTH];
    let got = rustix::io::pread(lock, &mut bytes, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..got]);
    // The last line may be cut off.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().filter_map(|line| line.strip_prefix(WORD)?.parse().ok()).take(MOST).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Writes a note of these owners.
    pub(in super::super) fn write(lock: impl Into<File>, owners: &[u32]) {
        super::write(&lock.into(), owners).unwrap();
    }

    fn refused() -> ControlError {
        ControlError::Silent { id: 3, action: "stopping", seconds: 30 }
    }

    /// Server and supervisor are killed: nobody has the number of the disk, nor removes it.
    #[test]
    fn a_device_removes_the_disk_of_its_killed_namesake_and_no_other() {
        let lock = OwnedFd::from(tempfile::tempfile().unwrap());
        let numbers = || read(&lock);
        let owner = |number| Owner { number, unmarked: false };
        let with = |own: Option<u32>, fails: bool| {
            let mut asked = Vec::new();
            let abandon = |former: Owner| {
                asked.push(former);
                if fails {
                    Err(refused())
                } else {
                    Ok(vec![3])
                }
            };
            succeed_with(&lock, own.map(owner), abandon).unwrap();
            asked
        };
        assert!(with(Some(u32::MAX), false).is_empty());
        assert_eq!(with(Some(7), false), [owner(u32::MAX)]);
        // Its disk could not be removed: the next device tries again.
        assert_eq!(with(Some(8), true), [owner(7)]);
        assert_eq!(numbers(), [7, 8]);
        assert_eq!(with(None, false), [owner(7), owner(8)]);
        assert!(numbers().is_empty());
        for number in 0..100 {
            with(Some(number), true);
        }
        assert_eq!(numbers().len(), MOST);
        let file = File::from(lock.try_clone().unwrap());
        for text in ["", "ublk-owner 7", "ublk-owner x\nother 8\nublk-owner -1\n"] {
            file.set_len(0).unwrap();
            file.write_all_at(text.as_bytes(), 0).unwrap();
            assert!(numbers().is_empty(), "{text}");
        }
    }
}
