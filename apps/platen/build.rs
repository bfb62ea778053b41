//! Links `platen-device` statically where the C library can be had so.
//!
//! A swap device locks all that its program maps. Of the shared C library that is 2 MiB, of which
//! it calls a third. Cargo has no option for one binary's linking, so the linker gets arguments:
//! `-static-pie`, and a folder in which it finds the static libraries before the shared ones. With
//! another linker, or without the static libraries, the binary is linked as any other.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// What Rust's standard library asks the linker for on Linux with the GNU C library, and the
/// static libraries that have it.
const LIBRARIES: [(&str, &[&str]); 7] = [
    ("libc.a", &["libc.a"]),
    ("libm.a", &["libm.a"]),
    ("libgcc_s.a", &["libgcc_eh.a", "libgcc.a"]),
    ("libutil.a", &["libc.a"]),
    ("librt.a", &["libc.a"]),
    ("libpthread.a", &["libc.a"]),
    ("libdl.a", &["libc.a"]),
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of_target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let gnu = of_target("OS") == "linux" && of_target("ENV") == "gnu";
    let native = env::var("HOST") == env::var("TARGET");
    let Some(folder) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    if gnu && native && libraries(&folder).is_some() {
        let binary = "cargo::rustc-link-arg-bin=platen-device";
        println!("{binary}=-static-pie");
        println!("{binary}=-L{}", folder.display());
    }
}

/// Makes the folder of static libraries: scripts of the linker that name them. `None` without one
/// of them.
fn libraries(folder: &Path) -> Option<()> {
    for (name, parts) in LIBRARIES {
        let parts: Option<Vec<String>> = parts.iter().map(|part| found(part)).collect();
        fs::write(folder.join(name), format!("GROUP ( {} )\n", parts?.join(" "))).ok()?;
    }
    Some(())
}

/// The path of a library of the C compiler.
fn found(name: &str) -> Option<String> {
    let asked = Command::new("cc").arg(format!("-print-file-name={name}")).output().ok()?;
    let path = String::from_utf8(asked.stdout).ok()?.trim().to_owned();
    // Of a library that it does not know it prints the name alone.
    Path::new(&path).is_absolute().then_some(path)
}
