//! The file behaves like a file under the kernel's system calls, and a loop device on it like a
//! disk.

use device::{Device, DeviceOptions, PAGE};
use fuse::{MountError, Server};
use rustix::fs::{fallocate, FallocateFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{Options, Store};

const PAGES: u64 = 4096;
const BYTES: u64 = PAGES * PAGE as u64;

/// Deterministic pseudo-random numbers.
struct Noise(u64);

impl Noise {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let kind = self.next(4);
        (0..len)
            .map(|i| if kind == 0 { 0 } else { (self.next(1 << kind) * i as u64 % 251) as u8 })
            .collect()
    }
}

fn device() -> Device {
    let store = Store::create(PAGES, Options::default()).unwrap();
    Device::new(&store, &DeviceOptions::default()).unwrap()
}

/// Stops a server whose file nobody has open, or one of those that `again` makes. An unmount waits
/// a second for open files, and a process in a mount namespace of its own, as other tests have,
/// holds a copy of the mount.
fn assert_closed(server: Server, again: impl Fn() -> Server) {
    let mut server = Some(server);
    let closed = |_| !server.take().unwrap_or_else(&again).stop().unwrap();
    assert!((0..20).any(closed), "it counts as open each time");
}

/// Whether FUSE can be mounted here; prints the reason if not.
fn can_mount(path: &Path) -> bool {
    match Server::mount(&device(), path, 1) {
        Ok(server) => {
            assert_closed(server, || Server::mount(&device(), path, 1).unwrap());
            true
        }
        Err(error @ MountError::Mount { .. }) => {
            let why = std::error::Error::source(&error).map(ToString::to_string);
            println!("skipped: {error}: {}", why.unwrap_or_default());
            false
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn bytes_written_anywhere_are_read_back_and_holes_are_zeros() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    if !can_mount(&path) {
        return;
    }
    let device = device();
    let server = Server::mount(&device, &path, 4).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), BYTES);
    // Each thread writes its own quarter, at offsets and lengths of all kinds.
    std::thread::scope(|scope| {
        for quarter in 0..4 {
            let path = &path;
            scope.spawn(move || {
                let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
                let mut noise = Noise(77 + quarter);
                let (from, size) = (quarter * BYTES / 4, BYTES / 4);
                let mut model = vec![0_u8; usize::try_from(size).unwrap()];
                for _ in 0..400 {
                    let at = noise.next(size);
                    let most = (size - at).min(if noise.next(3) == 0 { 600_000 } else { 9000 });
                    let len = 1 + noise.next(most);
                    let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
                    match noise.next(8) {
                        0 => {
                            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                            fallocate(&file, flags, from + at, len).unwrap();
                            model[range].fill(0);
                        }
                        1 => {
                            fallocate(&file, FallocateFlags::ZERO_RANGE, from + at, len).unwrap();
                            model[range].fill(0);
                        }
                        2..=4 => {
                            let bytes = noise.bytes(range.len());
                            file.write_all_at(&bytes, from + at).unwrap();
                            model[range].copy_from_slice(&bytes);
                        }
                        _ => {
                            let mut bytes = vec![1; range.len()];
                            file.read_exact_at(&mut bytes, from + at).unwrap();
                            assert!(bytes == model[range], "{len} bytes at {at} of {quarter}");
                        }
                    }
                }
                let mut all = vec![1; model.len()];
                file.read_exact_at(&mut all, from).unwrap();
                assert!(all == model);
                file.sync_all().unwrap();
            });
        }
    });
    assert_closed(server, || {
        let again = Server::mount(&device, &path, 4).unwrap();
        File::open(&path).unwrap().read_exact_at(&mut [0; 4096], 0).unwrap();
        again
    });
    assert_eq!(fs::metadata(&path).unwrap().len(), 0, "unmounted");
    // Its contents are the device's, and still there when it is served again.
    let server = Server::mount(&device, &path, 1).unwrap();
    let mut first = vec![0; 1 << 20];
    File::open(&path).unwrap().read_exact_at(&mut first, 0).unwrap();
    assert!(first.iter().any(|byte| *byte != 0));
    server.stop().unwrap();
}

#[test]
fn requests_that_a_fixed_size_file_cannot_serve_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    if !can_mount(&path) {
        return;
    }
    assert!(matches!(Server::mount(&device(), folder.path(), 1), Err(MountError::NotAFile { .. })));
    let full = folder.path().join("full");
    fs::write(&full, b"something").unwrap();
    let refused = Server::mount(&device(), &full, 1).unwrap_err().to_string();
    assert!(refused.contains("holds 9 bytes"), "{refused}");
    let nowhere = folder.path().join("no/such/folder");
    assert!(matches!(Server::mount(&device(), &nowhere, 1), Err(MountError::Prepare { .. })));

    let server = Server::mount(&device(), &path, 2).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert!(file.set_len(BYTES / 2).is_err());
    assert_eq!(file.set_len(BYTES).ok(), Some(()));
    assert!(file.write_at(b"x", BYTES).is_err());
    assert_eq!(file.write_at(b"xyz", BYTES - 2).unwrap(), 2, "up to the end");
    assert_eq!(file.read_at(&mut [0; 10], BYTES).unwrap(), 0);
    assert!(fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096).is_err());
    assert!(fallocate(&file, FallocateFlags::empty(), 0, 4096).is_err());
    // A mode or an owner that would have no effect is refused; the present mode and times are not.
    let mode = |mode| file.set_permissions(fs::Permissions::from_mode(mode));
    assert_eq!(mode(0o644).unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()));
    mode(0o600).unwrap();
    let uid = file.metadata().unwrap().uid();
    let given = std::os::unix::fs::fchown(&file, Some(uid + 1), None).unwrap_err();
    assert_eq!(given.raw_os_error(), Some(Errno::PERM.raw_os_error()));
    file.set_modified(std::time::SystemTime::now()).unwrap();
    // The file is open: it is unmounted, and the result shows that.
    assert!(server.stop().unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn an_unmounted_file_has_ended_and_can_be_served_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    if !can_mount(&path) {
        return;
    }
    let device = device();
    let unmounted = |how| {
        rustix::mount::unmount(&path, how).or_else(|error| {
            let by = Command::new("fusermount3").args(["-u", "-z", "--"]).arg(&path).status();
            if by.is_ok_and(|status| status.success()) {
                Ok(())
            } else {
                Err(error)
            }
        })
    };
    let umount = |how| {
        let start = Instant::now();
        loop {
            // A process that another test is starting has a copy of a file that is open here.
            let done = unmounted(how);
            if done != Err(Errno::BUSY) || start.elapsed() > Duration::from_secs(300) {
                return done;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let server = Server::mount(&device, &path, 3).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"held", 4094).unwrap();
    umount(UnmountFlags::empty()).unwrap();
    let start = Instant::now();
    while !server.has_ended() {
        assert!(start.elapsed() < Duration::from_secs(300));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!server.stop().unwrap());
    // Unmounted while open: the open file is served until it is closed.
    let server = Server::mount(&device, &path, 3).unwrap();
    let file = File::open(&path).unwrap();
    umount(UnmountFlags::DETACH).unwrap();
    let mut got = [0; 4];
    file.read_exact_at(&mut got, 4094).unwrap();
    assert_eq!(&got, b"held");
    assert!(!server.has_ended());
    assert!(server.stop().unwrap(), "somebody had it open");
    file.read_exact_at(&mut got, 4094).unwrap();
}

/// A device whose reads panic.
struct Broken;

struct BrokenQueue;

impl device::Backend for Broken {
    type Queue = BrokenQueue;

    fn pages(&self) -> u64 {
        PAGES
    }

    fn open(&self) -> std::io::Result<BrokenQueue> {
        Ok(BrokenQueue)
    }
}

impl device::Queue for BrokenQueue {
    fn submit(&mut self, _: u64, _: device::Request) -> Option<Result<(), device::Errno>> {
        panic!("broken, as it should be")
    }

    fn reap(&mut self, _: &mut dyn FnMut(u64, Result<(), device::Errno>)) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        unreachable!("nothing is under way")
    }

    fn patch(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), device::Errno> {
        Ok(())
    }

    fn extent(&mut self, _: u64, _: u64) -> Result<device::Extent, device::Errno> {
        Err(device::Errno::Invalid)
    }
}

/// Runs this test again in a process of its own, which finds the file's path in its environment.
/// That process does not read the file itself: the kernel does not let a process exit while it
/// waits for its own answer.
#[test]
fn a_panic_in_a_request_ends_the_process() {
    const NAME: &str = "PLATEN_TEST_BROKEN_FILE";
    if let Some(path) = std::env::var_os(NAME) {
        let _server = Server::mount(&Broken, Path::new(&path), 4).unwrap();
        // Until the other process has seen enough.
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    if !can_mount(&path) {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "a_panic_in_a_request_ends_the_process", "--nocapture"]);
    child.env(NAME, &path).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    let start = Instant::now();
    while fs::metadata(&path).map_or(0, |file| file.len()) != BYTES {
        assert!(start.elapsed() < Duration::from_secs(300) && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    // A request whose thread is gone gets its error at the end of the process, or of its standard
    // input.
    let reading = std::thread::spawn({
        let path = path.clone();
        move || File::open(path).unwrap().read_at(&mut [0; 4096], 0)
    });
    while child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(300) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let ended = child.wait_with_output().unwrap();
    assert!(reading.join().unwrap().is_err());
    // The next mount removes the dead one.
    Server::mount(&device(), &path, 1).unwrap().stop().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("broken, as it should be"), "{said}");
    assert_eq!(ended.status.signal(), Some(6), "{ended:?}");
}

/// The process that serves the file is this test again, as above.
#[test]
fn a_dead_file_whose_size_the_kernel_remembers_is_served_again() {
    const NAME: &str = "PLATEN_TEST_KILLED_FILE";
    if let Some(path) = std::env::var_os(NAME) {
        let _server = Server::mount(&device(), Path::new(&path), 1).unwrap();
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    if !can_mount(&path) {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "a_dead_file_whose_size_the_kernel_remembers_is_served_again"]);
    child.env(NAME, &path).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = child.spawn().unwrap();
    let start = Instant::now();
    // The kernel remembers each of these answers for an hour.
    while fs::metadata(&path).map_or(0, |file| file.len()) != BYTES {
        assert!(start.elapsed() < Duration::from_secs(300) && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), BYTES, "from the kernel's memory");
    Server::mount(&device(), &path, 1).unwrap().stop().unwrap();
}

#[test]
fn a_loop_device_on_it_is_a_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    if !can_mount(&path) {
        return;
    }
    let losetup = |args: &[&str]| Command::new("losetup").args(args).output();
    let device = Arc::new(device());
    let server = Server::mount(&*device, &path, 4).unwrap();
    let name = path.to_str().unwrap();
    let made = match losetup(&["--find", "--show", "--direct-io=on", name]) {
        Ok(made) if made.status.success() => made,
        Ok(made) => return println!("skipped: {}", String::from_utf8_lossy(&made.stderr)),
        Err(error) => return println!("skipped: losetup: {error}"),
    };
    let disk = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let mut noise = Noise(5);
    let bytes: Vec<u8> = (0..300).flat_map(|_| noise.bytes(PAGE)).collect();
    {
        let file = OpenOptions::new().read(true).write(true).open(&disk).unwrap();
        file.write_all_at(&bytes, 40 * PAGE as u64).unwrap();
        file.sync_all().unwrap();
    }
    // Past the loop device's cache.
    let mut got = vec![0; bytes.len()];
    File::open(&path).unwrap().read_exact_at(&mut got, 40 * PAGE as u64).unwrap();
    assert!(got == bytes);
    let before = device.store().stats();
    let discarded = Command::new("blkdiscard").arg(&disk).output();
    match discarded {
        Ok(done) if done.status.success() => {
            File::open(&path).unwrap().read_exact_at(&mut got, 40 * PAGE as u64).unwrap();
            assert!(got.iter().all(|byte| *byte == 0), "discarded");
            println!("before discard: {before:?}, behind it: {:?}", device.store().stats());
        }
        other => println!("skipped: blkdiscard: {other:?}"),
    }
    assert!(losetup(&["--detach", &disk]).unwrap().status.success());
    // The kernel releases the file a moment later.
    let mut server = Some(server);
    while let Some(now) = server.take() {
        if Command::new("losetup").args(["--associated", name]).output().unwrap().stdout.is_empty()
        {
            now.stop().unwrap();
        } else {
            std::thread::sleep(std::time::Duration::from_millis(20));
            server = Some(now);
        }
    }
}
