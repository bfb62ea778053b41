//! The program as a user starts it, with a mistake.

use std::process::Command;

/// Regression: with RUST_BACKTRACE=1 an error was printed in Rust's form for developers, with a
/// backtrace.
#[test]
fn an_error_is_one_line_with_its_causes_and_no_backtrace() {
    let output = Command::new(env!("CARGO_BIN_EXE_platen-bench"))
        .args(["codec", "--set", "nowhere", "--mib", "1"])
        .env("RUST_BACKTRACE", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    // It has named its corpus before.
    let last = said.lines().last().unwrap();
    assert!(last.starts_with("platen-bench: there is no set nowhere: "), "{said}");
}
