//! The commands of a device: the program that a swap device locks in memory.

use std::process::ExitCode;

fn main() -> ExitCode {
    // A release build has no tables for unwinding (see build.rs): with a backtrace each error would
    // abort. There is one thread as yet.
    for name in ["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"] {
        std::env::remove_var(name);
    }
    platen::platen_device()
}
