//! A read that a killed process has left to the kernel: its bytes arrive when the process is gone,
//! and memory that the process shared belongs to another one by then. A loop device on a served
//! file is the disk that does not answer.
#![expect(unsafe_code, reason = "reads into memory that is shared with another process")]

use device::{
    Backend, Device, DeviceOptions, DeviceQueue, Errno, Extent, Op, Queue, Request, PAGE,
};
use fuse::{MountError, Server};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use store::{Block, Disk, FileDisk, Options, Store};

use rustix::fs::{ftruncate, memfd_create, MemfdFlags, OFlags};
use rustix::mm::{mmap, MapFlags, ProtFlags};

const PAGES: u64 = 4096;
/// The page that the server reads. Programs that look for signatures read at both ends of a disk.
const READ: u32 = 2049;
const HEAP: &str = "PLATEN_TEST_LATE_HEAP";

/// The bytes of the disk, and those that the successor has in its heap.
const ON_DISK: u8 = 0xd1;
const IN_HEAP: u8 = 0x4e;

/// Whether it is closed, and how many reads wait at it.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    fn close(&self, closed: bool) {
        self.state.lock().unwrap().0 = closed;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        state = self.changed.wait_while(state, |(closed, _)| *closed).unwrap();
        state.1 -= 1;
        self.changed.notify_all();
    }

    fn waiting(&self) -> usize {
        self.state.lock().unwrap().1
    }
}

/// A device of which the reads of one page wait at a gate.
struct Gated(Device, Arc<Gate>);

struct GatedQueue(DeviceQueue, Arc<Gate>);

impl Backend for Gated {
    type Queue = GatedQueue;

    fn pages(&self) -> u64 {
        self.0.pages()
    }

    fn open(&self) -> io::Result<GatedQueue> {
        Ok(GatedQueue(self.0.open()?, Arc::clone(&self.1)))
    }
}

impl Queue for GatedQueue {
    fn submit(&mut self, tag: u64, request: Request) -> Option<Result<(), Errno>> {
        if request.op == Op::Read && request.page == u64::from(READ) {
            self.1.pass();
        }
        self.0.submit(tag, request)
    }

    fn reap(&mut self, each: &mut dyn FnMut(u64, Result<(), Errno>)) -> usize {
        self.0.reap(each)
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn arm(&mut self) -> bool {
        self.0.arm()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    fn patch(&mut self, page: u64, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        self.0.patch(page, at, bytes)
    }

    fn extent(&mut self, page: u64, most: u64) -> Result<Extent, Errno> {
        self.0.extent(page, most)
    }
}

/// A loop device, which is detached at the end.
struct Loop(String);

impl Loop {
    fn on(path: &Path) -> Option<Self> {
        let mut losetup = Command::new("losetup");
        match losetup.args(["--find", "--show", "--direct-io=on"]).arg(path).output() {
            Ok(made) if made.status.success() => {
                Some(Self(String::from_utf8(made.stdout).unwrap().trim().to_owned()))
            }
            other => {
                println!("skipped: losetup: {other:?}");
                None
            }
        }
    }

    /// Whether the kernel has requests for it.
    fn is_busy(&self) -> bool {
        let name = Path::new(&self.0).file_name().unwrap().to_str().unwrap();
        let inflight = fs::read_to_string(format!("/sys/block/{name}/inflight")).unwrap();
        inflight.split_whitespace().any(|number| number != "0")
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(300);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The process that is killed: its heap is the shared memory, as that of a swap server is.
fn server(heap: &str) {
    let heap = OpenOptions::new().read(true).write(true).open(heap).unwrap();
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { mmap(null_mut(), PAGE, both, MapFlags::SHARED, &heap, 0) }.unwrap();
    // SAFETY: a page of its own, aligned, of initialised bytes; the other process writes to it only
    // when this one is gone.
    let block = unsafe { &mut *start.cast::<Block>() };
    let disk = FileDisk::inherit(rustix::stdio::stdin()).unwrap();
    if disk.is_killable() {
        let read = disk.read(READ, block);
        panic!("the disk has answered: {read:?}");
    }
}

#[test]
fn a_read_of_a_killed_server_changes_no_memory_that_its_successor_has() {
    if let Ok(heap) = std::env::var(HEAP) {
        return server(&heap);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let store = Store::create(PAGES, Options::default()).unwrap();
    let device = Device::new(&store, &DeviceOptions::default()).unwrap();
    device.queue().unwrap().write_now(READ.into(), &[ON_DISK; PAGE]).unwrap();
    let gate = Arc::<Gate>::default();
    let served = match Server::mount(&Gated(device, Arc::clone(&gate)), &path, 4) {
        Ok(served) => served,
        Err(error @ MountError::Mount { .. }) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let Some(disk) = Loop::on(&path) else { return drop(served.stop()) };

    let heap: OwnedFd = memfd_create("heap", MemfdFlags::empty()).unwrap();
    ftruncate(&heap, PAGE as u64).unwrap();
    let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(direct).open(&disk.0);
    gate.close(true);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_read_of_a_killed_server_changes_no_memory_that_its_successor_has"])
        .env(HEAP, format!("/proc/self/fd/{}", heap.as_fd().as_raw_fd()))
        .stdin(Stdio::from(opened.unwrap()))
        .spawn()
        .unwrap();
    wait_until("the server reads", || gate.waiting() > 0 || child.try_wait().unwrap().is_some());
    let reads = gate.waiting() > 0;
    child.kill().unwrap();
    // It does not wait for the disk.
    wait_until("the server is gone", || child.try_wait().unwrap().is_some());
    let heap = File::from(heap);
    heap.write_all_at(&[IN_HEAP; PAGE], 0).unwrap();
    gate.close(false);
    wait_until("the disk answers", || gate.waiting() == 0 && !disk.is_busy());
    let mut found = [0; PAGE];
    heap.read_exact_at(&mut found, 0).unwrap();
    drop(disk);
    wait_until("the loop device lets go", || {
        let listed = Command::new("losetup").arg("--associated").arg(&path).output();
        listed.unwrap().stdout.is_empty()
    });
    served.stop().unwrap();
    if !reads {
        return println!("skipped: no io_uring here");
    }
    let changed = found.iter().filter(|&&byte| byte != IN_HEAP).count();
    assert_eq!(changed, 0, "bytes of the successor's heap; the first is {:02x}", found[0]);
}
