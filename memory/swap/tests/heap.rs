//! The heap that a server leaves to its successor, in processes of their own: it changes the
//! process's allocator.
#![expect(unsafe_code, reason = "gives memory to the allocator")]

use std::fs::File;
use std::hint::black_box;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use rustix::io::{fcntl_setfd, FdFlags};
use swap::heap::{self, Heap};

const BYTES: usize = LEN - 1;
/// [`BYTES`] in whole pages.
const LEN: usize = (5 << 20) + PAGE;
const PAGE: usize = 4096;
const ROLE: &str = "PLATEN_TEST_HEAP_ROLE";

/// Runs this test program in a `role` with standard input `file`.
fn run(role: &str, file: &OwnedFd) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "in_a_process_of_its_own", "--nocapture", "--test-threads=1"]);
    // Locking fills stacks.
    command.env(ROLE, role).env("RUST_MIN_STACK", "262144").envs(swap::KEEPING);
    command.stdin(Stdio::from(file.try_clone().unwrap()));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains(role), "{role}: {text}");
}

/// Pages of the file that have only this byte.
fn pages_of(file: impl AsFd, byte: u8) -> usize {
    let file = File::from(file.as_fd().try_clone_to_owned().unwrap());
    let mut page = vec![0; PAGE];
    let mut count = 0;
    for offset in (0..file.metadata().unwrap().len()).step_by(PAGE) {
        file.read_exact_at(&mut page, offset).unwrap();
        count += usize::from(page.iter().all(|found| *found == byte));
    }
    count
}

/// Memory of the file, in pages.
fn allocated(file: impl AsFd) -> usize {
    let blocks = rustix::fs::fstat(file).unwrap().st_blocks;
    usize::try_from(blocks).unwrap() * 512 / PAGE
}

#[test]
fn a_successor_s_heap_is_the_memory_of_the_server_before_it() {
    let file = heap::file().unwrap();
    fcntl_setfd(&file, FdFlags::empty()).unwrap();
    for role in ["server", "successor", "successor's successor"] {
        run(role, &file);
        assert_eq!(allocated(&file), LEN / PAGE);
    }
    heap::discard(&file).unwrap();
    assert_eq!(allocated(&file), 0);
    run("server after a discard", &file);
}

/// 4 MiB in pieces of 64 KiB, of which 15 pages each are whole.
fn pieces(byte: u8) -> Vec<Vec<u8>> {
    (0..64).map(|_| black_box(vec![byte; 64 << 10])).collect()
}

/// Page faults of this process.
fn faults() -> usize {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after = stat.rsplit_once(") ").unwrap().1;
    after.split(' ').nth(7).unwrap().parse().unwrap()
}

fn private_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Does nothing without a role.
#[test]
fn in_a_process_of_its_own() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let file = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    // A free piece, as in a program that has read its arguments.
    let (free, used) = (black_box(vec![1_u8; 3 << 20]), black_box(vec![1_u8; 100]));
    drop(free);
    let before = private_kib();
    let mut heap = Heap::reserve(BYTES).unwrap();
    // Without the privilege, memory is not locked.
    let untaken = swap::own();
    heap.map(&file).unwrap();
    let more = private_kib().saturating_sub(before);
    assert!(more < LEN / 4 / 1024, "{more} KiB more of private memory; {untaken:?}");
    assert_eq!(allocated(&file), LEN / PAGE);

    // Until then the memory is another process's.
    let former = pages_of(&file, 0xa5);
    let private = pieces(0x3c);
    assert_eq!(pages_of(&file, 0x3c), 0);
    assert_eq!(pages_of(&file, 0xa5), former);

    // SAFETY: the processes that had this file before have ended.
    unsafe { heap.adopt() }.unwrap();
    let before = faults();
    let shared = pieces(0xa5);
    let more = faults() - before;
    assert!(more < 30, "{more} page faults");
    let found = pages_of(&file, 0xa5);
    assert!(found >= 64 * 15, "{found} pages");
    drop(used);
    // The allocator zeroes what it hands out as zeroed.
    drop((shared, private));
    for _ in 0..128 {
        let zeroed = black_box(vec![0_u8; 64 << 10]);
        assert!(zeroed.iter().all(|byte| *byte == 0));
        std::mem::forget(zeroed);
    }
    println!("{role} has ended");
}
