//! Links `platen-device` statically where the C library can be had so, and without what it never
//! uses.
//!
//! A swap device locks all that its program maps. Of the shared C library that is 2 MiB, of which
//! it calls a third. Cargo has no option for one binary's linking, so the linker gets arguments:
//! `-static-pie`, and a folder in which it finds the static libraries before the shared ones. With
//! another linker, or without the static libraries, the binary is linked as any other.
//!
//! A release build ends at a panic, and needs no tables for unwinding, 0.4 MiB: a linker script
//! drops them. `platen_device` therefore takes no backtraces. Relative relocations, of which there
//! are 7,000, take two bits each instead of 24 bytes where the C library knows that form. A linker
//! that can, such as Rust's own, keeps one of several functions with the same code: 57 KiB.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

/// The libraries that Rust's standard library asks the linker for on Linux with the GNU C library,
/// and the static libraries that have their contents.
const LIBRARIES: [(&str, &[&str]); 7] = [
    ("libc.a", &["libc.a"]),
    ("libm.a", &["libm.a"]),
    ("libgcc_s.a", &["libgcc_eh.a", "libgcc.a"]),
    ("libutil.a", &["libc.a"]),
    ("librt.a", &["libc.a"]),
    ("libpthread.a", &["libc.a"]),
    ("libdl.a", &["libc.a"]),
];

/// A script beside the linker's own.
const WITHOUT_TABLES: &str = "SECTIONS {
  /DISCARD/ : { *(.eh_frame .eh_frame.* .gcc_except_table .gcc_except_table.*) }
} INSERT AFTER .text;
";

/// Packs relative relocations (DT_RELR).
const PACK: &str = "-Wl,-z,pack-relative-relocs";

/// Keeps one of several functions with the same code. Nothing compares the addresses of functions:
/// Rust promises nothing about them.
const FOLD: &str = "-Wl,--icf=all";

/// Exits with 0 if its own relative relocations are packed and were applied.
const PACKED: &str = r"
#include <link.h>
static int target = 7;
static int *volatile relocated = &target;
int main(void) {
  for (const ElfW(Dyn) *at = _DYNAMIC; at->d_tag != DT_NULL; at++)
    if (at->d_tag == 36) return relocated == &target && *relocated == 7 ? 0 : 1;
  return 2;
}
";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of_target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let gnu = of_target("OS") == "linux" && of_target("ENV") == "gnu";
    let native = env::var("HOST") == env::var("TARGET");
    let Some(folder) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    if !(gnu && native && libraries(&folder).is_some()) {
        return;
    }
    let link = |argument: &str| println!("cargo::rustc-link-arg-bin=platen-device={argument}");
    link("-static-pie");
    link(&format!("-L{}", folder.display()));
    // Cargo tells build scripts nothing about `panic`. Where a test has this built to unwind, a
    // panic finds no tables, and the C compiler's library aborts.
    if env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        let script = folder.join("without-tables.ld");
        if fs::write(&script, WITHOUT_TABLES).is_ok() {
            link(&format!("-Wl,-T,{}", script.display()));
        }
        if folds(&folder) == Some(true) {
            link(FOLD);
        }
    }
    if packs(&folder) == Some(true) {
        link(PACK);
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

/// Whether a static program with packed relocations works: the C library knows them from 2.36 on,
/// and a program with an older one crashes at its start.
fn packs(folder: &Path) -> Option<bool> {
    let (source, program) = (folder.join("packed.c"), folder.join("packed"));
    fs::write(&source, PACKED).ok()?;
    let built = Command::new("cc")
        .args(["-static-pie", "-fPIE", PACK, "-o"])
        .args([&program, &source])
        .stderr(Stdio::null())
        .status()
        .ok()?;
    Some(built.success() && Command::new(&program).status().ok()?.success())
}

/// Whether the linker that rustc uses here can [`FOLD`].
fn folds(folder: &Path) -> Option<bool> {
    let (source, program) = (folder.join("folded.rs"), folder.join("folded"));
    fs::write(&source, "fn main() {}\n").ok()?;
    let mut rustc = Command::new(env::var_os("RUSTC")?);
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    rustc.args(flags.split('\x1f').filter(|flag| !flag.is_empty()));
    if let Ok(linker) = env::var("RUSTC_LINKER") {
        rustc.args(["-C", &format!("linker={linker}")]);
    }
    rustc.args(["-C", &format!("link-arg={FOLD}"), "-o"]).args([&program, &source]);
    Some(rustc.stdout(Stdio::null()).stderr(Stdio::null()).status().ok()?.success())
}
