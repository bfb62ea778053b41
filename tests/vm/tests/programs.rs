//! The programs of `make` as a user starts them.

use std::process::Command;

#[test]
fn a_mistake_gets_one_line_and_no_backtrace() {
    for program in [env!("CARGO_BIN_EXE_demo_memory"), env!("CARGO_BIN_EXE_swap_matrix")] {
        let output = Command::new(program)
            .args(["--of-memory", "much"])
            .env("RUST_BACKTRACE", "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
        assert!(said.starts_with("demo_memory: ") || said.starts_with("swap_matrix: "), "{said}");
    }
}
