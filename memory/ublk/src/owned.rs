//! Devices of ours, by their mark: the number of a deleted device may be another one's the next
//! moment, whose contents must stay.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::control::{Control, ControlError};
use crate::geometry::Info;

/// The owner of a device: a group of servers, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// A number that no other owner has. It is part of the [`mark`](Self::mark).
    pub number: u32,
    /// Whether a device without any mark may be this owner's: an earlier version made such.
    pub unmarked: bool,
}

impl Owner {
    /// The mark of this owner's devices: the driver stores it with the device, and tells it to
    /// everybody.
    pub fn mark(&self) -> u64 {
        u64::from(u32::from_be_bytes(*b"plat")) << 32 | u64::from(self.number)
    }

    pub(crate) fn has(&self, info: &Info) -> bool {
        info.mark == self.mark() || self.unmarked && info.mark == 0
    }

    /// Checks that the device is this owner's.
    pub(crate) fn check(&self, info: &Info) -> Result<(), ControlError> {
        if self.has(info) {
            return Ok(());
        }
        Err(ControlError::Another { id: info.id, mark: info.mark, wanted: self.mark() })
    }
}

/// Deletes the devices of an owner that will get no further server: users of their disks get errors
/// instead of waiting. Leaves alone devices of other owners. Returns the numbers of the deleted.
///
/// A server may have died before it could tell the number of its device, so all devices are looked
/// at. Only the one that is `known` to be the owner's may lack a mark.
///
/// # Errors
///
/// The driver's error.
pub fn abandon(
    known: Option<u32>,
    owner: Owner,
    timeout: Duration,
) -> Result<Vec<u32>, ControlError> {
    let mut ids = numbers(Path::new(DEVICES));
    if let Some(known) = known.filter(|known| !ids.contains(known)) {
        ids.push(known);
    }
    if ids.is_empty() {
        // There may be no driver either.
        return Ok(ids);
    }
    remove_all(&mut Control::open(timeout)?, &ids, known, owner)
}

/// Whether one of these owners has a device. Nothing changes. `timeout` limits the wait for each
/// answer of the driver.
///
/// # Errors
///
/// The driver's error: a device may be one of theirs.
pub fn remains(owners: &[Owner], timeout: Duration) -> Result<bool, ControlError> {
    let ids = if owners.is_empty() { Vec::new() } else { numbers(Path::new(DEVICES)) };
    if ids.is_empty() {
        // There may be no driver either.
        return Ok(false);
    }
    any_remains(&mut Control::open(timeout)?, &ids, owners)
}

fn any_remains(
    driver: &mut impl Removes,
    ids: &[u32],
    owners: &[Owner],
) -> Result<bool, ControlError> {
    let mut failed = None;
    for &id in ids {
        match is_there(driver, id, |info| owners.iter().any(|owner| owner.has(info))) {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(error) if is_withheld(&error) => {}
            // The driver would be waited for at each further device.
            Err(error @ ControlError::Silent { .. }) => return Err(error),
            // Another device may be theirs.
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(false), Err)
}

/// Where the kernel lists the driver's devices.
const DEVICES: &str = "/sys/class/ublk-char";

/// The numbers of the devices in this folder; none if it cannot be read.
fn numbers(folder: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let number =
        |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok();
    entries.filter_map(number).collect()
}

fn remove_all(
    driver: &mut impl Removes,
    ids: &[u32],
    known: Option<u32>,
    owner: Owner,
) -> Result<Vec<u32>, ControlError> {
    let (mut gone, mut failed) = (Vec::new(), None);
    for &id in ids {
        let is_known = known == Some(id);
        let owner = Owner { unmarked: owner.unmarked && is_known, ..owner };
        let ours = |info: &Info| owner.has(info);
        let removed = match is_there(driver, id, ours) {
            Ok(false) => continue,
            Ok(true) => remove(driver, id, ours, || ()),
            Err(error) if !is_known && is_withheld(&error) => continue,
            Err(error) => Err(error),
        };
        match removed {
            Ok(true) => gone.push(id),
            Ok(false) => {}
            // The driver would be waited for at each further device.
            Err(error @ ControlError::Silent { .. }) => return Err(error),
            // Another device may be ours.
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(gone), Err)
}

/// Whether the driver tells nothing about a device, which is no device of ours then: about one with
/// `UBLK_F_UNPRIVILEGED_DEV` it tells only its user.
fn is_withheld(error: &ControlError) -> bool {
    const EPERM: i32 = 1;
    const EACCES: i32 = 13;
    const EINVAL: i32 = 22;
    error.errno().is_some_and(|errno| [EPERM, EACCES, EINVAL].contains(&errno))
}

/// Begins the recovery of a device of this owner. The driver notices a server's death only when the
/// dead server's rings are torn down; until then it returns EBUSY, and this function retries. The
/// number may become another device's meanwhile.
///
/// # Errors
///
/// The driver's error; EBUSY if the old server is not gone at the deadline;
/// [`ControlError::Another`].
pub(crate) fn begin_recovery(
    driver: &mut impl Recovers,
    id: u32,
    owner: &Owner,
    deadline: Instant,
) -> Result<(), ControlError> {
    loop {
        driver.wait_for_remains(id, deadline)?;
        owner.check(&driver.info(id)?)?;
        match driver.recover(id) {
            Err(error) if error.errno() == Some(EBUSY) && Instant::now() < deadline => {
                thread::sleep(PAUSE);
            }
            result => return result,
        }
    }
}

/// The pause before a refused command is repeated.
const PAUSE: Duration = Duration::from_millis(2);

/// The driver's error for a device that has a server.
const EBUSY: i32 = 16;

/// The control commands that give a device another server.
pub(crate) trait Recovers {
    fn wait_for_remains(&mut self, id: u32, deadline: Instant) -> Result<(), ControlError>;
    fn info(&mut self, id: u32) -> Result<Info, ControlError>;
    fn recover(&mut self, id: u32) -> Result<(), ControlError>;
}

impl Recovers for Control {
    fn wait_for_remains(&mut self, id: u32, deadline: Instant) -> Result<(), ControlError> {
        self.remains_are_gone(id, deadline)
    }
    fn info(&mut self, id: u32) -> Result<Info, ControlError> {
        Self::info(self, id)
    }
    fn recover(&mut self, id: u32) -> Result<(), ControlError> {
        self.start_recovery(id)
    }
}

/// The control commands that remove a device.
pub(crate) trait Removes {
    fn info(&mut self, id: u32) -> Result<Info, ControlError>;
    fn stop(&mut self, id: u32) -> Result<(), ControlError>;
    fn delete(&mut self, id: u32) -> Result<(), ControlError>;
}

impl Removes for Control {
    fn info(&mut self, id: u32) -> Result<Info, ControlError> {
        Self::info(self, id)
    }
    fn stop(&mut self, id: u32) -> Result<(), ControlError> {
        Self::stop(self, id)
    }
    fn delete(&mut self, id: u32) -> Result<(), ControlError> {
        Self::delete(self, id)
    }
}

/// Stops and deletes a device while it is ours; `stopped` is called in between. Returns whether
/// this has deleted it: another process may have done so before, and somebody else's device may
/// have its number.
pub(crate) fn remove(
    driver: &mut impl Removes,
    id: u32,
    ours: impl Fn(&Info) -> bool,
    stopped: impl FnOnce(),
) -> Result<bool, ControlError> {
    if !is_there(driver, id, &ours)? {
        return Ok(false);
    }
    driver.stop(id)?;
    stopped();
    // To stop a disk and to end its queues takes time.
    if !is_there(driver, id, &ours)? {
        return Ok(false);
    }
    driver.delete(id).map(|()| true)
}

fn is_there(
    driver: &mut impl Removes,
    id: u32,
    ours: impl Fn(&Info) -> bool,
) -> Result<bool, ControlError> {
    match driver.info(id) {
        Err(error) if error.errno() == Some(ENODEV) => Ok(false),
        info => info.map(|info| ours(&info)),
    }
}

/// The driver's error for a device that does not exist.
const ENODEV: i32 = 19;

#[cfg(test)]
mod tests;
