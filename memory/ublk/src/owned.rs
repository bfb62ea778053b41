//! Devices of ours, by their mark: the number of a deleted device may be another one's the next
//! moment, whose contents must stay.

use std::time::Duration;

use crate::control::{Control, ControlError};
use crate::geometry::Info;

/// The mark of the devices of the process `owner`: the driver stores it with the device, and tells
/// it to everybody.
pub fn mark(owner: u32) -> u64 {
    u64::from(u32::from_be_bytes(*b"plat")) << 32 | u64::from(owner)
}

/// Deletes a device that will get no further server: users of its disk get errors instead of
/// waiting. Leaves alone a device without this [`mark`], or one without any unless `unmarked`.
/// Returns whether there was such a device.
///
/// # Errors
///
/// The driver's error.
pub fn abandon(
    id: u32,
    mark: u64,
    unmarked: bool,
    timeout: Duration,
) -> Result<bool, ControlError> {
    let ours = |info: &Info| is_of(info, mark, unmarked);
    remove(&mut Control::open(timeout)?, id, ours, || ())
}

pub(crate) fn is_of(info: &Info, mark: u64, unmarked: bool) -> bool {
    info.mark == mark || unmarked && info.mark == 0
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
mod tests {
    use super::*;
    use crate::geometry::DiskState;
    use std::io;

    fn info(mark: u64) -> Info {
        let state = DiskState::Live;
        Info { id: 3, queues: 1, depth: 8, max_io: 4096, state, pid: 9, mark }
    }

    /// A device was deleted, and the driver has given its number to another one.
    #[test]
    fn a_number_alone_makes_no_device_ours() {
        let ours = mark(4711);
        assert!(is_of(&info(ours), ours, false) && is_of(&info(ours), ours, true));
        for other in [mark(4712), 4711, 1] {
            let other = info(other);
            assert!(!is_of(&other, ours, false) && !is_of(&other, ours, true), "{other:?}");
        }
        // That of an earlier version.
        assert!(!is_of(&info(0), ours, false) && is_of(&info(0), ours, true));
    }

    /// The mark of the device that has the number, if any has it, at each question.
    struct Driver(&'static [Option<u64>], Vec<&'static str>);

    impl Removes for Driver {
        fn info(&mut self, _: u32) -> Result<Info, ControlError> {
            let (now, later) = self.0.split_first().unwrap();
            self.0 = later;
            let none = || io::Error::from_raw_os_error(ENODEV);
            now.map(info).ok_or_else(|| ControlError::Refused {
                id: 3,
                action: "asking about it",
                source: none(),
            })
        }
        fn stop(&mut self, _: u32) -> Result<(), ControlError> {
            self.1.push("stop");
            Ok(())
        }
        fn delete(&mut self, _: u32) -> Result<(), ControlError> {
            self.1.push("delete");
            Ok(())
        }
    }

    /// `ublk del` of another process has deleted it, for example.
    #[test]
    fn a_device_that_has_the_number_of_ours_by_then_is_neither_stopped_nor_deleted() {
        const OURS: Option<u64> = Some(4711);
        let cases: [(&[_], &[_], _); 5] = [
            (&[OURS, OURS], &["stop", "delete"], true),
            (&[Some(4712)], &[], false),
            (&[None], &[], false),
            (&[OURS, Some(4712)], &["stop"], false),
            (&[OURS, None], &["stop"], false),
        ];
        for (there, expected, removed) in cases {
            let mut driver = Driver(there, Vec::new());
            let mut stopped = false;
            let done = remove(&mut driver, 3, |info| info.mark == 4711, || stopped = true);
            assert_eq!(done.unwrap(), removed, "{there:?}");
            assert_eq!(driver.1, expected, "{there:?}");
            assert_eq!(stopped, driver.1.contains(&"stop"), "{there:?}");
        }
    }

    #[test]
    fn a_driver_that_does_not_answer_is_asked_for_nothing_else() {
        struct Silent;
        impl Removes for Silent {
            fn info(&mut self, _: u32) -> Result<Info, ControlError> {
                Err(ControlError::Silent { id: 3, action: "asking about it", seconds: 30 })
            }
            fn stop(&mut self, _: u32) -> Result<(), ControlError> {
                panic!("whose device is it?")
            }
            fn delete(&mut self, _: u32) -> Result<(), ControlError> {
                panic!("whose device is it?")
            }
        }
        let done = remove(&mut Silent, 3, |_| true, || ());
        assert!(matches!(done, Err(ControlError::Silent { .. })), "{done:?}");
    }
}
