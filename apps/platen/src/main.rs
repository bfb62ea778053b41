//! All commands.

use std::process::ExitCode;

fn main() -> ExitCode {
    platen::platen()
}
