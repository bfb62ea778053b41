//! The commands of a device: the program that a swap device locks in memory.

use std::process::ExitCode;

fn main() -> ExitCode {
    platen::platen_device()
}
