//! Gives the shared object its SONAME, and the dependency on libusdm.so.0.
//!
//! Cargo does not order two cdylibs, so the link uses a stub of libusdm with its name and symbols,
//! which is not installed.

use std::path::Path;

const STAND_IN: &str = "
int platen_usdm_read(void) { return 0; }
int platen_usdm_write(void) { return 0; }
void platen_usdm_configure(void) {}
unsigned long platen_usdm_violations(void) { return 0; }
";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let source = Path::new(&out).join("usdm.c");
    let object = Path::new(&out).join("libusdm.so.0");
    std::fs::write(&source, STAND_IN).expect("OUT_DIR can be written");
    let mut compiler = cc::Build::new().get_compiler().to_command();
    compiler.args(["-shared", "-fPIC", "-Wl,-soname,libusdm.so.0", "-o"]).arg(&object).arg(&source);
    let status = compiler.status().expect("the C compiler runs");
    assert!(status.success(), "the stand-in of libusdm compiles");

    let link = |argument: &str| println!("cargo::rustc-cdylib-link-arg={argument}");
    link("-Wl,-soname,libqat.so.4");
    link("-Wl,-z,nodelete");
    link("-Wl,-rpath,$ORIGIN");
    link("-Wl,--no-as-needed");
    link(object.to_str().expect("a path that cargo can print"));
}
