//! The allocator ends a process whose I/O path allocates, and only that.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use device::guard::{Allocator, IoPath};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const CHILD: &str = "PLATEN_GUARD_TEST";

/// The child: allocates before, after, on another thread or on the I/O path, or panics there.
fn child(what: &str) {
    let before = vec![1_u8; 100];
    let path = IoPath::enter();
    match what {
        "on the path" => drop(std::hint::black_box(vec![2_u8; 100])),
        "panics" => panic!("the reason"),
        _ => {}
    }
    drop(before);
    drop(path);
    drop(std::hint::black_box(vec![3_u8; 100]));
}

#[test]
fn an_allocation_on_the_io_path_ends_the_process() {
    if !cfg!(debug_assertions) {
        eprintln!("skipped: the guard is in debug builds only");
        return;
    }
    if let Ok(what) = std::env::var(CHILD) {
        child(&what);
        return;
    }
    let run = |what: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .env(CHILD, what)
            .env("RUST_BACKTRACE", "0")
            .args(["--exact", "an_allocation_on_the_io_path_ends_the_process", "--nocapture"])
            .output()
            .unwrap();
        (output.status, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = run("elsewhere");
    assert!(status.success(), "{status}: {said}");
    let (status, said) = run("on the path");
    assert_eq!(status.signal(), Some(6), "{said}");
    assert!(said.contains("an I/O thread allocated memory"), "{said}");
    // A panic is its own message.
    let (status, said) = run("panics");
    assert_eq!(status.code(), Some(101), "{said}");
    assert!(said.contains("the reason"), "{said}");
}
