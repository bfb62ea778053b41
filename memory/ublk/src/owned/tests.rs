use super::*;
use crate::geometry::DiskState;
use std::io;

fn info(mark: u64) -> Info {
    let state = DiskState::Live;
    Info { id: 3, queues: 1, depth: 8, max_io: 4096, state, pid: 9, mark }
}

const OWNER: Owner = Owner { number: 4711, unmarked: false };
const EARLIER: Owner = Owner { unmarked: true, ..OWNER };

/// A device was deleted, and the driver has given its number to another one.
#[test]
fn a_number_alone_makes_no_device_ours() {
    let ours = info(OWNER.mark());
    assert!(OWNER.has(&ours) && EARLIER.has(&ours));
    for other in [Owner { number: 4712, ..OWNER }.mark(), 4711, 1] {
        let other = info(other);
        assert!(!OWNER.has(&other) && !EARLIER.has(&other), "{other:?}");
        let error = EARLIER.check(&other).unwrap_err();
        assert!(matches!(error, ControlError::Another { id: 3, .. }), "{error}");
    }
    // That of an earlier version.
    assert!(!OWNER.has(&info(0)) && EARLIER.has(&info(0)));
    OWNER.check(&ours).unwrap();
}

/// A driver whose device has these marks, one at each question, and always a server.
struct Busy(Vec<u64>, u32);

impl Recovers for Busy {
    fn wait_for_remains(&mut self, _: u32, _: Instant) -> Result<(), ControlError> {
        Ok(())
    }
    fn info(&mut self, _: u32) -> Result<Info, ControlError> {
        Ok(info(self.0.remove(0)))
    }
    fn recover(&mut self, id: u32) -> Result<(), ControlError> {
        self.1 += 1;
        Err(ControlError::Refused {
            id: id.into(),
            action: "starting recovery",
            source: io::Error::from_raw_os_error(EBUSY),
        })
    }
}

/// Its disk would get the contents of ours.
#[test]
fn a_device_that_has_the_number_of_ours_by_then_is_not_recovered() {
    let deadline = Instant::now() + Duration::from_secs(600);
    for asked in 0..3 {
        let mut marks = vec![OWNER.mark(); asked];
        marks.push(Owner { number: 4712, ..OWNER }.mark());
        let mut driver = Busy(marks, 0);
        let error = begin_recovery(&mut driver, 3, &OWNER, deadline).unwrap_err();
        assert!(matches!(error, ControlError::Another { id: 3, .. }), "{error}");
        assert_eq!(driver.1 as usize, asked);
    }
    // Its server is not gone in time.
    let mut driver = Busy(vec![OWNER.mark()], 0);
    let error = begin_recovery(&mut driver, 3, &OWNER, Instant::now()).unwrap_err();
    assert_eq!(error.errno(), Some(EBUSY));
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

/// Three devices with these marks. For a mark of -N there is the kernel's error N instead.
struct Three([u64; 3], Vec<u32>);

impl Removes for Three {
    fn info(&mut self, id: u32) -> Result<Info, ControlError> {
        let mark = self.0[id as usize];
        let errno = mark.wrapping_neg();
        if errno == 0 || errno > 4095 {
            return Ok(info(mark));
        }
        let source = io::Error::from_raw_os_error(i32::try_from(errno).unwrap());
        Err(ControlError::Refused { id: id.into(), action: "asking about it", source })
    }
    fn stop(&mut self, _: u32) -> Result<(), ControlError> {
        Ok(())
    }
    fn delete(&mut self, id: u32) -> Result<(), ControlError> {
        self.1.push(id);
        Ok(())
    }
}

/// Its server died after it had made it, and before it could tell its number.
#[test]
fn a_device_whose_number_is_unknown_is_found_by_its_mark() {
    let ours = OWNER.mark();
    let cases = [
        ([ours, 0, 1], None, OWNER, &[0_u32][..]),
        ([1, ours + 1, ours], None, EARLIER, &[2][..]),
        ([0, 0, ours], Some(0), EARLIER, &[0, 2][..]),
        ([0, 0, 1], Some(0), OWNER, &[][..]),
    ];
    for (marks, known, owner, expected) in cases {
        let mut driver = Three(marks, Vec::new());
        let gone = remove_all(&mut driver, &[0, 1, 2], known, owner).unwrap();
        assert_eq!((&gone[..], &driver.1[..]), (expected, expected), "{marks:?}");
    }
}

/// Regression: the first error ended the search, and our disk stayed, with its waiting users.
#[test]
fn an_error_about_another_device_leaves_none_of_ours_behind() {
    const EINVAL: u64 = 22_u64.wrapping_neg();
    const EIO: u64 = 5_u64.wrapping_neg();
    let ours = OWNER.mark();
    for (marks, known, errno) in [
        // A device of another user.
        ([EINVAL, 1, ours], None, None),
        ([EINVAL, 1, ours], Some(2), None),
        // It may be ours.
        ([EINVAL, 1, ours], Some(0), Some(22)),
        ([EIO, 1, ours], None, Some(5)),
    ] {
        let mut driver = Three(marks, Vec::new());
        let done = remove_all(&mut driver, &[0, 1, 2], known, OWNER);
        assert_eq!(driver.1, [2], "{marks:?}");
        assert_eq!(done.err().and_then(|error| error.errno()), errno, "{marks:?}");
    }
}

#[test]
fn a_device_that_an_owner_has_left_is_found_and_stays() {
    const EINVAL: u64 = 22_u64.wrapping_neg();
    const EIO: u64 = 5_u64.wrapping_neg();
    let (ours, other) = (OWNER.mark(), Owner { number: 4712, ..OWNER });
    for (marks, expected) in [
        ([1, 0, ours], Ok(true)),
        ([other.mark(), 0, 1], Ok(true)),
        ([1, 0, ours + 7], Ok(false)),
        // A device of another user.
        ([EINVAL, 1, 0], Ok(false)),
        // It may be theirs.
        ([EIO, 1, 0], Err(Some(5))),
        ([EIO, 1, ours], Ok(true)),
    ] {
        let mut driver = Three(marks, Vec::new());
        let left = any_remains(&mut driver, &[0, 1, 2], &[OWNER, other]);
        assert_eq!(left.map_err(|error| error.errno()), expected, "{marks:?}");
        assert!(driver.1.is_empty());
    }
    // Without an owner the driver is not asked.
    assert!(!remains(&[], Duration::ZERO).unwrap());
}

#[test]
fn devices_are_found_where_the_kernel_lists_them() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["ublkc0", "ublkc17", "ublkb3", "ublkc", "ublkcx"] {
        std::fs::create_dir(folder.path().join(name)).unwrap();
    }
    let mut found = numbers(folder.path());
    found.sort_unstable();
    assert_eq!(found, [0, 17]);
    assert!(numbers(&folder.path().join("none")).is_empty());
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
    let left = any_remains(&mut Silent, &[3, 4], &[OWNER]);
    assert!(matches!(left, Err(ControlError::Silent { .. })), "{left:?}");
}
